"""Inputs that are made where they are used: inside of a loop, of the piece that a turn takes.

A loop over stacked weights slices its inputs. Where these are made of smaller ones, as of eight
bits and scales, making them before the loop would hold all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _compat
from .evaluation import evaluated
from .primitives import CHECKPOINTS

_INLINED = CHECKPOINTS | {"jit"}


@dataclass(frozen=True)
class Late:
    """An input that is ``make(stacked, whole)``, and of one index of its first dim the same of that
    index of ``stacked``."""

    make: Callable[[Any, Any], Any]
    stacked: Any
    whole: Any

    @property
    def value(self) -> Any:
        """The input itself."""
        return self.make(self.stacked, self.whole)


def made_late(function: Callable[..., Any], inputs: Any) -> Any:
    """The result of a function of one pytree, in which some leaves may be :class:`Late`.

    >>> import jax, jax.numpy as jnp
    >>> def total(weights):
    ...     return jax.lax.scan(lambda x, w: (x + w, None), jnp.zeros(2), weights)[0]
    >>> late = Late(jnp.multiply, jnp.ones([3, 2], "int8"), jnp.array([1.5, 2.0]))
    >>> made_late(total, late).tolist()
    [4.5, 6.0]
    >>> turns = [eqn for eqn in jax.make_jaxpr(lambda: made_late(total, late))().eqns]
    >>> turns[-1].invars[-1].aval.dtype  # what the loop slices
    dtype('int8')
    """
    import jax

    def is_late(leaf: Any) -> bool:
        return isinstance(leaf, Late)

    leaves, structure = jax.tree.flatten(inputs, is_leaf=is_late)
    wide = [jax.eval_shape(lambda x=x: x.value) if is_late(x) else x for x in leaves]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(
        jax.tree.unflatten(structure, wide)
    )
    results = _evaluated(closed.jaxpr, closed.consts, leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _evaluated(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    return list(map(_made, evaluated(jaxpr, consts, inputs, _results)))


def _results(eqn: Any, values: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if any(isinstance(value, Late) for value in values):
        if name in _INLINED:
            inner = eqn.params["jaxpr"]
            return _evaluated(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
        if name == "scan":
            return _loop(eqn, values)
    return _compat.evaluate(eqn, [_made(value) for value in values])


def _loop(eqn: Any, values: list[Any]) -> list[Any]:
    """A ``scan`` whose turns make what is late of their slices."""
    import jax

    first, count = _compat.scan_counts(eqn)
    consts, stacks = values[:first], values[first + count :]
    carried = [_made(value) for value in values[first : first + count]]

    def turn(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        here = [
            Late(stack.make, piece, stack.whole) if isinstance(stack, Late) else piece
            for stack, piece in zip(stacks, slices, strict=True)
        ]
        body = eqn.params["jaxpr"]
        results = _evaluated(body.jaxpr, body.consts, [*consts, *carry, *here])
        return results[: len(carry)], results[len(carry) :]

    sliced = [stack.stacked if isinstance(stack, Late) else stack for stack in stacks]
    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = jax.lax.scan(turn, carried, sliced, **how)
    return [*last, *stacked]


def _made(value: Any) -> Any:
    return value.value if isinstance(value, Late) else value
