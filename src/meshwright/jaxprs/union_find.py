"""Things that were found to be one, with one of them to stand for all (union-find)."""

from __future__ import annotations

from typing import Self


class United:
    """A node of a union-find: uniting two roots makes one the ``parent`` of the other."""

    __slots__ = ("parent",)
    parent: Self

    def __init__(self) -> None:
        self.parent = self

    def root(self) -> Self:
        """What stands for all that this one is united with."""
        here = self
        while here.parent is not here:
            here.parent = here.parent.parent  # the way is shorter next time (path halving)
            here = here.parent
        return here
