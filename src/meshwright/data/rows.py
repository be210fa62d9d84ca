"""Data of which each process reads its own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class LocalRows:
    """Says that each process's source yields only the rows of its own devices.

    Without it, every process reads the same whole batches and keeps its part of them. ``source``
    is anything that ``fit`` takes as ``x``. Its batches have the rows of this process: with 4
    processes and a global batch of 128, 32 rows each. All processes must yield the same number of
    batches, and of rows in each.

    >>> import numpy as np, keras, meshwright as mw
    >>> strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> mine = ((np.ones([16, 4]), np.ones([16, 1])) for _ in range(3))
    >>> data = mw.LocalRows(mine)
    >>> history = strategy.fit(model, data, steps_per_epoch=3, shuffle=False, verbose=0)
    """

    source: Any


class LocalBatch(NamedTuple):
    """A batch that holds the rows of this process's devices only."""

    arrays: Any


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
        return np.asarray(self._read(self._numbers), *args)

    @property
    def numbers(self) -> Any:
        """Which rows they are."""
        return self._numbers

    def cycled(self, rows: int) -> HostRows:
        """``rows`` rows: these, repeated from the first one."""
        return HostRows(self._read, np.resize(self._numbers, rows), self._tail)
