"""What a rank does not report of itself, seen from outside: that it waits, or does nothing.

One that sleeps, or waits for a lock or for input, does nothing; one that is only slow computes,
reads, or has started another process that does. Only Linux says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from .limits import OWN, Limits
from .native_waits import NativeWait
from .progress import Progress
from .standstill import Sample, Standstill, sample_of

_BYTES_IN_A_SECOND = 1.25 * 2**20  # of work: so 64 KiB/s are a twentieth of it


class Unseen:
    """Follows one rank while it is in code of the program's own."""

    def __init__(self, limits: Limits, stack: Callable[[], str]) -> None:
        self._waits, self._idleness = NativeWait(limits.native_wait_s, stack), Standstill(of_all)

    def look(self, progress: Progress, now_s: float) -> tuple[float, float]:
        """For how long the rank has waited in native code, and has done next to nothing."""
        if progress.section not in OWN:
            self._waits.forget()
            self._idleness.forget()
            return 0.0, 0.0
        waits_s = self._waits.look(progress.pid, now_s)
        idle_s = self._idleness.look(progress.pid, now_s)
        return waits_s, min(idle_s, max(0.0, now_s - progress.since_s))


def of_all(pid: int, now_s: float) -> Sample | None:
    """The main thread's sample, with what all processes have run, or could have, together."""
    own = sample_of(pid, now_s)
    if own is None:
        return None
    started = [child for child in _descendants(pid) if child != os.getpid()]
    samples = [own, *filter(None, (sample_of(child, now_s) for child in started))]
    done_s = sum(sample.all_ran_s + sample.queued_s for sample in samples)
    return own._replace(all_ran_s=done_s + sum(map(_moving_s, [pid, *started])))


def _moving_s(pid: int) -> float:
    """The bytes that a process has read and written, as seconds: a slow disk costs little time."""
    try:
        rows = dict(r.split(": ") for r in Path(f"/proc/{pid}/io").read_text().splitlines())
    except (OSError, ValueError):
        return 0.0
    return (int(rows["rchar"]) + int(rows["wchar"])) / _BYTES_IN_A_SECOND


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)
