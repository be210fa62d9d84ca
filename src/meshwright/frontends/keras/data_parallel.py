"""The strategy that splits batches alone."""

from __future__ import annotations

from ...layouts.mesh import Mesh
from ...layouts.placement import BatchLike
from ...step.local import Local
from ...step.options import Sums
from .sharded import Sharded


class DataParallel(Sharded):
    """Splits every batch over the devices, and with ``zero`` state too; variables are replicated.

    :class:`Sharded` with an empty map: ``mesh``, ``batch``, ``zero``, ``accumulate``, ``remat``,
    ``sums`` and ``local`` are the same, and so is what is raised.

    >>> import meshwright as mw
    >>> strategy = DataParallel(mw.create_mesh({"batch": 8}), zero=1)
    >>> print(strategy.mesh, strategy.placement.zero)
    batch=8 @ cpu:0-7 1
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        batch: BatchLike = "batch",
        zero: int = 0,
        accumulate: int = 1,
        remat: str = "none",
        sums: Sums = None,
        local: Local | None = None,
    ) -> None:
        options = {"accumulate": accumulate, "remat": remat, "sums": sums, "local": local}
        super().__init__(mesh, batch=batch, zero=zero, **options)
