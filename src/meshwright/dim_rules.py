"""Named dims and the rules that lay them along the axes of a mesh.

A dim has a name and a size, ``batch:64``; a rule says along which axis dims of a name lie,
``batch:rows``. One string of rules lays out a whole program. The language is that of
Mesh-TensorFlow (Shazeer et al. 2018).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .errors import DimError, DivisibilityError, LayoutError
from .layout import Layout
from .mesh import Mesh

_BETWEEN = re.compile(r"[\s,.;]+")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, order=True)
class Dim:
    """A named dimension of an array.

    >>> print(Dim("batch", 64))
    batch:64
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise DimError(f"a dim's name is a word such as 'batch'; received {self.name!r}.")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 0:
            raise DimError(
                f"the size of dim {self.name!r} is a whole number from 0 on; "
                f"received {self.size!r}."
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"

    def resized(self, size: int) -> Dim:
        """A dim of the same name and another size."""
        return Dim(self.name, size)

    def renamed(self, name: str) -> Dim:
        """A dim of the same size and another name."""
        return Dim(name, self.size)


Dims = tuple[Dim, ...]
DimsLike = str | Dim | Iterable[Dim | tuple[str, int]]
RulesLike: TypeAlias = "DimRules | str | Mapping[str, str] | Iterable[tuple[str, str]]"


def as_dims(dims: DimsLike) -> Dims:
    """Dims from a text such as ``"batch:64 io:16"``, from a :class:`Dim` or from several.

    Items of the text stand apart by blanks, ``,``, ``.`` or ``;``. Raises :class:`DimError` for
    what is no dim, and for a name that comes twice.

    >>> [str(dim) for dim in as_dims("batch:64; io:16")]
    ['batch:64', 'io:16']
    """
    if isinstance(dims, str):
        found = tuple(Dim(name, _size(size, dims)) for name, size in pairs_of(dims, "batch:64"))
    elif isinstance(dims, Dim):
        found = (dims,)
    else:
        try:
            found = tuple(each if isinstance(each, Dim) else Dim(*each) for each in dims)
        except TypeError:
            raise DimError(
                f"{dims!r} does not say names and sizes of dims: give 'batch:64 io:16', a Dim, or "
                "pairs of a name and a size."
            ) from None
    twice = [name for name, count in Counter(dim.name for dim in found).items() if count > 1]
    if twice:
        raise DimError(
            f"dim {twice[0]!r} comes twice in [{text_of(found)}]: dims of one array have different "
            "names. Rename one of them."
        )
    return found


def text_of(dims: Iterable[Dim]) -> str:
    """Dims as one reads them: ``batch:64 io:16``."""
    return " ".join(map(str, dims))


@dataclass(frozen=True)
class DimRules:
    """Which dims lie along which axes, for a whole program; an immutable value.

    Made from a text ``"batch:rows;hidden:cols"``, a mapping, or pairs. Several dims may lie along
    one axis where they never meet in one array. Raises :class:`LayoutError` for a dim that is given
    two axes, and for what is no rule.

    >>> rules = DimRules("batch:rows;hidden:cols")
    >>> rules.axis("hidden"), rules.axis("io")
    ('cols', None)
    >>> print(rules)
    batch:rows;hidden:cols
    """

    pairs: tuple[tuple[str, str], ...]

    def __init__(self, rules: RulesLike = ()) -> None:
        if isinstance(rules, DimRules):
            pairs = rules.pairs
        elif isinstance(rules, str):
            pairs = tuple(pairs_of(rules, "batch:rows"))
        else:
            items = rules.items() if isinstance(rules, Mapping) else rules
            try:
                pairs = tuple((str(dim), str(axis)) for dim, axis in items)
            except (TypeError, ValueError):
                raise LayoutError(
                    f"{rules!r} does not say which dims lie along which axes: give "
                    "'batch:rows;hidden:cols', a mapping, or pairs of names."
                ) from None
        pairs = tuple(dict.fromkeys(pairs))
        for dim, count in Counter(dim for dim, _ in pairs).items():
            if count > 1:
                axes = ", ".join(repr(axis) for name, axis in pairs if name == dim)
                raise LayoutError(
                    f"dim {dim!r} is given {count} axes ({axes}); one dim lies along one axis. "
                    "Split the dim into two, and give each its axis."
                )
        object.__setattr__(self, "pairs", pairs)

    def __str__(self) -> str:
        return ";".join(f"{dim}:{axis}" for dim, axis in self.pairs)

    def __repr__(self) -> str:
        return f"DimRules({str(self)!r})"

    def axis(self, dim: str) -> str | None:
        """The axis that dims of this name lie along, or ``None``."""
        return next((axis for name, axis in self.pairs if name == dim), None)

    def check(self, mesh: Mesh) -> None:
        """Raise :class:`LayoutError` if a rule names an axis that the mesh does not have."""
        unknown = [(dim, axis) for dim, axis in self.pairs if axis not in mesh]
        if unknown:
            raise LayoutError(
                "\n".join(
                    f"rule '{dim}:{axis}': {axis!r} is not an axis of the mesh ({mesh.axes_text})."
                    for dim, axis in unknown
                )
            )

    def layout(self, dims: Sequence[Dim], mesh: Mesh | None = None, what: str = "array") -> Layout:
        """The layout of an array with these dims; with a mesh, its sizes are checked as well.

        Raises :class:`LayoutError` if two of the dims would lie along one axis and
        :class:`DivisibilityError` if one does not divide.

        >>> print(DimRules("batch:rows").layout(as_dims("batch:64 io:16")))
        [rows, unsharded]
        """
        self.check_together(dims, what)
        specs = [self.axis(dim.name) for dim in dims]
        if mesh is None:
            return Layout(specs)
        uneven = [
            f"{what} [{text_of(dims)}]: dim {dim.name!r} (size {dim.size}) does not divide over "
            f"axis {axis!r} (size {mesh[axis]}). Sizes that do: {_near(dim.size, mesh[axis])}."
            for dim, axis in zip(dims, specs, strict=True)
            if axis is not None and dim.size % mesh[axis]
        ]
        if uneven:
            raise DivisibilityError("\n".join(uneven))
        return Layout(specs, mesh)

    def check_together(self, dims: Iterable[Dim], what: str) -> None:
        """Raise :class:`LayoutError` if two of these dims would lie along one axis."""
        dims, takers = tuple(dims), dict[str, list[Dim]]()
        for dim in dims:
            if (axis := self.axis(dim.name)) is not None:
                takers.setdefault(axis, []).append(dim)
        faults = [
            f"{what} [{text_of(dims)}]: dims {' and '.join(repr(str(dim)) for dim in taking)} "
            f"would both lie along axis {axis!r}, which can split one of them. Leave one out of "
            f"the rules ({self}), or rename it where they meet."
            for axis, taking in takers.items()
            if len(taking) > 1
        ]
        if faults:
            raise LayoutError("\n".join(faults))


def pairs_of(text: str, like: str) -> Iterable[tuple[str, str]]:
    """The two words of each item of a text. Raises :class:`DimError` for one not ``like`` that."""
    for item in filter(None, _BETWEEN.split(text)):
        left, colon, right = item.partition(":")
        if not (left and colon and right) or ":" in right:
            raise DimError(f"{item!r} in {text!r} is not of the form {like!r}.")
        yield left, right


def _size(size: str, text: str) -> int:
    if not size.isdecimal():
        raise DimError(f"size {size!r} in {text!r} is not a whole number.")
    return int(size)


def _near(size: int, pieces: int) -> str:
    below = size // pieces * pieces
    return f"{below} and {below + pieces}" if below else str(pieces)
