"""The backward pass leaves a block that is computed again when its parameters have their gradients.

Nothing but the update waits for those. XLA for GPU (jaxlib 0.10) puts the products that make them
off to the end of the step, and holds what they read of every block till then: with blocks of a
Transformer computed again, several times what the blocks keep. So what goes on from a block waits
for them. It does not wait for their sum over devices: that is not in a block, see ``row_parts.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from ..jaxprs.evaluation import bound, read, take
from ..jaxprs.primitives import CHECKPOINTS, MOVES
from ..jaxprs.slices import variables
from ..program import Arrays, Aux, Batch, TrainState
from .gradient import Gradient

# What may stand between a block and the gradient of a parameter.
_BETWEEN = MOVES | {"convert_element_type", "add_any"}


def leaving_in_turn(gradient: Gradient, sums_over_devices: bool) -> Gradient:
    """The same gradient, whose backward pass leaves one block after the other.

    Blocks are what is computed again by itself, if there are several. Where a gradient
    ``sums_over_devices`` and does not come in parts, nothing waits for it.
    """

    def run(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Aux, Arrays]:
        closed, shapes = jax.make_jaxpr(gradient, return_shape=True)(params, whole, batch)
        aux, grads = shapes
        results = closed.jaxpr.outvars[len(jax.tree.leaves(aux)) :]
        ndims = [params[path].ndim for path in sorted(grads)]  # as JAX orders a dict
        summed = {
            var
            for var, ndim in zip(results, ndims, strict=True)
            if sums_over_devices and var.aval.ndim == ndim
        }
        values = _run(closed, jax.tree.leaves((params, whole, batch)), summed)
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return run


def _run(closed: Any, args: list[Any], summed: set[Any]) -> list[Any]:
    """The results, where nothing waits for those variables."""
    jaxpr = closed.jaxpr
    env = bound(jaxpr, closed.consts, args)
    blocks = [eqn for eqn in jaxpr.eqns if _is_backward(eqn)]
    free = _come_from(jaxpr, summed)
    for eqn in jaxpr.eqns:
        take([eqn], env)
        waiting = [var for var in eqn.outvars if var not in free]
        if len(blocks) > 1 and len(waiting) > 1 and _is_backward(eqn):
            together = jax.lax.optimization_barrier([env[var] for var in waiting])
            env.update(zip(waiting, together, strict=True))
    return read(jaxpr.outvars, env)


def _is_backward(eqn: Any) -> bool:
    return eqn.primitive.name in CHECKPOINTS and bool(eqn.params.get("differentiated"))


def _come_from(jaxpr: Any, results: Iterable[Any]) -> set[Any]:
    """These variables, and those that they are of by moves and sums of several alone."""
    makes = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    seen: set[Any] = set()
    waiting = list(results)
    while waiting:
        var = waiting.pop()
        eqn = makes.get(var)
        if var in seen or eqn is None:
            continue
        seen.add(var)
        if eqn.primitive.name in _BETWEEN:
            waiting += variables(eqn.invars)
    return seen
