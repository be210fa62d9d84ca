"""Calls of functions that hold several layers, written out.

A model under ``jax.jit``, as Equinox' ``filter_jit`` makes it, or under ``jax.checkpoint`` is one
equation, and its layers cannot be told apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from .. import _compat
from .evaluation import evaluated
from .primitives import CALLS, JITTED, SAME_ENTRIES, opened
from .slices import Var, is_literal, variables


def without_calls(closed: Any, params: Collection[Var]) -> Iterator[Any]:
    """A closed jaxpr with the equations of such calls in place of them: first of jitted functions
    alone, then of ``jax.checkpoint`` too. Nothing where there are no such calls.

    They are those that read several of the arguments ``params``, and calls within them.

    >>> @jax.jit
    ... def net(v, w, x):
    ...     return x * v * w
    >>> closed = jax.make_jaxpr(lambda v, w, x: net(v, w, x) + 1.0)(1.0, 2.0, 3.0)
    >>> [opened] = without_calls(closed, closed.jaxpr.invars[:2])
    >>> [eqn.primitive.name for eqn in opened.eqns]
    ['mul', 'mul', 'add']
    """
    written_out = set[int]()
    for kinds in (JITTED, CALLS):
        calls = _calls(closed.jaxpr, params, kinds)
        if calls != written_out:
            yield _written_out(closed, calls)
        written_out = calls


def _written_out(closed: Any, calls: Collection[int]) -> Any:
    def one(eqn: Any, read: Sequence[Any]) -> Sequence[Any]:
        if id(eqn) not in calls:
            return _compat.evaluate(eqn, list(read))
        inner, scope = eqn.params["jaxpr"], str(eqn.source_info.name_stack)
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            return evaluated(opened(inner), getattr(inner, "consts", ()), read, one)

    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals
    ]
    return jax.make_jaxpr(lambda *args: evaluated(closed.jaxpr, closed.consts, args, one))(*shapes)


def _calls(jaxpr: Any, params: Collection[Var], kinds: Collection[str]) -> set[int]:
    """The calls to write out, by their identity."""
    known, result = set(params), set[int]()
    for eqn in jaxpr.eqns:
        read = known.intersection(variables(eqn.invars))
        if eqn.primitive.name in SAME_ENTRIES and read:
            known.add(eqn.outvars[0])
        elif eqn.primitive.name in kinds and len(read) > 1:
            inner = opened(eqn.params["jaxpr"])
            pairs = zip(eqn.invars, inner.invars, strict=True)
            within = [var for atom, var in pairs if not is_literal(atom) and atom in read]
            result |= {id(eqn), *_calls(inner, within, kinds)}
    return result
