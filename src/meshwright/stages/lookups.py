"""Look-ups along split dims and shifts of rows, in a form that XLA can run within a stage.

XLA ends the process where a program looks up along a dim that is split over one axis, by indices
that are split over another one, while the axis of the stages is taken by hand: of values that are
computed, as the scores of words, and from JAX 0.11 on of parameters too. So they are whole along
that dim. The same holds of sorts, of writes at places and of operations that the table of
primitives does not know, whose results are whole as well.

Rows that move along the batch, as by ``jnp.flip`` or ``jnp.concatenate``, are exchanged by permutes
of XLA, which wait for every device of the mesh; where a stage works by itself, the others never
come. So they are whole too: the devices of one stage gather them among themselves. What moves in a
branch, or in a loop that ends by a value, is whole in any case, for each stage goes its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from .. import _compat
from ..jaxprs import reach
from ..jaxprs.edits import constraint_on
from ..jaxprs.links import How
from ..jaxprs.primitives import OUTSIDE, TABLE, inner_jaxprs, links_of, opened
from ..layouts.layout import Layout
from ..layouts.placement import Placement
from ..program import Program
from .traced import Traced

_ORDERS = ("sort", "top_k")  # XLA ends the process
_BY_VALUE = ("cond", "while")  # a stage may take another way than the others
_SAME_ROWS = ("convert_element_type", "reshard", "sharding_constraint")


def with_whole_lookups(traced: Traced, program: Program, placement: Placement) -> Traced:
    """The same loss, with look-ups along split dims and shifts of rows as XLA runs them."""
    if not placement.batch_axes:
        return traced
    layouts = {placed.info.path: placed.layout for placed in placement.place(program.params)}
    jaxpr = traced.closed.jaxpr
    cuts = list[Sequence[reach.Cut]]()
    for var in jaxpr.invars:
        part, path = traced.arguments[var]
        rank = len(var.aval.shape)
        if part == "params":
            cuts.append(_cuts(layouts[path], placement, rank))
        else:
            axes = placement.batch_axes if part == "batch" else ()
            cuts.append([_cut(axes, placement), *[()] * rank][:rank])
    tables = {var for var, (part, _) in traced.arguments.items() if part == "params"}
    eqns = list(_Edit(placement, reach.follow(jaxpr, cuts), tables).equations(jaxpr))
    return replace(traced, closed=traced.closed.replace(jaxpr=jaxpr.replace(eqns=eqns)))


def _cuts(layout: Layout, placement: Placement, rank: int) -> list[reach.Cut]:
    cuts = [_cut(layout.dim_axes(dim), placement) for dim in range(layout.rank)]
    return [*cuts, *[()] * rank][:rank]


def _cut(axes: Sequence[str], placement: Placement) -> reach.Cut:
    mesh = placement.mesh
    return tuple((axis, mesh[axis]) for axis in axes if mesh[axis] > 1)


class _Edit:
    """Lays out what look-ups along split dims read, and what sorts, writes or moves them."""

    def __init__(self, placement: Placement, scope: reach.Scope, tables: set[Any]) -> None:
        self._mesh = placement.mesh.jax_mesh
        self._of_rows = frozenset(placement.batch_axes)
        sizes = placement.mesh.jax_mesh.shape
        others = {axis for axis, size in sizes.items() if size > 1} - self._of_rows
        self._works_alone = len(others) <= 1  # that of the stages
        self._scope, self._tables = scope, tables

    def equations(self, jaxpr: Any) -> Iterator[Any]:
        for number, eqn in enumerate(jaxpr.eqns):
            is_table = any(not hasattr(atom, "val") and atom in self._tables for atom in eqn.invars)
            if eqn.primitive.name in _SAME_ROWS and is_table:
                self._tables.update(eqn.outvars)
            within = self._scope.inner.get(number)
            axes = _axes_along(_looked_along, eqn, self._scope, within) - self._of_rows
            if not is_table:
                axes |= _axes_along(_looked_across, eqn, self._scope, within)
            elif not _compat.aborts_on_split_tables():
                axes = frozenset()
            moved = _axes_along(_ordered_along, eqn, self._scope, within)
            if eqn.primitive.name in _BY_VALUE:
                moved |= _axes_along(_moved_along, eqn, self._scope, within)
            elif self._works_alone:
                moved |= _axes_along(_moved_along, eqn, self._scope, within) & self._of_rows
            if moved:
                yield from self._to_whole_dims(eqn, axes | moved, moved)
            elif axes:
                yield from self._of_whole_dims(eqn, axes)
            else:
                yield eqn

    def _to_whole_dims(self, eqn: Any, axes: frozenset[str], made: frozenset[str]) -> Iterator[Any]:
        """The equation between what lays its operands out, and its results, whose gradients lie
        as they do."""
        results, laid = list(eqn.outvars), list[Any]()
        for place, var in enumerate(eqn.outvars):
            entries = self._entries(var, made)
            if any(entry is None for entry in entries):
                after = constraint_on(var, self._mesh, entries, eqn)
                results[place] = after.outvars[0]
                laid.append(after.replace(invars=after.outvars, outvars=[var]))
        yield from self._of_whole_dims(eqn.replace(outvars=results), axes)
        yield from laid

    def _entries(self, atom: Any, axes: frozenset[str]) -> list[Any]:
        """For each dim ``None``, whole, where one of these axes reaches it."""
        import jax

        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        return [None if _axes_of(dim) & axes else free for dim in self._scope.of(atom)]

    def _of_whole_dims(self, eqn: Any, axes: frozenset[str]) -> Iterator[Any]:
        """The equation, after what lays its operands out."""
        laid = dict[Any, Any]()
        for atom in eqn.invars:
            entries = self._entries(atom, axes)
            if any(entry is None for entry in entries):
                laid[atom] = constraint_on(atom, self._mesh, entries, eqn)
        yield from laid.values()
        invars = [
            a if hasattr(a, "val") or a not in laid else laid[a].outvars[0] for a in eqn.invars
        ]
        yield eqn.replace(invars=invars)


def _axes_along(
    of_one: Callable[[Any, reach.Scope], frozenset[str]],
    eqn: Any,
    scope: reach.Scope,
    inner: dict[str, list[reach.Scope]] | None,
) -> frozenset[str]:
    """The axes that ``of_one`` finds for an equation, or for those that it calls."""
    axes, called = of_one(eqn, scope), inner_jaxprs(eqn) if inner else {}
    for key, scopes in (inner or {}).items():
        for jaxpr, within in zip(called[key], scopes, strict=True):
            for number, one in enumerate(opened(jaxpr).eqns):
                axes |= _axes_along(of_one, one, within, within.inner.get(number))
    return axes


def _looked_along(eqn: Any, scope: reach.Scope) -> frozenset[str]:
    """The axes that split dims along which an equation looks up."""
    if eqn.primitive.name != "gather":
        return frozenset()
    dims, sizes = scope.of(eqn.invars[0]), eqn.params["slice_sizes"]
    along = eqn.params["dimension_numbers"].start_index_map
    return _axes_of_all(dims[dim] for dim in along if sizes[dim] == 1)


def _looked_across(eqn: Any, scope: reach.Scope) -> frozenset[str]:
    """The same, where other axes split the pieces that are found."""
    along = _looked_along(eqn, scope)
    if not along:
        return along
    dims, places = scope.of(eqn.invars[0]), eqn.params["dimension_numbers"].start_index_map
    pieces = _axes_of_all(dim for at, dim in enumerate(dims) if at not in places)
    return along if pieces - along else frozenset()


def _ordered_along(eqn: Any, scope: reach.Scope) -> frozenset[str]:
    """The axes that split dims along which an equation sorts, or writes pieces that other axes
    split, and all of those of an operation that is not known, such as a linear solver."""
    if eqn.primitive.name in _ORDERS:
        return _moved_along(eqn, scope)
    if _is_unknown(eqn):
        return _axes_of_all(dim for atom in eqn.invars for dim in scope.of(atom))
    if not eqn.primitive.name.startswith("scatter"):
        return frozenset()
    numbers = eqn.params["dimension_numbers"]
    (table, _, updates), along = map(scope.of, eqn.invars), numbers.inserted_window_dims
    places = [dim for at, dim in enumerate(updates) if at not in numbers.update_window_dims]
    axes = _axes_of_all([*(table[dim] for dim in along), *places])
    pieces = _axes_of_all(updates[at] for at in numbers.update_window_dims)
    pieces |= _axes_of_all(dim for at, dim in enumerate(table) if at not in along)
    return axes if pieces - axes else frozenset()


def _is_unknown(eqn: Any) -> bool:
    name = eqn.primitive.name
    return not (name in TABLE or name in OUTSIDE or inner_jaxprs(eqn))


def _moved_along(eqn: Any, scope: reach.Scope) -> frozenset[str]:
    """The axes that split dims along which an equation moves elements."""
    links = [] if inner_jaxprs(eqn) else links_of(eqn)
    return frozenset().union(
        *(
            _axes_of(scope.of(eqn.invars[place])[dim])
            for link in links
            if link.how is How.ALONG
            for place, dim in link.ins
        )
    )


def _axes_of_all(dims: Iterable[reach.Dim]) -> frozenset[str]:
    return frozenset().union(*map(_axes_of, dims))


def _axes_of(dim: reach.Dim) -> frozenset[str]:
    cuts = reach.sure_cuts(dim) | reach.feeble_cuts(dim)
    return frozenset(axis for cut in cuts for axis, _ in cut)
