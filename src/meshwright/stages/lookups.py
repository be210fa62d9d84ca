"""Look-ups along split dims, in a form that XLA compiles within a stage.

XLA ends the process where a program looks up along a dim that is split over one axis, by indices
that are split over another one, while the axis of the stages is taken by hand: of values that are
computed, as the scores of words, and from JAX 0.11 on of parameters too. So they are whole along
that dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .. import _compat
from ..jaxprs import reach
from ..jaxprs.edits import constraint_on
from ..jaxprs.primitives import inner_jaxprs, opened
from ..layouts.layout import Layout
from ..layouts.placement import Placement
from ..program import Program
from .traced import Traced

_SAME_ROWS = ("convert_element_type", "reshard", "sharding_constraint")


def with_whole_lookups(traced: Traced, program: Program, placement: Placement) -> Traced:
    """The same loss, with look-ups along split dims as XLA compiles them."""
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
    """Lays out what look-ups along split dims read."""

    def __init__(self, placement: Placement, scope: reach.Scope, tables: set[Any]) -> None:
        self._mesh = placement.mesh.jax_mesh
        self._of_rows = frozenset(placement.batch_axes)
        self._scope, self._tables = scope, tables

    def equations(self, jaxpr: Any) -> Iterator[Any]:
        for number, eqn in enumerate(jaxpr.eqns):
            is_table = any(not hasattr(atom, "val") and atom in self._tables for atom in eqn.invars)
            if eqn.primitive.name in _SAME_ROWS and is_table:
                self._tables.update(eqn.outvars)
            axes = _looked_along(eqn, self._scope, self._scope.inner.get(number)) - self._of_rows
            if not axes or (is_table and not _compat.aborts_on_split_tables()):
                yield eqn
            else:
                yield from self._of_whole_dims(eqn, axes)

    def _of_whole_dims(self, eqn: Any, axes: frozenset[str]) -> Iterator[Any]:
        """The equation, after what lays its operands out."""
        import jax

        free, laid = jax.sharding.PartitionSpec.UNCONSTRAINED, dict[Any, Any]()
        for atom in eqn.invars:
            along = [_axes_of(dim) & axes for dim in self._scope.of(atom)]
            if any(along):
                entries = [None if some else free for some in along]
                laid[atom] = constraint_on(atom, self._mesh, entries, eqn)
        yield from laid.values()
        invars = [
            a if hasattr(a, "val") or a not in laid else laid[a].outvars[0] for a in eqn.invars
        ]
        yield eqn.replace(invars=invars)


def _looked_along(
    eqn: Any, scope: reach.Scope, inner: dict[str, list[reach.Scope]] | None
) -> frozenset[str]:
    """The axes that split dims along which an equation looks up, or those that it calls."""
    if eqn.primitive.name == "gather":
        dims, sizes = scope.of(eqn.invars[0]), eqn.params["slice_sizes"]
        along = eqn.params["dimension_numbers"].start_index_map
        return frozenset().union(*(_axes_of(dims[dim]) for dim in along if sizes[dim] == 1))
    axes, called = frozenset[str](), inner_jaxprs(eqn) if inner else {}
    for key, scopes in (inner or {}).items():
        for jaxpr, within in zip(called[key], scopes, strict=True):
            for number, one in enumerate(opened(jaxpr).eqns):
                axes |= _looked_along(one, within, within.inner.get(number))
    return axes


def _axes_of(dim: reach.Dim) -> frozenset[str]:
    cuts = reach.sure_cuts(dim) | reach.feeble_cuts(dim)
    return frozenset(axis for cut in cuts for axis, _ in cut)
