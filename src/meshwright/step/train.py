"""One training step and one evaluation step, as pure functions made from a Program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..program import Arrays, Aux, Batch, Logs, Program, TrainState
from .products import in_order
from .spatial import guard

Step = Callable[[TrainState, Batch], tuple[TrainState, Logs]]


def make_train_step(program: Program) -> Step:
    """The pure step ``(state, batch) -> (state, logs)``: gradients, update, metrics.

    A model's own step is taken where it brings one.
    """
    if program.own_step is not None:
        return program.own_step

    def train_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        import jax

        def loss(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole, batch, True)

        differentiate = in_order(jax.value_and_grad(loss, has_aux=True))
        (_, aux), grads = differentiate(whole.params, whole, batch)
        params, slots = program.update(whole.params, grads, whole.slots)
        metrics, logs = program.measure(aux.metrics, aux, batch)
        return TrainState(params, aux.state, slots, metrics), logs

    return train_step


def guarded(
    program: Program, layouts: TrainState, batch_layouts: Callable[[Batch], Any]
) -> Program:
    """The program with right gradients for state and batches that lie so; see ``spatial.py``.

    ``layouts`` holds a :class:`~meshwright.Layout` per array of the state; ``batch_layouts`` says
    how the arrays of a batch lie.
    """

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        def of_arrays(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole, batch, training)

        lying = (layouts.params, layouts, batch_layouts(batch))
        return guard(of_arrays, lying)(params, whole, batch)

    return replace(program, loss=loss)


def make_test_step(program: Program) -> Step:
    """The pure step ``(state, batch) -> (state, logs)`` that only measures."""

    def test_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        _, aux = program.loss(whole.params, whole, batch, False)
        metrics, logs = program.measure(aux.metrics, aux, batch)
        return whole._replace(state=aux.state, metrics=metrics), logs

    return test_step
