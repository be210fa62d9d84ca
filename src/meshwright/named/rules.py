"""The rules in force: how every named array of a program is laid out while it is traced.

They are part of the context that ``jax.jit`` caches by: under other rules a function is retraced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax

from ..errors import LayoutError, MeshError
from ..layouts.dim_rules import Dim, DimRules, Dims, DimsLike, RulesLike, as_dims
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..scoped import scoped


@dataclass(frozen=True)
class BoundRules:
    """Rules and the mesh whose axes they name; a value, and ``rules=`` of every operation.

    ``mapped`` are dims that arrays have and do not show: those that ``vmap`` maps over. ``ahead``
    lays out what is traced for an abstract mesh, to be compiled for devices that are not present.

    >>> import meshwright as mw
    >>> import meshwright.named as mn
    >>> bound = mn.BoundRules(mn.DimRules("batch:rows"), mw.Mesh({"rows": 8}))
    >>> print(bound.layout(mn.as_dims("batch:16 io:2")))
    [rows, unsharded] on rows=8
    """

    rules: DimRules
    mesh: Mesh
    mapped: Dims = ()
    ahead: bool = False

    def __str__(self) -> str:
        return f"{self.rules} over ({self.mesh.axes_text})"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundRules, (self.rules, self.mesh, self.mapped, self.ahead)

    @property
    def only_check(self) -> bool:
        """Whether nothing is laid out, for there is nothing to lie on."""
        return self.mesh.is_abstract and not self.ahead

    def layout(self, dims: Sequence[Dim], what: str = "array") -> Layout:
        """The layout of an array with these dims. Raises :class:`LayoutError` if there is none."""
        dims = tuple(dims)
        layout = self._layouts.get(dims)
        if layout is None:
            self.check_together(dims, what)
            layout = self._layouts[dims] = self.rules.layout(dims, self.mesh, what)
        self.see(dims)
        return layout

    def check_together(self, dims: Sequence[Dim], what: str) -> None:
        """Raise :class:`LayoutError` if two of the dims would lie along one axis."""
        what = f"inside vmap: {what}" if self.mapped else what
        self.rules.check_together((*self.mapped, *dims), what)

    def mapping(self, dim: Dim) -> BoundRules:
        """The same rules inside a ``vmap`` over this dim."""
        return replace(self, mapped=(*self.mapped, dim))

    def see(self, dims: Dims) -> None:
        """Note in the innermost context of these rules that an array has these dims."""
        record = _records.get().get(self._same)
        if record is not None:
            record.add(dims)

    @functools.cached_property
    def _layouts(self) -> dict[Dims, Layout]:
        return _layouts.setdefault(self, {})

    @functools.cached_property
    def _same(self) -> object:
        """One object for all that are equal but for ``mapped`` and ``ahead``."""
        return _same.setdefault((self.rules, self.mesh), object())

    @functools.cached_property
    def _hash(self) -> int:  # which jax.jit asks for at every call
        return hash((self.rules, self.mesh, self.mapped))


# What an operation is made of is not laid out; only its result is.
inside_operation: ContextVar[bool] = ContextVar("inside an operation", default=False)

_in_force: Any = jax.make_user_context(None)
_layouts: dict[BoundRules, dict[Dims, Layout]] = {}
_same: dict[tuple[DimRules, Mesh], object] = {}

# Dims that arrays have had in each open context of rules, and in those that ended well. A function
# that jax.jit has compiled names its dims only while it is traced, which may be contexts ago.
_records: ContextVar[Mapping[object, set[Dims]]] = ContextVar(
    "records of dims",
    default=MappingProxyType({}),
)
_remembered: dict[object, set[str]] = {}


def bound(rules: RulesLike | BoundRules, mesh: Mesh | None = None) -> BoundRules:
    """Rules bound to a mesh. Raises :class:`LayoutError` if they name an axis that it lacks."""
    if isinstance(rules, BoundRules):
        return rules if mesh is None else bound(rules.rules, mesh)
    rules = DimRules(rules)
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"the rules ({rules}) need the mesh whose axes they name: "
            "rules('batch:rows', mw.create_mesh({'rows': 8}))."
        )
    rules.check(mesh)
    return BoundRules(rules, mesh)


@contextlib.contextmanager
def rules(
    rules: RulesLike | BoundRules, mesh: Mesh | None = None, *, strict: bool = True
) -> Iterator[BoundRules]:
    """Lay out every named array that is made or traced inside by these rules.

    ``rules`` says for dims which axis of ``mesh`` they lie along, ``"batch:rows;hidden:cols"``.
    Values never depend on them. At the end a rule whose dim nothing inside has had is a
    :class:`LayoutError`, unless ``strict=False``. With an abstract mesh rules are checked, and
    nothing is laid out.

    >>> import meshwright as mw
    >>> import meshwright.named as mn
    >>> with mn.rules("batch:rows", mw.create_mesh({"rows": 8})):
    ...     x = mn.named(jax.numpy.ones([16, 2]), "batch:16 io:2")
    >>> x.array.addressable_shards[0].data.shape
    (2, 2)
    """
    current, record = bound(rules, mesh), set[Dims]()
    with scoped(_records, {**_records.get(), current._same: record}), under(current):
        yield current
    names = {dim.name for dims in record for dim in dims}
    if strict:
        _check_all_used(current, names)
        _remembered.setdefault(current._same, set()).update(names)


@contextlib.contextmanager
def no_rules() -> Iterator[None]:
    """Lay nothing out inside.

    >>> import meshwright as mw
    >>> import meshwright.named as mn
    >>> with mn.rules("batch:rows", mw.Mesh({"rows": 8}), strict=False), mn.no_rules():
    ...     print(mn.in_force())
    None
    """
    with under(None):
        yield


def under(current: BoundRules | None) -> contextlib.AbstractContextManager[Any]:
    """These rules in force, whether their dims are seen or not."""
    return _in_force(current)


def in_force() -> BoundRules | None:
    """The rules of the innermost context, or ``None``.

    >>> import meshwright as mw
    >>> import meshwright.named as mn
    >>> with mn.rules("batch:rows", mw.Mesh({"rows": 8}), strict=False):
    ...     print(mn.in_force())
    batch:rows over (rows=8)
    """
    return _in_force.value


def layout_of(
    dims: DimsLike, rules: RulesLike | BoundRules | None = None, mesh: Mesh | None = None
) -> Layout:
    """The layout that the rules, or else those in force, give to an array with these dims.

    >>> import meshwright as mw
    >>> print(layout_of("batch:8 io:2", "batch:rows", mw.Mesh({"rows": 4})))
    [rows, unsharded] on rows=4
    """
    current = in_force() if rules is None else bound(rules, mesh)
    if current is None:
        raise LayoutError("no rules are in force: give rules=, or enter rules(...).")
    return current.layout(as_dims(dims))


def _check_all_used(current: BoundRules, names: set[str]) -> None:
    """Raise :class:`LayoutError` for rules whose dims are not among these names.

    A dim of an earlier context of the same rules passes, because a compiled function may have it
    inside; but not beside a name that is new, which is what a misspelt dim looks like.
    """
    remembered = _remembered.get(current._same, set())
    used = names | remembered if names <= remembered else names
    unused = [(dim, axis) for dim, axis in current.rules.pairs if dim not in used]
    if unused:
        rules = ", ".join(f"'{dim}:{axis}'" for dim, axis in unused)
        raise LayoutError(
            f"no array had the dim of {rules}, so the rule laid nothing out. Dims that were seen: "
            f"{', '.join(sorted(names)) or 'none'}. Correct the name, or allow it: "
            "rules(..., strict=False)."
        )
