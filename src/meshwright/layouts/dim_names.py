"""Names for the dims of a variable, beside a model that knows none.

A Keras or JAX model has arrays with bare dims. A layout map may name them, and then the same string
of rules lays the model out that lays out a program over named dims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import DimError, LayoutError
from .dim_rules import Dim, DimRules, Dims, is_name, words_of
from .layout import UNSHARDED, Layout

ANY = "_"  # the name of a dim that no rule splits


@dataclass(frozen=True, repr=False)
class DimNames:
    """One name per dim of an array, without sizes; made by :func:`dims`.

    In ``names``, ``_`` is a dim that is never split. ``pad=True`` is that of
    :class:`~meshwright.Layout`. Raises :class:`DimError`.

    >>> DimNames(("d_model", "d_ff")).names
    ('d_model', 'd_ff')
    """

    names: tuple[str, ...]
    pad: bool = False

    def __post_init__(self) -> None:
        faults = [_fault(name) for name in self.names if not is_name(name)]
        counts = Counter(name for name in self.names if name != ANY)
        faults += [
            f"dim {name!r} appears {count} times; dim names of one array must be unique. Name the "
            f"one that no rule should split '{ANY}'."
            for name, count in counts.items()
            if count > 1
        ]
        if not isinstance(self.pad, bool):
            faults.append(
                f"pad must be True (weights may be padded) or False; received {self.pad!r}."
            )
        if faults:
            raise DimError(f"dims({str(self)!r}): " + "\n".join(faults))

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.names)

    def of(self, sizes: Sequence[int]) -> Dims:
        """The dims of an array that has these sizes. Raises :class:`DimError` for another number.

        >>> [str(dim) for dim in dims("d_model d_ff").of([512, 2048])]
        ['d_model:512', 'd_ff:2048']
        """
        if len(sizes) != self.rank:
            raise DimError(
                f"there are {len(sizes)} dims {tuple(sizes)} and {self.rank} names [{self}]: "
                f"write one name per dim, '{ANY}' for one that is never split."
            )
        return tuple(Dim(name, size) for name, size in zip(self.names, sizes, strict=True))

    def layout(self, rules: DimRules) -> Layout:
        """The unbound layout that the rules give. Raises :class:`LayoutError` for two dims on one
        axis.

        >>> print(dims("d_model d_ff").layout(DimRules("d_ff:cols")))
        [unsharded, cols]
        """
        axes = [() if name == ANY else rules.axes(name) for name in self.names]
        for axis, count in Counter(axis for entry in axes for axis in entry).items():
            if count > 1:
                taking = [n for n, entry in zip(self.names, axes, strict=True) if axis in entry]
                raise LayoutError(
                    f"dims {' and '.join(map(repr, taking))} of [{self}] would both lie along axis "
                    f"{axis!r}, which can split one of them. Leave one out of the rules ({rules}), "
                    f"or name it '{ANY}' here."
                )
        specs = [UNSHARDED if name == ANY else rules.spec(name) for name in self.names]
        return Layout(specs, pad=self.pad)

    def whole(self, dim: int) -> DimNames:
        """The same names but for one dim that is never split."""
        return DimNames(tuple(ANY if i == dim else n for i, n in enumerate(self.names)), self.pad)

    def __str__(self) -> str:
        return " ".join(map(str, self.names))

    def __repr__(self) -> str:
        return f"dims({str(self)!r}{', pad=True' if self.pad else ''})"


def dims(names: str | Iterable[str | None], *, pad: bool = False) -> DimNames:
    """Names for the dims of a weight, an input or an activation, to be laid out by rules.

    One name per dim, in a text or a sequence; ``_`` or ``None`` names a dim that is never split.
    Where a layout is expected a bare sequence is always axes, and this is always names.
    ``pad=True`` pads a weight whose dims do not divide, as in :class:`~meshwright.Layout`. Raises
    :class:`DimError` for an invalid name and for a duplicate.

    >>> dims("d_model d_ff"), dims([None, "vocab"])
    (dims('d_model d_ff'), dims('_ vocab'))
    """
    if isinstance(names, str):
        names = words_of(names)
    elif not isinstance(names, Iterable):
        raise DimError(f"dim names must be a string such as 'd_model d_ff'; received {names!r}.")
    return DimNames(tuple(ANY if name is None else name for name in names), pad)


def _fault(name: object) -> str:
    if isinstance(name, str) and ":" in name:
        return f"{name!r}: names stand alone here; sizes are the array's own."
    return f"a dim name must be a word such as 'd_model'; received {name!r}."
