"""How long a rank has waited in native code, seen from outside: a loop of its own says nothing.

JAX waits for a result in native code and shows no frame of Python for it. What is known is that the
main thread waits for another thread, that the process has done next to nothing since (else it may
compute something of its own), and that no module of Python's own (``threading``, ``subprocess``)
waits there. Only Linux says so.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

from .standstill import Sample, Standstill, sample_of

_FILE = re.compile(r'\s*File "(.*)", line (\d+)')
_LOCK = re.compile(r"\.acquire\(|^\s*with\b")  # of Python's own, which shows no frame either


class NativeWait:
    """Follows the main thread of one process; :meth:`look` says for how long it has waited.

    A wait counts once it is longer than ``after_s``, and if the stack that ``stack`` reads then
    shows that no code of Python's own library waits.
    """

    def __init__(self, after_s: float, stack: Callable[[], str]) -> None:
        self._after_s, self._stack = after_s, stack
        self._standstill = Standstill(_of_one_that_waits)
        self._is_native: bool | None = None  # not asked yet

    def look(self, pid: int, now_s: float) -> float:
        """For how long the thread has waited; 0 if it does not, or not for long enough."""
        waits_s = self._standstill.look(pid, now_s)
        if waits_s <= self._after_s:
            self._is_native = None
            return 0.0
        if self._is_native is None:
            self._is_native = waits_natively(self._stack())
        return waits_s if self._is_native else 0.0

    def forget(self) -> None:
        """The process does something that it says itself."""
        self._standstill.forget()


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


def _of_one_that_waits(pid: int, now_s: float) -> Sample | None:
    return sample_of(pid, now_s) if _waits_for_a_thread(pid) else None


def _waits_for_a_thread(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/task/{pid}/wchan").read_text().startswith("futex")
    except OSError:
        return False
