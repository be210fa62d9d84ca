"""A Keras model's training step as shapes on a mesh that has no devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import keras

from ... import _compat
from ...errors import BatchError, ModelError
from ...planning.described import Described, on_batch
from ...program import Batch
from .abstract import AbstractRoom
from .compiled import steps_of
from .program import KerasVariables

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
    return on_batch(steps_of(strategy, model, KerasVariables.of(model)), batch)


def _build(strategy: Sharded, model: keras.Model, batch: Batch) -> None:
    """Build what is not built yet, as shapes."""
    lacks_batch = _compat.needs_batch_to_build(model)
    if not (lacks_batch or _compat.has_unbuilt_optimizer(model)):
        return
    parts = batch if isinstance(batch, tuple) else (batch,)
    shapes = jax.tree.map(lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), parts)
    with strategy.in_force(model), AbstractRoom().open():
        _compat.build_for(model, shapes if lacks_batch else None)
