"""Models of shapes only: built without allocating anything, to be planned with or made later."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import keras

from ... import _compat
from ...errors import BatchError, ModelError
from ...planning.abstract_step import AbstractStep, on_batch
from ...program import Batch
from . import batches
from .hooks import Hooks
from .host_layers import check_trainable
from .options import check_compiled
from .pending import WaitingRoom, begin_with, begun, filled, is_pending, waiting_room
from .program import KerasVariables, steps_of

if TYPE_CHECKING:
    from .sharded import Sharded


@contextlib.contextmanager
def abstract() -> Iterator[None]:
    """Inside, Keras models are built as shapes: no weight, slot or metric is allocated.

    Such a model is for :func:`~meshwright.dry_run`; however large, it takes little memory.
    ``strategy.fit(model, ...)`` and ``strategy.place(model)`` make its variables, each in its
    layout, as if it had been built in ``strategy.scope()``. What else needs a value raises
    :class:`~meshwright.ModelError`. For plain JAX, give :func:`~meshwright.jax_program` the
    function that makes the parameters: it is only traced, here and everywhere.

    >>> import keras, meshwright as mw
    >>> with abstract():
    ...     model = keras.Sequential([keras.Input([10**6]), keras.layers.Dense(10**6)])
    >>> f"{model.count_params():,}"
    '1,000,001,000,000'
    """
    _compat.install_keras_hooks(Hooks())
    with AbstractRoom().open():
        yield


_FEW = 1 << 24  # elements that may be made while a model is built as shapes


class AbstractRoom(WaitingRoom):
    """Holds variables without values until a strategy adopts them."""

    def __init__(self) -> None:
        super().__init__(_place_none, weakref.WeakSet())

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Let variables wait here while the block runs, and after it."""
        with self.waiting():
            yield

    def early_value(self, variable: Any) -> Any:
        """While models are built: what ``build`` computes with, such as the mean and variance of
        ``Normalization`` before it is adapted, or position embeddings that are resized; and what a
        layer that is called on an array, not on an input, adds to the model as a constant."""
        if waiting_room() is not self:
            return None
        value = None if variable.trainable else filled(variable)
        if value is None and math.prod(variable.shape) <= _FEW:
            return begun(variable)
        return value

    def keeps(self, variable: Any, value: Any) -> bool:
        """While models are built: what ``build`` assigns is what the variable begins with."""
        if waiting_room() is not self:
            return False
        begin_with(variable, value)
        return True

    def settle(self) -> None:
        """Raise :class:`ModelError`: a value was requested, and abstract variables have none."""
        _place_none([], [])


def is_abstract(variable: Any) -> bool:
    """Whether the variable was built as a shape only and has no value yet."""
    return is_pending(variable) and isinstance(variable._meshwright_waits[0], AbstractRoom)


def adopt(variables: list[Any], room: WaitingRoom) -> None:
    """Let those variables that are abstract wait in a room that will make them."""
    for variable in variables:
        if is_abstract(variable):
            _, initializer = variable._meshwright_waits
            room.take_over(variable, initializer)


def _place_none(variables: list[Any], models: list[keras.Model]) -> NoReturn:
    del variables, models
    raise ModelError(
        "this model was built as shapes only, by mw.abstract() or for a mesh without devices: its "
        "variables have no values. Plan with it (mw.dry_run), or make them: "
        "strategy.place(model), on a mesh with devices."
    )


def abstract_step(strategy: Sharded, model: keras.Model, batch: Batch) -> AbstractStep:
    """The training step of a compiled model under a strategy whose mesh is abstract."""
    _build(strategy, model, batch)
    strategy._inspect(model)
    example = batches.abstract(batch)
    return on_batch(steps_of(strategy, model, KerasVariables.of(model), example=example), batch)


def check_batch(model: keras.Model, batch: Batch) -> None:
    """Raise :class:`ModelError` or :class:`BatchError` for what no step can be made of."""
    if not isinstance(model, keras.Model):
        raise ModelError(f"expected a compiled Keras model or a Program; received {model!r}.")
    check_compiled(model)
    check_trainable(model)
    needs_targets = _compat.has_loss(model) and not _compat.has_own(model, "train_step")
    received = type(batch).__name__
    if isinstance(batch, tuple | list):
        if len(batch) > int(needs_targets):
            return
        received += f" of length {len(batch)}"
    raise BatchError(
        f"a batch of {model.name!r} must be (x, y) or (x, y, sample_weight); received {received}. "
        "Shapes will do: jax.ShapeDtypeStruct((64, 784), 'float32')."
    )


def _build(strategy: Sharded, model: keras.Model, batch: Batch) -> None:
    """Build what is not built yet, as shapes."""
    lacks_batch = _compat.needs_batch_to_build(model)
    if not (lacks_batch or _compat.has_unbuilt_optimizer(model)):
        return
    shapes = batches.abstract(batch if isinstance(batch, tuple) else (batch,))
    with strategy.in_force(model), AbstractRoom().open():
        _compat.build_for(model, shapes if lacks_batch else None)
