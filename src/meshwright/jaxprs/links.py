"""Which dims of an equation's operands and results belong together: its links."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

Shape = tuple[int, ...]
Place = tuple[int, int]  # which operand, or result, and which of its dims


class How(Enum):
    """What happens along the dims of a link.

    ``EACH``: an index of the results depends on the same index of the operands, and on no other.
    ``ALONG``: elements along the dim meet or move; it stays a dim of the results, of any size.
    ``SUM``: the operands' dim is gone, by a reduction that can be done piece by piece.
    ``WHOLE``: the operands' dim is gone, and all of it is needed at once.
    ``AT``: rows of a table that is written to at places that are values.
    ``MERGE``: dims of a reshape, slowest first, which hold the same elements before and after.
    ``GROUPS``: the slower factor of each dim, of which each index is by itself; links that come
    after it are about the rest of the first one.
    ``FILL``: dims of results alone; an index has the same elements whatever the size is.
    ``ANY``: any of these dims of operands may reach any of these dims of results.
    """

    EACH = 0
    ALONG = 1
    SUM = 2
    WHOLE = 3
    AT = 4
    MERGE = 5
    GROUPS = 6
    FILL = 7
    ANY = 8


class Link(NamedTuple):
    """Dims of operands and of results that belong together. ``size`` is that of ``GROUPS``."""

    how: How
    ins: tuple[Place, ...] = ()
    outs: tuple[Place, ...] = ()
    size: int = 0


class Shapes(NamedTuple):
    """What rows read of an equation: its parameters, the shapes of its operands and results."""

    params: Any
    ins: tuple[Shape, ...]
    outs: tuple[Shape, ...]

    @property
    def out(self) -> Shape:
        return self.outs[0]


Links = Iterable[Link]
Row = Callable[[Shapes], Links]
