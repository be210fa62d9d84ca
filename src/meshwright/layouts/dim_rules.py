"""Named dims and the rules that lay them along the axes of a mesh.

A dim has a name and a size, ``batch:64``; a rule says along which axis dims of a name lie,
``batch:rows``, or along which axes, ``hidden:rows+cols``. One string of rules lays out a whole
program. The language is that of Mesh-TensorFlow (Shazeer et al. 2018).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import DimError, DivisibilityError, LayoutError, LayoutTypeError
from .layout import Layout
from .mesh import Mesh

_PLUS = "+"  # between the axes of one dim


@dataclass(frozen=True, order=True)
class Dim:
    """A named dimension of an array.

    >>> print(Dim("batch", 64))
    batch:64
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise DimError(f"a dim name must be a word such as 'batch'; received {self.name!r}.")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 0:
            raise DimError(
                f"the size of dim {self.name!r} must be a whole number, at least 0; "
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
AxesLike = str | tuple[str, ...] | list[str] | None
RulesLike: TypeAlias = "DimRules | str | Mapping[str, AxesLike] | Iterable[tuple[str, AxesLike]]"


def as_dims(dims: DimsLike) -> Dims:
    """Dims from a string such as ``"batch:64 io:16"``, from a :class:`Dim` or from several.

    Items of the text are separated by blanks, ``,``, ``.`` or ``;``. Raises :class:`DimError` for
    an invalid dim and for a duplicate name.

    >>> [str(dim) for dim in as_dims("batch:64; io:16")]
    ['batch:64', 'io:16']
    """
    if isinstance(dims, str):
        result = tuple(Dim(name, _size(size, dims)) for name, size in pairs_of(dims, "batch:64"))
    elif isinstance(dims, Dim):
        result = (dims,)
    else:
        try:
            result = tuple(item if isinstance(item, Dim) else Dim(*item) for item in dims)
        except TypeError:
            raise DimError(
                f"{dims!r} does not say names and sizes of dims: give 'batch:64 io:16', a Dim, or "
                "pairs of a name and a size."
            ) from None
    twice = [name for name, count in Counter(dim.name for dim in result).items() if count > 1]
    if twice:
        raise DimError(
            f"dim {twice[0]!r} appears twice in [{text_of(result)}]; dim names of one array must "
            "be unique. Rename one of them."
        )
    return result


def text_of(dims: Iterable[Dim]) -> str:
    """Dims as one reads them: ``batch:64 io:16``."""
    return " ".join(map(str, dims))


@dataclass(frozen=True)
class DimRules:
    """Which dims lie along which axes, for a whole program; an immutable value.

    Made from a text ``"batch:rows;hidden:cols"``, a mapping, or pairs. Several dims may lie along
    one axis where they never meet in one array, and a dim along several axes, the first of them
    the slowest: ``"hidden:rows+cols"``, or ``{"hidden": ("rows", "cols")}`` as in
    :attr:`meshwright.Plan.rules`. A dim of no axes, or of ``None`` as in Flax's lists of rules, is
    whole. Raises :class:`LayoutError` for a dim that two rules name and for
    an invalid rule, and :class:`LayoutTypeError`, a ``TypeError``, for an axis that is not a str.

    >>> rules = DimRules("batch:rows;hidden:cols")
    >>> rules.axes("hidden"), rules.axes("io")
    (('cols',), ())
    >>> print(rules)
    batch:rows;hidden:cols
    >>> DimRules({"hidden": ("rows", "cols")}) == DimRules("hidden:rows+cols")
    True
    """

    pairs: tuple[tuple[str, str], ...]  # the axes as one text, "rows+cols"

    def __init__(self, rules: RulesLike = ()) -> None:
        if isinstance(rules, DimRules):
            pairs = rules.pairs
        elif isinstance(rules, str):
            pairs = tuple(pairs_of(rules, "batch:rows"))
        else:
            pairs = _pairs_given(rules)
        pairs = tuple(dict.fromkeys(pairs))
        faults = [fault for dim, axes in pairs for fault in _faults_of_axes(dim, axes)]
        for dim, count in Counter(dim for dim, _ in pairs).items():
            if count > 1:
                axes = [axes for name, axes in pairs if name == dim]
                faults.append(
                    f"dim {dim!r} is given {count} axes ({', '.join(map(repr, axes))}) by {count} "
                    f"rules. Keep one rule; for all of these axes write '{dim}:{_PLUS.join(axes)}'."
                )
        if faults:
            raise LayoutError("\n".join(faults))
        object.__setattr__(self, "pairs", pairs)

    def __str__(self) -> str:
        return ";".join(f"{dim}:{axes}" for dim, axes in self.pairs)

    def __repr__(self) -> str:
        return f"DimRules({str(self)!r})"

    def axes(self, dim: str) -> tuple[str, ...]:
        """The axes that dims of this name lie along, the slowest first; none for most."""
        text = next((axes for name, axes in self.pairs if name == dim), None)
        return () if text is None else tuple(text.split(_PLUS))

    def axis(self, dim: str) -> str | None:
        """The axis that dims of this name lie along, or ``None``.

        Raises :class:`LayoutError` if they lie along several, which :meth:`axes` gives.
        """
        axes = self.axes(dim)
        if len(axes) > 1:
            raise LayoutError(
                f"dim {dim!r} lies along {len(axes)} axes ({_PLUS.join(axes)}) where one is "
                "supported. Lay it along one axis, or rename it where it is whole."
            )
        return axes[0] if axes else None

    def pieces(self, dim: str, mesh: Mesh) -> int:
        """Into how many pieces dims of this name are cut on a mesh.

        >>> DimRules("hidden:rows+cols").pieces("hidden", Mesh({"rows": 4, "cols": 2}))
        8
        """
        return math.prod(mesh[axis] for axis in self.axes(dim))

    def on(self, axes: Container[str]) -> DimRules:
        """The rules without axes that are not among these.

        >>> DimRules("batch:rows;hidden:rows+cols").on(["cols"])
        DimRules('hidden:cols')
        """
        present = {dim: [a for a in self.axes(dim) if a in axes] for dim, _ in self.pairs}
        return DimRules({dim: tuple(own) for dim, own in present.items() if own})

    def check(self, mesh: Mesh) -> None:
        """Raise :class:`LayoutError` if a rule names an axis that the mesh does not have."""
        unknown = [
            f"rule '{dim}:{axes}': {axis!r} is not an axis of the mesh ({mesh.axes_text})."
            for dim, axes in self.pairs
            for axis in self.axes(dim)
            if axis not in mesh
        ]
        if unknown:
            raise LayoutError("\n".join(unknown))

    def layout(self, dims: Sequence[Dim], mesh: Mesh | None = None, what: str = "array") -> Layout:
        """The layout of an array with these dims; with a mesh, its sizes are checked as well.

        Raises :class:`LayoutError` if two of the dims would lie along one axis and
        :class:`DivisibilityError` if one does not divide.

        >>> print(DimRules("batch:rows").layout(as_dims("batch:64 io:16")))
        [rows, unsharded]
        """
        self.check_together(dims, what)
        specs = [self.spec(dim.name) for dim in dims]
        if mesh is None:
            return Layout(specs)
        uneven = [
            f"{what} [{text_of(dims)}]: dim {dim.name!r} (size {dim.size}) does not divide over "
            f"{self._over(dim.name, mesh)}. Sizes that do: {_near(dim.size, pieces)}."
            for dim in dims
            if dim.size % (pieces := self.pieces(dim.name, mesh))
        ]
        if uneven:
            raise DivisibilityError("\n".join(uneven))
        return Layout(specs, mesh)

    def spec(self, dim: str) -> str | tuple[str, ...] | None:
        """The axes of a dim as a :class:`Layout` takes them."""
        axes = self.axes(dim)
        return axes if len(axes) > 1 else axes[0] if axes else None

    def _over(self, dim: str, mesh: Mesh) -> str:
        axes = self.axes(dim)
        named = " and ".join(f"{axis!r} (size {mesh[axis]})" for axis in axes)
        return f"{'axis' if len(axes) == 1 else 'axes'} {named}"

    def check_together(self, dims: Iterable[Dim], what: str) -> None:
        """Raise :class:`LayoutError` if two of these dims would lie along one axis."""
        dims, takers = tuple(dims), dict[str, list[Dim]]()
        for dim in dims:
            for axis in self.axes(dim.name):
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


def words_of(text: str) -> list[str]:
    """The words of a text about dims: what stands between spaces, commas, points or semicolons.

    >>> words_of("batch, length;d_model")
    ['batch', 'length', 'd_model']
    """
    return re.findall(r"[^\s,.;]+", text)


def is_name(name: object) -> bool:
    """Whether this may be the name of a dim: letters, digits and ``_``, and no digit first."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name) is not None


def pairs_of(text: str, like: str) -> Iterable[tuple[str, str]]:
    """The two words of each item of a text. Raises :class:`DimError` for one not ``like`` that."""
    for item in words_of(text):
        left, colon, right = item.partition(":")
        if not (left and colon and right) or ":" in right:
            raise DimError(f"{item!r} in {text!r} is not of the form {like!r}.")
        yield left, right


def _pairs_given(rules: object) -> tuple[tuple[str, str], ...]:
    """The pairs of a mapping or of pairs, whose axes are one string or several."""
    items: Any = rules.items() if isinstance(rules, Mapping) else rules
    try:
        listed = [(dim, axes) for dim, axes in items]
    except (TypeError, ValueError):
        raise LayoutError(
            f"{rules!r} does not say which dims lie along which axes: give "
            "'batch:rows;hidden:cols', a mapping, or pairs of names."
        ) from None
    pairs, faults = [], []
    for dim, axes in listed:
        several = tuple(axes or ()) if axes is None or isinstance(axes, list | tuple) else (axes,)
        if not isinstance(dim, str) or not all(isinstance(axis, str) for axis in several):
            faults.append(
                f"a rule names a dim and an axis, or a tuple of axes, as texts; received "
                f"{dim!r}: {axes!r}."
            )
        elif several:  # a dim of no axes is whole
            pairs.append((dim, _PLUS.join(several)))
    if faults:
        raise LayoutTypeError("\n".join(faults))
    return tuple(pairs)


def _faults_of_axes(dim: str, axes: str) -> Iterator[str]:
    several = axes.split(_PLUS)
    if not all(several):
        yield f"rule '{dim}:{axes}' has an empty axis next to '{_PLUS}': write '{dim}:rows+cols'."
    yield from (
        f"rule '{dim}:{axes}' names axis {axis!r} more than once."
        for axis, count in Counter(several).items()
        if axis and count > 1
    )


def _size(size: str, text: str) -> int:
    if not size.isdecimal():
        raise DimError(f"size {size!r} in {text!r} is not a whole number.")
    return int(size)


def _near(size: int, pieces: int) -> str:
    below = size // pieces * pieces
    return f"{below} and {below + pieces}" if below else str(pieces)
