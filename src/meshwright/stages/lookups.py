"""Look-ups along split dims, in a form that XLA compiles within a stage.

XLA ends the process where a program looks up along a dim that is split over one axis, by indices
that are split over another one, while the axis of the stages is taken by hand: of values that are
computed, as the scores of words, and from JAX 0.11 on of parameters too. So such values are whole
along that dim, and every device looks up all rows of a parameter.
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
from .parts import Traced

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
    """Lays out what look-ups along split dims read, or read and make."""

    def __init__(self, placement: Placement, scope: reach.Scope, tables: set[Any]) -> None:
        self._mesh = placement.mesh.jax_mesh
        self._of_rows = frozenset(placement.batch_axes)
        self._scope, self._tables = scope, tables

    def equations(self, jaxpr: Any) -> Iterator[Any]:
        for number, eqn in enumerate(jaxpr.eqns):
            read = [not hasattr(atom, "val") and atom in self._tables for atom in eqn.invars]
            is_table = any(read)
            if eqn.primitive.name in _SAME_ROWS and is_table:
                self._tables.update(eqn.outvars)
            axes = _looked_along(eqn, self._scope, self._scope.inner.get(number)) - self._of_rows
            if not axes or (is_table and not _compat.aborts_on_split_tables()):
                yield eqn
            elif is_table:
                yield from self._by_whole_indices(eqn, read)
            else:
                yield from self._of_whole_dims(eqn, axes)

    def _by_whole_indices(self, eqn: Any, read: Sequence[bool]) -> Iterator[Any]:
        indices = [
            atom
            for atom, is_table in zip(eqn.invars, read, strict=True)
            if not is_table and not hasattr(atom, "val") and atom.aval.ndim
        ]
        results = [self._laid(var, [None] * var.aval.ndim, eqn) for var in eqn.outvars]
        made = eqn.replace(outvars=[one.outvars[0] for one in results])
        yield from self._reading(made, {atom: [None] * atom.aval.ndim for atom in indices})
        for one, var in zip(results, eqn.outvars, strict=True):
            yield one.replace(invars=one.outvars, outvars=[var])

    def _of_whole_dims(self, eqn: Any, axes: frozenset[str]) -> Iterator[Any]:
        import jax

        free, entries = jax.sharding.PartitionSpec.UNCONSTRAINED, dict[Any, list[Any]]()
        for atom in eqn.invars:
            if not hasattr(atom, "val"):
                along = [_axes_of(dim) & axes for dim in self._scope.of(atom)]
                if any(along):
                    entries[atom] = [None if some else free for some in along]
        yield from self._reading(eqn, entries)

    def _reading(self, eqn: Any, entries: dict[Any, list[Any]]) -> Iterator[Any]:
        """The equation, after what lays its operands out."""
        laid = {atom: self._laid(atom, lies, eqn) for atom, lies in entries.items()}
        yield from laid.values()
        yield eqn.replace(
            invars=[
                laid[atom].outvars[0] if not hasattr(atom, "val") and atom in laid else atom
                for atom in eqn.invars
            ]
        )

    def _laid(self, value: Any, entries: Sequence[Any], like: Any) -> Any:
        return constraint_on(value, self._mesh, entries, like)


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
