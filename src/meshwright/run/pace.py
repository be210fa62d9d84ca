"""How many steps to take between two checkpoints, from what was measured.

Too often costs time, and too seldom loses work. The interval that loses least is about the root of
twice the cost of a save times the mean time between failures (Young 1974; Daly 2006).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..launch.elastic import read_failures

_MEASURED = 32  # steps from which a step's time is known, and between two looks at a save
_PRIOR_S = 24 * 3600.0  # one failure a day, before any was seen


def best_interval_s(cost_s: float, between_failures_s: float) -> float:
    """The time between two saves that loses least, by Daly's estimate.

    >>> round(best_interval_s(cost_s=5.0, between_failures_s=24 * 3600))
    926
    """
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    root = math.sqrt(2 * cost_s * between_failures_s)
    part = math.sqrt(cost_s / (2 * between_failures_s))
    return root * (1 + part / 3 + part**2 / 9) - cost_s


class Pace:
    """When a run is saved: 32 steps after its start, and from then on as its measurements say.

    The cost of a save is for how long it holds the loop up and how much slower the steps are while
    it is written; it is never begun before the last one is written. Steps count alike in all
    processes, and times do not: ``agreed`` gives all of them the number of the first one.
    """

    def __init__(
        self, step: int, agreed: Callable[[int], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._agreed, self._clock = agreed, clock
        self._step, self._began = step, (step, clock())
        self._saved: tuple[int, float] | None = None  # step and time of the newest save
        self._blocked_s = 0.0
        self._written: tuple[int, float] | None = None  # step and time when it was complete
        self._look_at = self._due_at = step + _MEASURED
        self._is_known = True  # the first one comes then

    def is_due(self, step: int) -> bool:
        """Whether to save after this step; every process asks after every step."""
        self._step = step
        if not self._is_known and step >= self._look_at:
            steps = self._agreed(self._steps_between())
            self._is_known = steps > 0
            self._look_at = step + _MEASURED
            if self._saved is not None:
                self._due_at = max(step, self._saved[0] + steps)
        return self._is_known and step >= self._due_at

    def until_due(self, step: int) -> int:
        """How many steps may be taken before the next question."""
        return max(1, (self._due_at if self._is_known else self._look_at) - step)

    def saving(self, blocked_s: float) -> None:
        """A save has begun; starting it delayed the loop by this time."""
        now_s = self._clock()
        if self._saved is None:  # steps before it, with the compiler's time, tell nothing
            self._began = (self._step, now_s)
        self._saved, self._written, self._blocked_s = (self._step, now_s), None, blocked_s
        self._is_known, self._look_at = False, self._step + _MEASURED

    def written(self) -> None:
        """The save is complete; called by another thread."""
        self._written = self._step, self._clock()

    def _steps_between(self) -> int:
        """From the newest save to the next one; 0 where that is not known yet."""
        if self._saved is None or self._written is None:
            return 0
        (step, saved_s), (then, written_s) = self._saved, self._written
        (first, began_s), now_s = self._began, self._clock()
        if self._step == first:
            return 0
        step_s = max((now_s - began_s) / (self._step - first), 1e-6)
        cost_s = self._blocked_s + max(0.0, written_s - saved_s - (then - step) * step_s)
        failures, ran_s = read_failures()
        between_s = (ran_s + _PRIOR_S) / (failures + 1)
        interval_s = max(best_interval_s(cost_s, between_s), written_s - saved_s)
        return max(1, round(interval_s / step_s))
