"""Equal layers as one line or row: ``blocks.0…31.attention/kernel``, or ``blocks.*``, for 32.

Messages and tables that list layers say the same of each block of a model. What differs are the
numbers in paths: a range in lines (:func:`merged`), stars in rows of a table (:func:`pattern`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
# The numbers of a path: blocks.0, block_3, layers/12, h0, dense#1; neither sizes nor bytes.
_NUMBER = re.compile(r"((?<=[A-Za-z_/#])\d+|(?<=[A-Za-z_\]]\.)\d+)")
_MOST = 4  # numbers that are listed one by one

_Row = tuple[str, ...]


def merged(lines: Iterable[str]) -> list[str]:
    """The lines, in order, with those as one that differ in the numbers of paths alone.

    Numbers of a path stand behind a letter or one of ``_/#.``; all others, such as sizes, must be
    equal. Where paths hold several numbers, as blocks in blocks do, each becomes a range if all of
    their combinations are there.

    >>> merged(f"blocks.{i}.{part}/kernel (8, 6): no" for i in range(32) for part in "qk")
    ['blocks.0…31.q/kernel (8, 6): no', 'blocks.0…31.k/kernel (8, 6): no']
    >>> merged(["h1/bias", "h2/bias", "h4/bias", "norm/bias", "h1/bias"])
    ['h1,2,4/bias', 'norm/bias']
    """
    alike: dict[_Row, list[_Row]] = {}
    for line in lines:
        parts = _NUMBER.split(line)
        alike.setdefault(tuple(parts[::2]), []).append(tuple(parts[1::2]))
    return [
        "".join(_woven(around, numbers))
        for around, rows in alike.items()
        for numbers in _ranges(list(dict.fromkeys(rows)))
    ]


def without_numbers(text: str) -> str:
    """Equal for texts that differ in their numbers alone."""
    return re.sub(r"\d+", "\0", text)


def pattern(texts: Sequence[str]) -> str:
    """The text of all, with stars for the numbers in which they differ.

    >>> pattern(["block_0/up_2", "block_11/up_2"])
    'block_*/up_2'
    """
    parts = [re.split(r"(\d+)", text) for text in texts]
    return "".join(
        column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True)
    )


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items with equal keys together, in the order in which each key is met first.

    >>> grouped(["a1", "b", "a2"], without_numbers)
    [['a1', 'a2'], ['b']]
    """
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def short_list(names: Sequence[str], most: int = 2) -> str:
    """The first names, and how many more there are.

    >>> short_list(["a", "b", "c"]), short_list([])
    ('a, b and 1 more', '-')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "-"


def _ranges(rows: list[_Row]) -> list[_Row]:
    """Rows of numbers with columns as ranges, the innermost first; equal columns are one."""
    columns = list(zip(*rows, strict=True))
    for column in dict.fromkeys(reversed(columns)):
        places = [place for place, other in enumerate(columns) if other == column]
        by_row: dict[_Row, list[str]] = {}
        for row in rows:
            rest = tuple(n for place, n in enumerate(row) if place not in places)
            by_row.setdefault(rest, []).append(row[places[0]])
        rows = [_filled(rest, places, _range(numbers)) for rest, numbers in by_row.items()]
    return rows


def _filled(rest: _Row, places: Sequence[int], text: str) -> _Row:
    others = iter(rest)
    return tuple(text if i in places else next(others) for i in range(len(rest) + len(places)))


def _range(numbers: list[str]) -> str:
    """``0…31``, or each where there are few or some are missing between."""
    if len(numbers) == 1:
        return numbers[0]
    ordered = sorted(numbers, key=int)
    first, last = int(ordered[0]), int(ordered[-1])
    if last - first == len(ordered) - 1 and len(ordered) > 2:
        return f"{first}…{last}"
    shown = ordered if len(ordered) <= _MOST else [*ordered[: _MOST - 1], "…", ordered[-1]]
    return ",".join(shown)


def _woven(around: _Row, numbers: _Row) -> Iterable[str]:
    for text, number in zip(around, numbers, strict=False):
        yield text
        yield number
    yield around[-1]
