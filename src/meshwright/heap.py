"""Keeps in the process what it has freed, so that the next run of a program need not ask for it.

XLA:CPU takes the memory of each run from the C library. By default glibc returns larger pieces to
the system as soon as they are free, and the next run waits while the system clears those pages
again: a batch of 32 MNIST images took 4.5 ms instead of 2.1, more than half of it in the kernel.

Threads have heaps of 64 MiB each, which glibc gives back whole as soon as they are free, whatever
its limits say, unless the heap before has less than the top pad left. With a top pad as large as
the largest piece, a heap that was needed for a piece stays. Otherwise it depended on the order of
threads, from one start to the next, whether a run found its memory there: a step of an MLP of
1024 × 1024 took 9 or 12.5 ms.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Mapping

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
_KEPT_BYTES = 512 << 20  # at the end of the heap
# Larger arrays are maps of their own, and go back when they are freed: glibc's own upper limit.
_OWN_MAP_BYTES = 32 << 20
_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Let the C library keep up to 512 MiB that are free; return whether it does.

    Without effect where the C library is not glibc, or the user has set one of glibc's own
    variables (``MALLOC_TRIM_THRESHOLD_`` and the like).
    """
    if not sys.platform.startswith("linux") or _is_set_by_user(os.environ):
        return False
    set_limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_limit is None:
        return False
    limits = (
        (_TRIM_THRESHOLD, _KEPT_BYTES),
        (_MMAP_THRESHOLD, _OWN_MAP_BYTES),
        (_TOP_PAD, _OWN_MAP_BYTES),
    )
    return all(set_limit(name, size) for name, size in limits)


def _is_set_by_user(environment: Mapping[str, str]) -> bool:
    return any(name.startswith(_VARIABLES) for name in environment)
