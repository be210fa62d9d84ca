"""Which parts of a run of bytes are taken: first fit, so that the same few are used again."""

from __future__ import annotations

import bisect

ALIGNED_BYTES = 64  # a line of the processor's cache, and what JAX wants of an array it may keep


class Space:
    """Blocks in a run of ``num_bytes`` bytes; holds no memory itself.

    >>> space = Space(256)
    >>> space.take(100), space.take(100), space.take(100)
    (0, 128, None)
    >>> space.give(0)
    >>> space.take(10)
    0
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)]  # start and stop, in order; no two touch
        self._taken: dict[int, int] = {}  # start -> stop

    @property
    def taken_bytes(self) -> int:
        return sum(stop - start for start, stop in self._taken.items())

    def take(self, num_bytes: int) -> int | None:
        """The start of a block that was free, or ``None``: no free block is as large."""
        wanted = max(1, -(-num_bytes // ALIGNED_BYTES)) * ALIGNED_BYTES
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= wanted:
                left = [(start + wanted, stop)] if stop - start > wanted else []
                self._free[index : index + 1] = left
                self._taken[start] = start + wanted
                return start
        return None

    def give(self, start: int) -> None:
        """Free the block that starts here; one that is not taken does no harm."""
        stop = self._taken.pop(start, None)
        if stop is None:
            return
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
