"""Rows of a table: duplicates summed up, and only the rows that are named read or changed."""

from __future__ import annotations

import numpy as np


def aggregate(rows: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows, each once, and for each the sum of its values.

    Where no row is repeated, both are given back as they are.

    >>> import numpy as np
    >>> rows, values = aggregate(np.array([3, 1, 3]), np.array([[1.0], [2.0], [4.0]]))
    >>> rows.tolist(), values.tolist()
    ([1, 3], [[2.0], [5.0]])
    """
    if len(rows) < 2 or (rows[1:] > rows[:-1]).all():
        return rows, values
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    is_first = np.empty(len(rows), bool)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    if is_first.all():
        return rows, values
    return ordered[is_first], _sums(values, order, is_first)


def _sums(values: np.ndarray, order: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """For each run of ``order``, the sum of its values; ``is_first`` tells where one begins."""
    again = np.flatnonzero(~is_first)
    if len(again) > len(order) // 2:
        starts = np.flatnonzero(is_first)
        return np.add.reduceat(np.take(values, order, axis=0), starts, axis=0)
    # Where few rows come twice, it is quicker to add those few.
    total = np.take(values, order[is_first], axis=0)
    runs = np.cumsum(is_first)[again] - 1
    np.add.at(total, runs, np.take(values, order[again], axis=0))
    return total


def add_rows(table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """Add to the rows of a table, in place; a repeated row gets both."""
    rows, values = aggregate(rows, values)
    sums = np.take(table, rows, axis=0)  # several times as fast as indexing
    sums += values.astype(table.dtype, copy=False)
    table[rows] = sums


def subtract_rows(table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """Subtract from the rows of a table, in place; a repeated row loses both."""
    add_rows(table, rows, np.negative(values))
