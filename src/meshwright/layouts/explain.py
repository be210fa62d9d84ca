"""What a strategy does with a model, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..views import Viewable
from .mesh import Mesh
from .params import Placed

if TYPE_CHECKING:
    from ..stages.shares import LayerStages, StageShare
    from ..stages.table import TickTable


@dataclass(frozen=True)
class Explanation(Viewable):
    """Every variable of a model with its layout, the reason, and its bytes on one device.

    Of a pipeline, ``stages`` is what each stage has, ``ticks`` the tick table, ``layers`` says
    which stages have the weights of each layer, and ``notes`` what was done in another way than it
    might have been.
    """

    mesh: Mesh
    placed: tuple[Placed, ...]
    stages: tuple[StageShare, ...] = ()
    ticks: TickTable | None = None
    layers: tuple[LayerStages, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all variables on one device."""
        return sum(entry.bytes_per_device for entry in self.placed)

    @property
    def parameter_bytes_per_device(self) -> int:
        """Bytes of the trained parameters on one device."""
        return sum(p.bytes_per_device for p in self.placed if p.info.role == "parameter")

    def __getitem__(self, path: str) -> Placed:
        """The variable with this path, in any of its spellings."""
        for entry in self.placed:
            if path == entry.info.path or path in entry.info.spellings:
                return entry
        raise KeyError(path)
