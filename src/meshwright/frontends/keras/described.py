"""A Keras model's training step as shapes on a mesh that has no devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import keras

from ... import _compat
from ...errors import BatchError, ModelError
from ...layouts.placement import Placed
from ...planning.described import Described, Source, batch_of, state_of
from ...program import Batch, Program
from ...step.sharing import Sharing
from ...step.train import make_train_step
from .abstract import AbstractRoom
from .batches import putter
from .program import KerasVariables, keras_program

if TYPE_CHECKING:
    from .sharded import Sharded


def described(strategy: Sharded, model: keras.Model, batch: Batch) -> Described:
    """The training step of a compiled model under a strategy whose mesh is abstract.

    Raises :class:`ModelError` if the model is not compiled, or none.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"a compiled Keras model or a Program is planned with; received {model!r}."
        )
    if not isinstance(batch, tuple | list) or not batch:
        raise BatchError(
            f"a batch of a Keras model is (x, y) or (x, y, sample_weight); received {batch!r}. "
            "Shapes will do: jax.ShapeDtypeStruct((64, 784), 'float32')."
        )
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled: call model.compile(optimizer, loss, ...) first."
        )
    _build(strategy, model, batch)
    strategy._inspect(model)
    variables = KerasVariables.of(model).under(strategy.placement)
    placed = strategy._placed(model)
    return _of_program(
        keras_program(model, variables),
        tuple(each for _, each in placed),
        batch_of(batch, putter(strategy.placement, model), strategy.how),
        strategy,
        lambda function: traced_lying(strategy, model, placed, function),
    )


def _of_program(
    program: Program,
    placed: tuple[Placed, ...],
    batch: Any,
    strategy: Sharded,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Described:
    """The step of a model's Program, or of a part of it."""
    parts = program.params, program.state, program.slots, program.metrics
    by_path = {each.info.path: each for each in placed}
    infos = tuple(tuple(by_path[info.path].info for info in part) for part in parts)
    there = tuple(by_path[info.path] for part in infos for info in part)
    state = state_of(there, infos)
    sharing = Sharing.of(strategy.placement, program.params)
    return Described(
        name=program.name,
        step=around(make_train_step(program, sharing, strategy.how)),
        state=state,
        batch=batch,
        placed=there,
        placement=strategy.placement,
        how=strategy.how,
        source=Source(
            program=program,
            state=state,
            around=around,
            described=lambda part: _of_program(part, placed, batch, strategy, around),
        ),
    )


def _build(strategy: Sharded, model: keras.Model, batch: Batch) -> None:
    """Build what is not built yet, as shapes."""
    lacks_batch = _compat.needs_batch_to_build(model)
    if not (lacks_batch or _compat.has_unbuilt_optimizer(model)):
        return
    parts = batch if isinstance(batch, tuple) else (batch,)
    shapes = jax.tree.map(lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), parts)
    with strategy.in_force(model), AbstractRoom().open():
        _compat.build_for(model, shapes if lacks_batch else None)


def traced_lying(
    strategy: Sharded,
    model: keras.Model,
    placed: list[tuple[Any, Placed]],
    function: Callable[..., Any],
) -> Callable[..., Any]:
    """The function, traced under the strategy with the model's variables where they will lie."""
    inner = strategy.traced_here(model, function)

    def traced(*args: Any) -> Any:
        with _lying(placed):
            return inner(*args)

    return traced


@contextlib.contextmanager
def _lying(placed: list[tuple[Any, Placed]]) -> Iterator[None]:
    """The variables are known to lie so; elsewhere they may lie on another mesh, or nowhere."""
    before = [_compat.variable_layout(variable) for variable, _ in placed]
    for variable, each in placed:
        _compat.note_layout(variable, each.unpadded.sharding)
    try:
        yield
    finally:
        for (variable, _), layout in zip(placed, before, strict=True):
            _compat.note_layout(variable, layout)
