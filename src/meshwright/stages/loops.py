"""Loops over layers, written out: a pipeline is cut between copies of what a loop repeats.

JAX models of many equal layers keep their weights stacked, and go through them by ``jax.lax.scan``,
one equation, in which no stage can begin or end, or by a loop of Python. Written out, each layer
reads entries of the weights, which are arguments here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from .. import _compat
from ..jaxprs.evaluation import evaluated
from ..jaxprs.primitives import SAME_ENTRIES, opened
from ..jaxprs.slices import Var, needed
from .traced import Traced, with_equal_constants_once


@dataclass(frozen=True)
class Entries:
    """A stacked array as its entries."""

    values: tuple[Any, ...]


def without_loops(traced: Traced) -> Traced | None:
    """The same loss with its loop over the most weights written out; ``None`` if it has none.

    The loop may be in a call of a jitted function, but not in one of ``jax.checkpoint``.
    """
    jaxpr = traced.closed.jaxpr
    params = [var for var, (part, _) in traced.arguments.items() if part == "params"]
    stacked = looped_weights(jaxpr, params)
    if not stacked:
        return None
    names, shapes, entries = list[Any](), list[Any](), dict[str, tuple[str, int]]()
    for var in jaxpr.invars:
        part, path = traced.arguments[var]
        dims, count = var.aval.shape, 1
        if var in stacked:
            count, *dims = dims
            paths = [entry_path(path, number) for number in range(count)]
            entries |= {of: (path, number) for number, of in enumerate(paths)}
            names += [(part, of) for of in paths]
        else:
            names.append((part, path))
        shapes += [jax.ShapeDtypeStruct(tuple(dims), var.aval.dtype)] * count

    def run(*flat: Any) -> list[Any]:
        values = iter(flat)
        arguments = [
            Entries(tuple(next(values) for _ in range(var.aval.shape[0])))
            if var in stacked
            else next(values)
            for var in jaxpr.invars
        ]
        return _evaluated(traced.closed, arguments)

    return replace(traced.rewritten(_written_out_for(run, shapes), names), entries=entries)


def looped_weights(jaxpr: Any, params: Iterable[Var]) -> set[Var]:
    """Which of these arguments the loop over the most weights takes entry by entry, if any."""
    taken: dict[Var, set[int]] = {}
    loops = _looped_over(jaxpr, {var: var for var in params}, taken)
    loops.append({var for var, at in taken.items() if len(at) == var.aval.shape[0] > 1})
    return max(loops, key=lambda loop: sum(var.aval.size for var in loop))


def without_loops_over(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr for arguments of which some are entries: the loops over those are
    written out."""
    counts = [len(of.values) if isinstance(of, Entries) else None for of in arguments]
    flat = [one for of in arguments for one in (of.values if isinstance(of, Entries) else [of])]

    def run(*flat: Any) -> list[Any]:
        values = iter(flat)
        return _evaluated(closed, [
            next(values) if count is None else Entries(tuple(next(values) for _ in range(count)))
            for count in counts
        ])  # fmt: skip

    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in flat]
    return jaxpr_as_fun(_written_out_for(run, shapes))(*flat)


def _written_out_for(run: Callable[..., list[Any]], shapes: Sequence[Any]) -> Any:
    """The equations of a function that are needed, with equal constants once."""
    closed = with_equal_constants_once(jax.make_jaxpr(run)(*shapes))
    eqns = closed.jaxpr.eqns
    kept = [eqns[number] for number in needed(eqns, closed.jaxpr.outvars)]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=kept))


def entry_path(path: str, number: int) -> str:
    """A name for an entry of a stacked variable.

    >>> entry_path("layers/attention/kernel", 3)
    'layers/attention[3]/kernel'
    """
    layer, _, name = path.rpartition("/")
    return f"{layer}[{number}]/{name}" if layer else f"{path}[{number}]"


def _looped_over(
    jaxpr: Any, of: Mapping[Var, Var], taken: MutableMapping[Var, set[int]]
) -> list[set[Var]]:
    """The parameters that each loop takes entry by entry; ``of`` are variables with those they are.
    What is taken of a parameter by slices of one entry, as loops of Python do, is put into
    ``taken``."""
    of, result = dict(of), list[set[Var]]()
    for eqn in jaxpr.eqns:
        known = [None if hasattr(atom, "val") else of.get(atom) for atom in eqn.invars]
        if eqn.primitive.name == "scan":
            of_steps = known[sum(_compat.scan_counts(eqn)) :]
            result.append({root for root in of_steps if root is not None})
        elif eqn.primitive.name in SAME_ENTRIES and known[0] is not None:
            of[eqn.outvars[0]] = known[0]
        elif (number := _entry_taken(eqn)) is not None and known[0] is not None:
            taken.setdefault(known[0], set()).add(number)
        elif eqn.primitive.name == "jit":
            inner = opened(eqn.params["jaxpr"])
            pairs = zip(inner.invars, known, strict=True)
            known_inside = {var: root for var, root in pairs if root is not None}
            result += _looped_over(inner, known_inside, taken)
    return result


def _entry_taken(eqn: Any) -> int | None:
    """Which entry alone an equation slices out of an array, if it does."""
    if eqn.primitive.name != "slice" or len(eqn.params["start_indices"]) < 1:
        return None
    (first, *starts), (limit, *limits) = eqn.params["start_indices"], eqn.params["limit_indices"]
    is_one = limit == first + 1 and set(eqn.params["strides"] or (1,)) == {1}
    rest_is_whole = not any(starts) and tuple(limits) == eqn.invars[0].aval.shape[1:]
    return first if is_one and rest_is_whole else None


def _evaluated(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, some arguments of which are entries."""
    return list(map(_whole, evaluated(closed.jaxpr, closed.consts, arguments, _results)))


def _results(eqn: Any, read: Sequence[Any]) -> list[Any]:
    if not any(isinstance(value, Entries) for value in read):
        return _compat.evaluate(eqn, list(read))
    if eqn.primitive.name in SAME_ENTRIES:
        return [Entries(tuple(_compat.evaluate(eqn, [one])[0] for one in read[0].values))]
    if (number := _entry_taken(eqn)) is not None:
        return [read[0].values[number][None]]
    if eqn.primitive.name == "jit":
        return _evaluated(eqn.params["jaxpr"], read)
    if eqn.primitive.name == "scan":
        scope = str(eqn.source_info.name_stack)
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            return _written_out(eqn, read)
    return _compat.evaluate(eqn, list(map(_whole, read)))


def _written_out(eqn: Any, read: Sequence[Any]) -> list[Any]:
    """The results of a loop, step by step."""
    length, body = eqn.params["length"], eqn.params["jaxpr"]
    first, carried = _compat.scan_counts(eqn)
    constants, carry = list(map(_whole, read[:first])), list(map(_whole, read[first:][:carried]))
    by_step = [_entries(value, length) for value in read[first + carried :]]
    rows: list[list[Any]] = [[] for _ in range(length)]
    for step in range(length)[:: -1 if eqn.params["reverse"] else 1]:
        results = _evaluated(body, [*constants, *carry, *(of[step] for of in by_step)])
        carry, rows[step] = results[:carried], results[carried:]
    return [*carry, *(jnp.stack(of) for of in zip(*rows, strict=True))]


def _entries(value: Any, length: int) -> Sequence[Any]:
    if isinstance(value, Entries):
        return value.values
    return [value[number] for number in range(length)]


def _whole(value: Any) -> Any:
    return jnp.stack(value.values) if isinstance(value, Entries) else value
