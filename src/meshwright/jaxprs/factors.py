"""Dims as products of factors that are joined while a step is followed: a union-find.

A dim of an array is a row of factors, slowest first, so that what a reshape merges can be split
again, as in Shardy. Factors that must lie alike are united. Two factors of one array are kept
apart for ever: an axis of the mesh cuts one dim of an array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from .union_find import United


class Factor(United):
    """A factor of the size of some dim; united with others, or made of smaller ones."""

    __slots__ = ("apart", "number", "parts", "size")

    def __init__(self, size: int, number: int) -> None:
        super().__init__()
        self.size = size
        self.number = number  # in the order in which they were met
        self.parts: tuple[Factor, Factor] | None = None
        self.apart: set[Factor] = set()  # roots that some array has beside this one


Dim = tuple[Factor, ...]  # empty: never split
Dims = tuple[Dim, ...]


class Factors:
    """All factors of a step."""

    def __init__(self) -> None:
        self._count = 0
        self._apart: set[tuple[Factor, ...]] = set()

    def new(self, size: int) -> Dim:
        """A dim that is joined with nothing yet."""
        return (self._factor(size),) if size > 1 else ()

    def new_dims(self, shape: Sequence[int]) -> Dims:
        """New dims for an array."""
        return tuple(self.new(size) for size in shape)

    def new_like(self, dim: Dim) -> Dim:
        """A new dim of factors of the same sizes."""
        return tuple(self._factor(factor.size) for factor in leaves(dim))

    def tie(self, one: Dim, other: Dim) -> bool:
        """Let two dims lie alike; ``False`` where they cannot.

        They cannot where an array has both, or where their factors do not nest.
        """
        if not one or not other or one is other:
            return True
        mine, yours = leaves(one), leaves(other)
        if mine == yours:
            return True
        steps = _common(mine, yours)
        if steps is None or not _compatible(mine, yours):
            return False
        pairs = list(zip(self._cut(mine, steps), self._cut(yours, steps), strict=True))
        if any(b in a.apart for a, b in pairs):
            return False
        for a, b in pairs:
            self._unite(a.root(), b.root())
        return True

    def keep_apart(self, dims: Dims) -> None:
        """Never unite the factors of one array with each other."""
        factors = tuple(factor for dim in dims for factor in leaves(dim))
        if len(factors) < 2 or factors in self._apart:
            return
        self._apart.add(factors)
        for i, one in enumerate(factors):
            for other in factors[:i]:
                one.apart.add(other)
                other.apart.add(one)

    def distinct(self, dims: Dims) -> Dims:
        """The dims, with new ones for those that have a factor of one before."""
        factors = [factor for dim in dims for factor in leaves(dim)]
        if len(set(factors)) == len(factors):
            return dims
        earlier: set[Factor] = set()
        out: list[Dim] = []
        for dim in dims:
            mine = leaves(dim)
            out.append(dim if earlier.isdisjoint(mine) else self.new_like(dim))
            earlier.update(mine)
        return tuple(out)

    def _factor(self, size: int) -> Factor:
        self._count += 1
        return Factor(size, self._count)

    def _cut(self, factors: Sequence[Factor], steps: Sequence[int]) -> list[Factor]:
        """The factors, cut where the running product of sizes passes one of the steps."""
        out: list[Factor] = []
        before = 1
        for factor in factors:
            rest, end = factor, before * factor.size
            for step in steps:
                if before < step < end:
                    first, rest = self._split(rest, step // before)
                    out.append(first)
                    before = step
            out.append(rest)
            before = end
        return out

    def _split(self, factor: Factor, size: int) -> tuple[Factor, Factor]:
        parts = self._factor(size), self._factor(factor.size // size)
        factor.parts = parts
        for part, other in (parts, parts[::-1]):
            part.apart = {other, *factor.apart}
        for beside in factor.apart:
            beside.apart.discard(factor)
            beside.apart.update(parts)
        factor.apart = set()
        return parts

    def _unite(self, one: Factor, other: Factor) -> None:
        if one is other or other in one.apart:
            return
        if len(one.apart) < len(other.apart):
            one, other = other, one
        other.parent = one
        one.number = min(one.number, other.number)
        for beside in other.apart:
            beside.apart.discard(other)
            beside.apart.add(one)
        one.apart |= other.apart
        other.apart = set()


def leaves(dim: Iterable[Factor]) -> list[Factor]:
    """The factors as they are by now, united and cut."""
    roots: list[Factor] = []
    for factor in dim:
        root = factor if factor.parent is factor else factor.root()
        if root.parts is None:
            roots.append(root)
        else:
            roots += leaves(root.parts)
    return roots


def label(dim: Dim) -> Factor | None:
    """The factor of a dim that an axis cuts: the slowest one."""
    for factor in dim:
        root = factor.root()
        while root.parts is not None:
            root = root.parts[0].root()
        return root
    return None


def age(dim: Dim) -> int:
    """Smaller for dims that were met earlier. The dim must be one that can be split."""
    return leaves(dim)[0].number


def _common(mine: Sequence[Factor], yours: Sequence[Factor]) -> list[int] | None:
    """The running products of both, if each divides the next one."""
    steps = sorted({*_ends(mine), *_ends(yours)})
    if _ends(mine)[-1] != _ends(yours)[-1]:
        return None
    nested = all(b % a == 0 for a, b in itertools.pairwise(steps))
    return steps if nested else None


def _compatible(mine: Sequence[Factor], yours: Sequence[Factor]) -> bool:
    """Whether no two factors that overlap are kept apart, or are one factor out of step."""
    i = j = 0
    ends, others = _ends(mine), _ends(yours)
    while i < len(mine) and j < len(yours):
        a, b = mine[i], yours[j]
        level = ends[i] == others[j] and a.size == b.size
        if b in a.apart or (a is b and not level):
            return False
        i, j = i + (ends[i] <= others[j]), j + (others[j] <= ends[i])
    return True


def _ends(factors: Sequence[Factor]) -> list[int]:
    ends, product = [], 1
    for factor in factors:
        product *= factor.size
        ends.append(product)
    return ends
