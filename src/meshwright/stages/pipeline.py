"""How a model is cut into stages, and in which order they work: a value without devices."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import PipelineError
from ..warn import warn
from .table import TickTable, table_of

Schedule = Literal["gpipe", "1f1b", "circular", "zero_bubble"]


@dataclass(frozen=True)
class Pipeline:
    """Stages of a model over an ``axis`` of the mesh, and the schedule by which they work.

    A batch is cut into ``micro_batches``, which travel through the stages one after another.
    ``"gpipe"`` runs all forward passes first (Huang et al., 2019). ``"1f1b"`` begins a backward
    pass as soon as it can, so that what is kept does not grow with the number of micro-batches
    (PipeDream-Flush, Narayanan et al., 2021). ``"circular"`` gives each stage ``repeats`` runs of
    blocks in place of one (Megatron's interleaved schedule). ``"zero_bubble"`` puts off the
    gradients of weights to fill idle ticks (ZB-H1, Qi et al., 2023).

    With ``remat_stages`` a stage keeps its inputs alone, and its backward pass computes its forward
    pass again; without, it keeps the results of its products, which takes more memory and less
    time. By default all schedules but ``"zero_bubble"`` recompute.

    Where the model is cut is found by itself, so that the busiest stage has the least to do; or
    ``cuts`` name the layer that each stage after the first begins with, by part of its path, as
    ``["blocks.6", "blocks.12", "blocks.18"]`` for four stages. Raises
    :class:`~meshwright.PipelineError` that lists every invalid choice.

    >>> pipeline = Pipeline("stage", micro_batches=16)
    >>> round(pipeline.table(stages=4).idle_share(), 3)
    0.158
    """

    axis: str
    micro_batches: int
    schedule: Schedule = "1f1b"
    repeats: int = 1
    remat_stages: bool | None = None
    cuts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        faults = [*self._axis_faults(), *self._count_faults(), *self._schedule_faults()]
        faults += [*self._remat_faults(), *self._cut_faults()]
        if faults:
            raise PipelineError("\n".join(faults))
        if self.cuts is not None:
            object.__setattr__(self, "cuts", tuple(self.cuts))

    @property
    def does_remat(self) -> bool:
        """Whether a backward pass computes its forward pass again."""
        return self.schedule != "zero_bubble" if self.remat_stages is None else self.remat_stages

    def table(self, stages: int, shares_loss: bool = False) -> TickTable:
        """What each of ``stages`` stages does at each tick.

        With ``shares_loss`` all of them compute what comes after the blocks, each for its part of
        the micro-batches, as a step does where that is much faster.

        Raises :class:`~meshwright.PipelineError` where the micro-batches of a circular schedule do
        not divide over the stages. Warns if there are fewer micro-batches than stages.
        """
        if not _is_count(stages):
            raise PipelineError(f"stages must be 1 or more; received {stages!r}.")
        if self.schedule == "circular" and self.micro_batches % stages:
            below, above = self.micro_batches // stages * stages, -(-self.micro_batches // stages)
            nearest = [str(n) for n in (below, above * stages) if n]
            raise PipelineError(
                f"schedule='circular' sends micro-batches around in groups of {stages}, one for "
                f"each stage; micro_batches={self.micro_batches} does not divide. The nearest that "
                f"do: {' and '.join(nearest)}."
            )
        if shares_loss and (self.schedule == "zero_bubble" or self.micro_batches % stages):
            raise PipelineError(
                f"shares_loss=True is not supported with schedule={self.schedule!r} and "
                f"micro_batches={self.micro_batches} on {stages} stages: it needs micro-batches "
                "that divide over the stages, and another schedule than 'zero_bubble'."
            )
        table = table_of(
            self.schedule, stages, self.micro_batches, self.repeats, shares_loss=shares_loss
        )
        if self.micro_batches < stages:
            warn(
                f"micro_batches={self.micro_batches} over {stages} stages leaves each device idle "
                f"for {table.idle_share():.0%} of a step. Use {4 * stages} micro-batches or more."
            )
        return table

    def _axis_faults(self) -> list[str]:
        if isinstance(self.axis, str) and self.axis:
            return []
        return [f"axis must be the name of an axis of the mesh; received {self.axis!r}."]

    def _count_faults(self) -> list[str]:
        counts = {"micro_batches": self.micro_batches, "repeats": self.repeats}
        return [
            f"{name} must be a whole number, 1 or more; received {value!r}."
            for name, value in counts.items()
            if not _is_count(value)
        ]

    def _cut_faults(self) -> list[str]:
        cuts = self.cuts
        if cuts is None:
            return []
        is_list = isinstance(cuts, Sequence) and not isinstance(cuts, str)
        if not is_list or not all(isinstance(cut, str) and cut for cut in cuts):
            return [f"cuts must be a list of layers' paths; received {cuts!r}."]
        if len(set(cuts)) < len(cuts):
            return [f"cuts must name every layer once; received {list(cuts)}."]
        return []

    def _remat_faults(self) -> list[str]:
        if self.remat_stages not in (True, False, None):
            return [
                f"remat_stages must be True, False or None; received {self.remat_stages!r}. Blocks "
                "are recomputed one by one with remat= of the strategy."
            ]
        if self.schedule == "zero_bubble" and self.remat_stages:
            return [
                "remat_stages=True is not supported with schedule='zero_bubble': gradients of "
                "weights that wait read what a forward pass keeps. Leave it out, or use "
                "schedule='1f1b'."
            ]
        return []

    def _schedule_faults(self) -> list[str]:
        schedules = get_args(Schedule)
        if self.schedule not in schedules:
            near = difflib.get_close_matches(str(self.schedule).lower(), schedules, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            names = ", ".join(map(repr, schedules))
            return [f"schedule must be one of {names}; received {self.schedule!r}{hint}"]
        if self.schedule == "circular" and self.repeats == 1:
            return ["schedule='circular' needs repeats, the runs of blocks per stage, 2 or more."]
        if self.schedule != "circular" and _is_count(self.repeats) and self.repeats > 1:
            return [
                f"repeats={self.repeats} is not supported with schedule={self.schedule!r}: use "
                "schedule='circular', or leave repeats out."
            ]
        return []


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
