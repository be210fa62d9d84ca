"""The schedule of a step with its moments: what a device and its links are busy with, and when.

``schedule.py`` runs through the same schedule and keeps the sums; here the spans are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..hlo.costs import Loop, Operation, read_costs
from ..hlo.links import links_of
from ..hlo.schedule import Clock
from ..hlo.schedule import _Timeline as Timeline  # its moments are what this file is about
from ..jaxprs.scopes import layer_of, phase_of

if TYPE_CHECKING:
    from ..planning.report import DryRun

COMPUTE, MEMORY = "compute", "memory"
_MOST_SPANS = 50_000  # of a loop; beyond, its body is drawn once, as long as all its rounds


@dataclass(frozen=True)
class Span:
    """Something that is busy from one moment to another.

    ``lane`` is ``"compute"``, ``"memory"``, or the axes that a collective runs over.
    """

    lane: str | tuple[str, ...]
    begin_s: float
    end_s: float
    layer: str
    phase: str


@dataclass(frozen=True)
class Moments:
    """The spans of one step, and how long it takes."""

    spans: tuple[Span, ...]
    length_s: float


def moments_of(run: DryRun) -> Moments | None:
    """When what happens in a step that was compiled; ``None`` where its time is not known."""
    if run.compiled is None or run.hardware is None or run.step_time_s is None:
        return None
    costs = read_costs(run.compiled.text, run.compiled.axes)
    links = links_of(run.compiled.target, run.hardware, run.compiled.axes)
    return record(costs.program, Clock(run.hardware, run.compiled.target.platform, links))


def record(program: Sequence[Operation | Loop], clock: Clock) -> Moments:
    """Runs through a program as :func:`meshwright.hlo.schedule.run` does."""
    recorder = _Recorder(clock, frozenset(e.ends for e in program if isinstance(e, Operation)))
    for item in program:
        if isinstance(item, Loop):
            recorder.repeat(record(item.body, clock), 1 if item.trips is None else item.trips)
        else:
            recorder.issue(item)
    return Moments(tuple(recorder.spans), recorder.spent.length)


class _Recorder(Timeline):
    def __init__(self, clock: Clock, awaited: frozenset[str]) -> None:
        super().__init__(clock, awaited)
        self.spans: list[Span] = []
        self._current: Operation | None = None

    def issue(self, operation: Operation) -> None:
        self._current = operation
        super().issue(operation)

    def repeat(self, body: Moments, times: int) -> None:
        """Goes through the body of a loop ``times`` times."""
        begin = self.spent.length
        self.spent.length += times * body.length_s
        if times * len(body.spans) > _MOST_SPANS:
            self.spans += (_moved(span, begin, times) for span in body.spans)
            return
        for round_ in range(times):
            self.spans += (_moved(span, begin + round_ * body.length_s) for span in body.spans)

    def _occupy(self, what: object, time_s: float) -> float:
        end = super()._occupy(what, time_s)
        self._add(what if isinstance(what, tuple) else MEMORY, end - time_s, end)
        return end

    def _work(self, operation: Operation) -> None:
        begin, computed = self.spent.length, self.spent.compute
        super()._work(operation)
        lane = COMPUTE if self.spent.compute > computed else MEMORY
        self._add(lane, begin, self.spent.length)

    def _add(self, lane: str | tuple[str, ...], begin: float, end: float) -> None:
        moment = self._current
        if end > begin and moment is not None:
            path = moment.collectives[0].path if isinstance(lane, tuple) else moment.path
            self.spans.append(Span(lane, begin, end, *_where(path)))


@functools.lru_cache(maxsize=4096)
def _where(path: str) -> tuple[str, str]:
    """The layer and the pass of a path; a program has the same ones over and over."""
    return layer_of(path), phase_of(path)


def _moved(span: Span, by_s: float, stretched: int = 1) -> Span:
    return replace(
        span, begin_s=by_s + stretched * span.begin_s, end_s=by_s + stretched * span.end_s
    )
