"""Row-major numbers of indices, and runs among numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ravel(index: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major number of an index.

    >>> ravel((1, 2), (2, 3))
    5
    """
    number = 0
    for i, size in zip(index, sizes, strict=True):
        number = number * size + i
    return number


def unravel(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The index that has this row-major number.

    >>> unravel(5, (2, 3))
    (1, 2)
    """
    index = []
    for size in reversed(sizes):
        number, i = divmod(number, size)
        index.append(i)
    return tuple(reversed(index))


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of consecutive numbers, in their order.

    >>> runs([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    pairs: list[tuple[int, int]] = []
    for number in numbers:
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1] = pairs[-1][0], number
        else:
            pairs.append((number, number))
    return pairs
