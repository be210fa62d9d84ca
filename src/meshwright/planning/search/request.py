"""What a search is asked: a step on a target, what may be chosen, and what it is for."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from ...hlo.groups import Axes
from ...targets.hardware import Hardware
from ...targets.target import Target
from ..graph import Graph
from .candidates import Candidate
from .choices import EVERY_REMAT, Cost, Layouts, Remat
from .compact import Compact, compact
from .cost import cost_of, divides, masks_of
from .setting import Setting, within_stages

Objective = Literal["time", "memory"]  # of training steps


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


@dataclass(frozen=True)
class Request:
    """A step on a target. Answers hold at most ``limit_bytes`` in one device.

    With ``stages``, an axis of a pipeline, the step is that of one stage on its devices.
    """

    graph: Graph
    target: Target
    hardware: Hardware
    objective: Objective = "time"
    limit_bytes: int | None = None
    space: Space = EVERYTHING
    stages: Axes = ()

    @property
    def num_devices(self) -> int:
        """The devices of the target, or of one stage."""
        return self.target.num_devices // math.prod(size for _, size in self.stages)

    @functools.cached_property
    def problem(self) -> Compact:
        """The step, made small for the target's platform."""
        return compact(self.graph, self.target.platform, self.target.kind)

    def setting(self, axes: Axes) -> Setting:
        """A mesh on the target, as numbers."""
        return within_stages(axes, self.stages, self.target, self.hardware)

    def divides(self, axes: Axes, mask: int, micro_batches: int = 1) -> bool:
        """Whether the rows of the batch can be split over a set of axes."""
        batch = self.problem.batch
        return batch is not None and divides(self.problem, axes, batch, mask, micro_batches)

    def candidate(self, layouts: Layouts) -> Candidate:
        """Layouts with what they cost by the model."""
        masks = masks_of(self.problem, layouts.axes, dict(layouts.rules))
        setting = self.setting(layouts.axes)
        return Candidate(layouts, cost_of(self.problem, setting, masks, layouts.choices))

    def fits(self, cost: Cost) -> bool:
        """Whether it keeps within the limit."""
        return self.limit_bytes is None or cost.peak_bytes <= self.limit_bytes

    def rank(self, cost: Cost) -> tuple[float, float]:
        """Less is better: by the objective, and of equals by the other figure."""
        time_s, peak = cost.time_s or 0.0, cost.peak_bytes
        return (time_s, peak) if self.objective == "time" else (peak, time_s)
