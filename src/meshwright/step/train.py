"""One training step and one evaluation step, as pure functions made from a Program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..jaxprs.branches import with_free_results
from ..jaxprs.edits import edited
from ..program import Arrays, Aux, Batch, Logs, Program, TrainState
from .accumulate import accumulating_step
from .options import PLAIN, StepOptions
from .products import ordered
from .sharing import Gradient, Sharing, shared
from .spatial import guard
from .sums import summed_in

Step = Callable[[TrainState, Batch], tuple[TrainState, Logs]]


def make_train_step(
    program: Program, sharing: Sharing | None = None, how: StepOptions = PLAIN
) -> Step:
    """The pure step ``(state, batch) -> (state, logs)``: gradients, update, metrics.

    ``sharing`` says what ZeRO shares out. With ``how.accumulate`` above one the step takes a
    sequence of micro-batches in place of a batch. A model's own step is taken where it brings one.
    Raises :class:`~meshwright.ModelError` if that cannot do what is asked.
    """
    sharing = sharing or Sharing.none()
    if program.own_step is not None:
        how.refuse_own_step(program.name)
        return program.own_step
    program = shared(program, sharing, how.remat)
    if how.accumulate > 1:
        return accumulating_step(program, partial(gradient, sums=how.sums), sharing)
    differentiate = gradient(program, sums=how.sums)

    def train_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        aux, grads = sharing.gradients(differentiate, whole, batch)
        params, slots = program.update(whole.params, grads, whole.slots)
        metrics, logs = program.measure(aux.metrics, aux, batch)
        return TrainState(params, aux.state, slots, metrics), logs

    return train_step


def gradient(program: Program, share: float = 1.0, *, sums: str | None = None) -> Gradient:
    """The pure function ``(params, state, batch) -> (aux, gradients)`` of the training loss.

    ``share`` is how much of the loss counts; ``sums`` is the element type in which gradients are
    summed, where it is not the one they are computed in.
    """

    def loss(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
        value, aux = program.loss(params, whole, batch, True)
        return value if share == 1 else share * value, aux

    def differentiated(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Aux, Arrays]:
        import jax

        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, whole, batch)
        return aux, grads

    taken = edited(differentiated, lambda jaxpr: with_free_results(ordered(jaxpr)))
    return taken if sums is None else summed_in(taken, sums)


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

    def loss(whole: TrainState, batch: Batch) -> Any:
        return program.loss(whole.params, whole, batch, False)

    def test_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        _, aux = edited(loss, with_free_results)(whole, batch)
        metrics, logs = program.measure(aux.metrics, aux, batch)
        return whole._replace(state=aux.state, metrics=metrics), logs

    return test_step
