"""Rows that Spark has handed to a process: on its host's disk, as many in every process.

They are written down before the group starts, so that all processes know how many each has: with
TensorFlowOnSpark's ``InputMode.SPARK`` an uneven partition makes the others wait for ever.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import DataError

Uneven = Literal["pad", "drop"]
_ROWS, _COUNT = "rows", "rows.json"
_AT_ONCE = 256


class Rows:
    """The rows of this process; every process has as many, and can go through them repeatedly.

    ``len(rows)`` is their number. Iterating yields them one by one; :meth:`batches` yields columns.
    """

    def __init__(self, path: Path, length: int) -> None:
        self._path, self._length = path, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        again = itertools.chain.from_iterable(_read(self._path) for _ in itertools.count())
        return itertools.islice(again, self._length)

    def batches(self, batch_size: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Batches of this process, each a tuple with one array for each column.

        The last one may have fewer rows. ``mw.LocalRows`` takes such batches for ``fit``.
        """
        rows = iter(self)
        while batch := list(itertools.islice(rows, batch_size)):
            yield tuple(np.asarray(column) for column in zip(*map(_columns, batch), strict=True))


def spool(rows: Iterable[Any], folder: Path) -> int:
    """Write rows down; returns how many there are."""
    count, remaining = 0, iter(rows)
    with (folder / _ROWS).open("wb") as file:
        while some := [_plain(row) for row in itertools.islice(remaining, _AT_ONCE)]:
            pickle.dump(some, file)
            count += len(some)
    return count


def agree_on(counts: Sequence[int], uneven: Uneven) -> int:
    """How many rows each process has, so that all have as many.

    Raises :class:`~meshwright.DataError` where a process has none.

    >>> agree_on([5, 4], "pad"), agree_on([5, 4], "drop")
    (5, 4)
    """
    empty = [str(rank) for rank, count in enumerate(counts) if not count]
    if empty:
        raise DataError(
            f"process {', '.join(empty)} of {len(counts)} has received no rows: the data has "
            f"{sum(counts)} rows in {len(counts)} partitions. Repartition it, or use fewer "
            "processes."
        )
    return max(counts) if uneven == "pad" else min(counts)


def note_length(folder: Path, length: int) -> None:
    """Write down how many of the rows there, or how many with repetitions, are to be used."""
    (folder / _COUNT).write_text(json.dumps(length))


def spooled(folder: Path) -> Rows | None:
    """The rows that were written down in this folder, if any were."""
    path = folder / _COUNT
    return Rows(folder / _ROWS, json.loads(path.read_text())) if path.exists() else None


def _read(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while True:
            try:
                yield from pickle.load(file)
            except EOFError:
                return


def _plain(row: Any) -> Any:
    """Spark's ``Row`` is a tuple; without its class it can be read where Spark is not installed."""
    return tuple(row) if isinstance(row, tuple) else row


def _columns(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)
