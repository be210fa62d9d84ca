"""Micro-batches taken side by side, where taking them in turn would save no memory.

Accumulation is asked for because the activations of all rows together do not fit. Where they take
less than the gradients that would be gathered, a step in turn is only slower: the same operations
on fewer rows each, k times. Side by side each micro-batch is still computed by itself (batch
statistics are its own), and every gradient comes out summed over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from ..jaxprs.edits import equations
from ..program import Arrays, Aux, Batch, Program, TrainState


def side_by_side(program: Program) -> Program:
    """The program that takes batches stacked along a new first dim; its loss is their sum.

    Losses and outputs in :class:`~meshwright.program.Aux` are stacked likewise.
    """

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        import jax

        def one(batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole, batch, training)

        apart, shared = 0, cast(Any, None)
        values, aux = jax.vmap(one, out_axes=(0, Aux(apart, apart, shared, shared)))(batch)
        return values.sum(), aux

    return replace(program, loss=loss)


def saves_nothing_in_turn(
    program: Program, whole: TrainState, batches: Sequence[Batch], pieces: int
) -> bool:
    """Whether these batches may be taken side by side, with no more memory than in turn.

    They may where no batch changes what the next one reads: a seed, or batch statistics. Their
    activations, over ``pieces`` pieces of the rows, are counted as if all were kept at once.
    """
    import jax

    def run(state: Arrays, metrics: Arrays, params: Arrays, batch: Batch) -> Any:
        _, aux = program.loss(params, whole._replace(state=state, metrics=metrics), batch, True)
        return aux.state, aux.metrics, aux

    closed = jax.make_jaxpr(run)(whole.state, whole.metrics, whole.params, batches[0])
    kept = len(whole.state) + len(whole.metrics)
    if closed.jaxpr.outvars[:kept] != closed.jaxpr.invars[:kept]:
        return False
    computed = sum(_nbytes(var) for eqn in equations(closed) for var in eqn.outvars)
    gathered = sum(map(_nbytes, jax.tree.leaves(whole.params)))
    return (len(batches) - 1) * computed <= pieces * gathered


def _nbytes(value: Any) -> int:
    shaped = getattr(value, "aval", value)
    return math.prod(getattr(shaped, "shape", ())) * getattr(shaped.dtype, "itemsize", 0)
