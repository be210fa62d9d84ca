"""Rows of a host array that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class HostRows:
    """Rows of an array, by number; a process that needs some of them reads those only.

    >>> import numpy as np
    >>> table = np.arange(20).reshape(10, 2)
    >>> rows = HostRows(table.__getitem__, np.array([7, 1, 3]), (2,))
    >>> rows.shape
    (3, 2)
    >>> rows[1:3, :]
    array([[2, 3],
           [6, 7]])
    """

    def __init__(self, read: Callable[[Any], Any], numbers: Any, tail: tuple[int, ...]) -> None:
        self._read = read
        self._numbers = numbers
        self._tail = tail

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the rows would have together."""
        return (len(self._numbers), *self._tail)

    @property
    def dtype(self) -> Any:
        """The element type, as it is read."""
        return self._read(self._numbers[:0]).dtype

    def __getitem__(self, index: Any) -> Any:
        rows, *others = index if isinstance(index, tuple) else (index,)
        return self._read(self._numbers[rows])[(slice(None), *others)]

    def __array__(self, *args: Any, **options: Any) -> Any:
        import numpy as np

        return np.asarray(self._read(self._numbers), *args)

    def cycled(self, rows: int) -> HostRows:
        """``rows`` rows: these, repeated from the first one."""
        import numpy as np

        return HostRows(self._read, np.resize(self._numbers, rows), self._tail)
