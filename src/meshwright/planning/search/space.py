"""What a search may choose from, and what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...hlo.groups import Axes
from .choices import EVERY_REMAT, Remat

Objective = Literal["time", "memory"]


@dataclass(frozen=True)
class Space:
    """What is searched: ``axes`` fixes the mesh; the others are what may be chosen."""

    axes: Axes | None = None
    max_axes: int = 3
    fewer_devices: bool = True
    zero: tuple[int, ...] = (0, 1, 2, 3)
    accumulate: tuple[int, ...] = (1, 2, 4, 8)
    remat: tuple[Remat, ...] = EVERY_REMAT


EVERYTHING = Space()
