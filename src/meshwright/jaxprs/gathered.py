"""Small results of equal blocks that are read after all of them, passed on from block to block.

Layers of experts make an auxiliary loss each, and the model adds them all: a block makes more than
the next one reads, and the blocks do not form a chain. Here they pass on one array of such results
as well. Each drops the first entry and appends its own, so that all blocks do the same, and after
the last one every result is in its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .own_reads import with_own_reads_inside
from .repeats import LEAST, Place, Run, Var, side_results
from .slices import read_instead

_LITTLE_BYTES = 2**10  # of such results of one block: each passes on those of all


def with_gathered_results(
    jaxpr: Any, params: Collection[Var], changed: Mapping[Var, Var], least: int = LEAST
) -> tuple[Any, dict[Var, Var]] | None:
    """An open jaxpr whose equal blocks pass such results on, and what is read in place of them.

    ``None`` if there are none. The arguments are those of
    :func:`~meshwright.jaxprs.repeats.repeated`.
    """
    moved = with_own_reads_inside(jaxpr, params, changed, least)
    form = jaxpr if moved is None else moved
    sides = side_results(form, params, changed, least)
    return None if sides is None else _gathered(form, *sides)


def _gathered(jaxpr: Any, run: Run, places: Sequence[Place]) -> tuple[Any, dict[Var, Var]] | None:
    eqns = jaxpr.eqns
    rows = [[eqns[at + number].outvars[result] for at in run.starts] for number, result in places]
    if sum(_nbytes(row[0]) for row in rows) > _LITTLE_BYTES:
        return None
    if any(jnp.issubdtype(row[0].aval.dtype, jax.dtypes.extended) for row in rows):
        return None  # random keys
    gathered = list(map(_Gathered.of, rows))
    instead = {var: entry for of in gathered for var, entry in of.entries.items()}
    new = [*eqns[: run.start], *(eqn for of in gathered for eqn in of.before)]
    for copy, at in enumerate(run.starts):
        new += eqns[at : at + run.period]
        new += (eqn for of in gathered for eqn in of.within[copy])
    new += (eqn for of in gathered for eqn in of.after)
    new += (eqn.replace(invars=read_instead(eqn.invars, instead)) for eqn in eqns[run.end :])
    return jaxpr.replace(eqns=new, outvars=read_instead(jaxpr.outvars, instead)), instead


@dataclass(frozen=True, eq=False)
class _Gathered:
    """The equations before all blocks, at the end of each, and after all, that gather one result of
    each block; ``entries`` are what is read in place of these results."""

    before: list[Any]
    within: list[list[Any]]
    after: list[Any]
    entries: dict[Var, Var]

    @classmethod
    def of(cls, row: Sequence[Var]) -> _Gathered:
        shape, dtype = row[0].aval.shape, row[0].aval.dtype
        coded = jax.eval_shape(_coded, jax.ShapeDtypeStruct(shape, dtype))
        # A dim of one comes first: where rows are split, what a block passes on is along its first.
        before, (array,) = _equations(lambda: [jnp.zeros((1, len(row), *coded.shape), coded.dtype)])
        within = list[list[Any]]()
        for var in row:
            eqns, (array,) = _equations(_appended, array, var)
            within.append(eqns)
        after, entries = _equations(functools.partial(_entries, shape, dtype), array)
        return cls(before, within, after, dict(zip(row, entries, strict=True)))


def _appended(array: Any, value: Any) -> list[Any]:
    rest = jax.lax.slice_in_dim(array, 1, array.shape[1], axis=1)
    return [jax.lax.concatenate([rest, jax.lax.expand_dims(_coded(value), (0, 1))], 1)]


def _entries(shape: Sequence[int], dtype: Any, array: Any) -> list[Any]:
    entries = jax.lax.split(array, [1] * array.shape[1], axis=1)
    return [_decoded(jax.lax.squeeze(entry, (0, 1)), dtype).reshape(shape) for entry in entries]


def _coded(value: Any) -> Any:
    """Floats that say a value exactly, since stages pass on nothing else: of whole numbers the
    digits to the base of 2**16, which any float32 holds."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    if value.dtype.itemsize <= 2:
        return value.astype(jnp.float32)
    places = range(0, 8 * value.dtype.itemsize, 16)
    return jnp.stack([((value >> place) & 0xFFFF).astype(jnp.float32) for place in places])


def _decoded(coded: Any, dtype: Any) -> Any:
    """The value that :func:`_coded` made floats of."""
    if dtype.itemsize <= 2 or jnp.issubdtype(dtype, jnp.inexact):
        return coded.astype(dtype)
    digits = coded.astype(dtype)
    return sum(digits[i] << (16 * i) for i in range(len(digits)))


def _equations(function: Callable[..., list[Any]], *reads: Var) -> tuple[list[Any], list[Var]]:
    """The equations of a function of these variables, and its results."""
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in reads]
    jaxpr = jax.make_jaxpr(lambda *values: function(*values))(*shapes).jaxpr
    instead = dict(zip(jaxpr.invars, reads, strict=True))
    eqns = [eqn.replace(invars=read_instead(eqn.invars, instead)) for eqn in jaxpr.eqns]
    return eqns, list(jaxpr.outvars)


def _nbytes(var: Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize
