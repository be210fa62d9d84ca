"""For how long a process has done next to nothing, seen from outside. Only Linux says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_EVERY_S = 1.0
_RUNS_NS = 5e5  # in a second: waits with a time limit wake a thread five times, for 0.04 ms each
_WAKES = 10  # in a second
_ALL_RUN_S = 0.05  # in a second, of all threads together
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Sample(NamedTuple):
    """What the main thread of a process has done so far, and all of its threads together.

    ``queued_s`` is how long the main thread could have run, had a core been free.
    """

    at_s: float
    ran_ns: int
    wakes: int
    all_ran_s: float = 0.0
    queued_s: float = 0.0


class Standstill:
    """Follows one process by its samples; :meth:`look` says for how long it stands still.

    ``sample`` reads one of a process at a time, or ``None`` where it does something else.
    """

    def __init__(self, sample: Callable[[int, float], Sample | None]) -> None:
        self._sample = sample
        self._began: Sample | None = None
        self._looked_s = float("-inf")
        self._still_s = 0.0

    def look(self, pid: int, now_s: float) -> float:
        """For how long all samples have been of one wait; 0 if the process does something."""
        if now_s - self._looked_s >= _EVERY_S:
            self._looked_s = now_s
            self._still_s = self._look(pid, now_s)
        return self._still_s

    def forget(self) -> None:
        """What comes is another wait."""
        self._began, self._still_s = None, 0.0

    def _look(self, pid: int, now_s: float) -> float:
        sample, began = self._sample(pid, now_s), self._began
        if sample is None or began is None or not is_one_wait(began, sample):
            self._began = sample
            return 0.0
        return now_s - began.at_s


def is_one_wait(began: Sample, now: Sample) -> bool:
    """Whether a thread has done so little between two looks that it has only waited.

    Nor may the rest of the process have done much.

    >>> is_one_wait(Sample(0.0, 10**9, 40), Sample(60.0, 10**9 + 10**7, 340))
    True
    >>> is_one_wait(Sample(0.0, 10**9, 40), Sample(60.0, 10**9 + 10**8, 640))
    False
    >>> is_one_wait(Sample(0.0, 10**9, 40, 9.0), Sample(60.0, 10**9, 40, 69.0))
    False
    """
    for_s = now.at_s - began.at_s + _EVERY_S
    return (
        now.ran_ns - began.ran_ns < _RUNS_NS * for_s
        and now.wakes - began.wakes < _WAKES * for_s
        and now.all_ran_s - began.all_ran_s < _ALL_RUN_S * for_s
    )


def sample_of(pid: int, now_s: float) -> Sample | None:
    """What a process has done so far; ``None`` where the system does not say."""
    try:
        schedule = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
        ran_ns, queued_ns, wakes = map(int, schedule.split())
        # User and system time of its own, and of the children that have ended.
        ticks = map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
    except (OSError, ValueError):
        return None
    return Sample(now_s, ran_ns, wakes, sum(ticks) / _TICKS, queued_ns / 1e9)
