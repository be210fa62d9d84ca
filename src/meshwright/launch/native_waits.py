"""How long a rank has waited in native code, seen from outside: a loop of its own says nothing.

JAX waits for a result in native code and shows no frame of Python for it. What is known is that the
main thread waits for another thread, that the process has done next to nothing since (else it may
compute something of its own), and that no module of Python's own (``threading``, ``subprocess``)
waits there. Only Linux says so.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_EVERY_S = 1.0
_RUNS_NS = 5e5  # in a second: waits with a time limit wake a thread five times, for 0.04 ms each
_WAKES = 10  # in a second
_ALL_RUN_S = 0.05  # in a second, of all threads together
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_FILE = re.compile(r'\s*File "(.*)", line (\d+)')
_LOCK = re.compile(r"\.acquire\(|^\s*with\b")  # of Python's own, which shows no frame either


class Sample(NamedTuple):
    """What the main thread of a process has done so far, and all of its threads together.

    ``queued_s`` is how long the main thread could have run, had a core been free.
    """

    at_s: float
    ran_ns: int
    wakes: int
    all_ran_s: float = 0.0
    queued_s: float = 0.0


class NativeWait:
    """Follows the main thread of one process; :meth:`look` says for how long it has waited.

    A wait counts once it is longer than ``after_s``, and if the stack that ``stack`` reads then
    shows that no code of Python's own library waits.
    """

    def __init__(self, after_s: float, stack: Callable[[], str]) -> None:
        self._after_s, self._stack = after_s, stack
        self._began: Sample | None = None
        self._looked_s = float("-inf")
        self._waits_s = 0.0
        self._is_native: bool | None = None  # not asked yet

    def look(self, pid: int, now_s: float) -> float:
        """For how long the thread has waited; 0 if it does not, or not for long enough."""
        if now_s - self._looked_s >= _EVERY_S:
            self._looked_s = now_s
            self._waits_s = self._look(pid, now_s)
        return self._waits_s

    def forget(self) -> None:
        """The process does something that it says itself."""
        self._began, self._waits_s = None, 0.0

    def _look(self, pid: int, now_s: float) -> float:
        sample = sample_of(pid, now_s) if _waits_for_a_thread(pid) else None
        began = self._began
        if sample is None or began is None or not is_one_wait(began, sample):
            self._began, self._is_native = sample, None
            return 0.0
        waits_s = now_s - began.at_s
        if waits_s <= self._after_s:
            return 0.0
        if self._is_native is None:
            self._is_native = waits_natively(self._stack())
        return waits_s if self._is_native else 0.0


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


def waits_natively(stack: str, library: str = sysconfig.get_path("stdlib")) -> bool:
    """Whether the innermost frame belongs to the program or a package, not to Python's library.

    Nor may its line take a lock, where that line can be read.

    >>> waits_natively('File "/home/me/train.py", line 7 in main', "/usr/lib/python3.11")
    True
    >>> waits_natively('File "/usr/lib/python3.11/threading.py", line 327', "/usr/lib/python3.11")
    False
    """
    match = _FILE.match(stack)
    if match is None:
        return False
    is_package = "site-packages" in match[1] or "dist-packages" in match[1]
    if not is_package and match[1].startswith(library):
        return False
    return _LOCK.search(linecache.getline(match[1], int(match[2]))) is None


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


def _waits_for_a_thread(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/task/{pid}/wchan").read_text().startswith("futex")
    except OSError:
        return False
