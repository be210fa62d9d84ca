"""Equal layers in one row: names that differ in their numbers alone, with stars for those.

Names of equal blocks differ so: ``block_0/up``, ``block_1/up``. A table of a deep model would
otherwise repeat each row for every block.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


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


def grouped(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    """Rows with equal keys together, in the order in which each is met first.

    >>> grouped(["a1", "b", "a2"], without_numbers)
    [['a1', 'a2'], ['b']]
    """
    found: dict[Hashable, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return list(found.values())
