"""Look-ups in tables whose rows are split, in a form that every XLA compiles within a stage.

The XLA of JAX 0.11 ends the process where both a table's rows and the indices are split, each over
an axis of its own, while the axis of the stages is taken by hand. Devices look all rows up then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .. import _compat
from ..jaxprs.edits import constraint_on, equations
from ..layouts.placement import Placement
from ..program import Program
from .parts import Traced

Var = Any
_SAME_ROWS = ("convert_element_type", "reshard", "sharding_constraint")


def with_whole_indices(traced: Traced, program: Program, placement: Placement) -> Traced:
    """The same loss; what looks rows of a split parameter up reads and makes whole arrays."""
    if not _compat.aborts_on_split_lookups() or not placement.batch_axes:
        return traced
    split = {
        placed.info.path
        for placed in placement.place(program.params)
        if placed.layout.specs[:1] not in ((), (None,))
    }
    tables = {
        var for var, (part, path) in traced.arguments.items() if part == "params" and path in split
    }
    mesh = placement.mesh.jax_mesh
    jaxpr = traced.closed.jaxpr
    eqns = list(_edited(jaxpr.eqns, tables, mesh))
    return replace(traced, closed=traced.closed.replace(jaxpr=jaxpr.replace(eqns=eqns)))


def _edited(eqns: Any, tables: set[Var], mesh: Any) -> Iterator[Any]:
    for eqn in eqns:
        read = [not hasattr(atom, "val") and atom in tables for atom in eqn.invars]
        if eqn.primitive.name in _SAME_ROWS and any(read):
            tables.update(eqn.outvars)
        if not any(read) or not _looks_up(eqn):
            yield eqn
            continue
        indices = {
            atom: _whole(atom, mesh, eqn)
            for atom, is_table in zip(eqn.invars, read, strict=True)
            if not is_table and not hasattr(atom, "val") and atom.aval.ndim
        }
        yield from indices.values()
        whole = {atom: constraint.outvars[0] for atom, constraint in indices.items()}
        invars = [a if hasattr(a, "val") else whole.get(a, a) for a in eqn.invars]
        results = [_whole(var, mesh, eqn) for var in eqn.outvars]
        # What the equation makes gets new names, so that the old ones are those of whole arrays.
        yield eqn.replace(invars=invars, outvars=[one.outvars[0] for one in results])
        yield from (
            one.replace(invars=one.outvars, outvars=[var])
            for one, var in zip(results, eqn.outvars, strict=True)
        )


def _looks_up(eqn: Any) -> bool:
    if eqn.primitive.name == "gather":
        return True
    inner = eqn.params.get("jaxpr") if eqn.primitive.name == "jit" else None
    return inner is not None and any(e.primitive.name == "gather" for e in equations(inner))


def _whole(value: Var, mesh: Any, like: Any) -> Any:
    return constraint_on(value, mesh, [None] * value.aval.ndim, like)
