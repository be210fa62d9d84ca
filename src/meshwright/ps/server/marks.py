"""Which rows of a shard have changed since a client asked: a number beside each row.

All changes between two questions get the same number, so a push costs one more write per row. A
shard has marks, and their cost, from the first question on. Marks are in no snapshot: a server that
was started again has gone back to older rows, so a client must take all of them.
"""

from __future__ import annotations

import uuid

import numpy as np

_REMOVED_KEPT = 1 << 16  # at least; more removed keys than rows, and all rows are taken anew
_EVERY_ROW = slice(None)


class Marks:
    """The marks of one shard. ``life`` tells them from those before a restart.

    >>> marks = Marks(4)
    >>> before = marks.asked()
    >>> marks.add(np.array([2, 0]))
    >>> marks.since(before, 4).tolist(), marks.since(marks.asked(), 4).tolist()
    ([0, 2], [])
    """

    def __init__(self, capacity: int) -> None:
        self.life = uuid.uuid4().hex[:16]
        self._now = 1
        self._of_rows = np.zeros(capacity, np.uint32)
        self._removed: list[tuple[int, np.ndarray]] = []

    def add(self, at: np.ndarray | slice = _EVERY_ROW) -> None:
        """The rows at these positions have changed."""
        self._of_rows[at] = self._now

    def asked(self) -> int:
        """A mark: what changes from now on has changed since."""
        self._now += 1
        return self._now - 1

    def since(self, mark: int, num_rows: int) -> np.ndarray:
        """The positions of the rows that have changed since."""
        return np.flatnonzero(self._of_rows[:num_rows] > mark)

    # Of tables whose rows have keys

    def grow(self, capacity: int) -> None:
        """Make room for this number of rows."""
        larger = np.zeros(capacity, np.uint32)
        larger[: len(self._of_rows)] = self._of_rows
        self._of_rows = larger

    def reload(self, removed: np.ndarray, capacity: int) -> bool:
        """All rows are others, and these keys are gone; ``False`` if that is too much to keep."""
        self._of_rows = np.full(capacity, self._now, np.uint32)
        self._removed.append((self._now, removed))
        return sum(len(keys) for _, keys in self._removed) <= max(_REMOVED_KEPT, capacity)

    def removed_since(self, mark: int) -> np.ndarray:
        """The keys that were removed since; some may have been made again."""
        keys = [np.zeros(0, np.int64), *(keys for at, keys in self._removed if at > mark)]
        return np.unique(np.concatenate(keys))
