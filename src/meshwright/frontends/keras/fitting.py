"""``fit``, ``evaluate`` and ``predict`` of a Keras model, as loops of our own over pure functions.

Keras' own loops cannot carry everything that a strategy says: they know a batch by its shape only,
and lay a smaller last one out like the first. These take the same arguments, drive the same
callbacks and return the same things. They never wait for the devices within an epoch, and whatever
happens, the variables end up with the newest state.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from ... import _compat
from ...errors import BatchError, ModelError
from ...program import Logs, TrainState
from .compiled import Functions, functions_of
from .epochs import Epochs
from .program import KerasVariables, read_state, write_state

if TYPE_CHECKING:
    from .sharded import Sharded

_AHEAD = 2  # batches that predict lets the devices work on before it fetches outputs


def fit(
    strategy: Sharded,
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    """See :meth:`Sharded.fit`."""
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = _compat.split_validation(
            (x, y, sample_weight), validation_split
        )
    check_compiled(model)
    data = Epochs(
        strategy.placement,
        model,
        x,
        y,
        sample_weight,
        batch_size,
        steps_per_epoch,
        shuffle,
        class_weight,
        training=True,
    )
    data.check_batch_size(batch_size)
    variables = strategy.prepare(model, data.first_batch)
    callbacks = _callback_list(
        model, callbacks, _shown(verbose), epochs=epochs, steps=data.num_batches
    )
    validation = _Validation(
        validation_data,
        validation_batch_size or batch_size,
        validation_steps,
        validation_freq,
    )
    functions = functions_of(strategy, model, variables)
    training = _Training(model, variables, functions, callbacks)
    model.stop_training = False
    callbacks.on_train_begin()
    epoch_logs: Logs = {}
    try:
        for epoch in range(getattr(model, "_initial_epoch", None) or initial_epoch, epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            epoch_logs = training.epoch(data)
            if validation.is_due(epoch):
                epoch_logs |= validation.run(strategy, model, callbacks)
            callbacks.on_epoch_end(epoch, epoch_logs)
            if model.stop_training:
                break
        if epochs > initial_epoch:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=epoch_logs)
    finally:
        training.settle()
    return model.history


def evaluate(
    strategy: Sharded,
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
) -> Any:
    """See :meth:`Sharded.evaluate`."""
    check_compiled(model)
    data = Epochs(strategy.placement, model, x, y, sample_weight, batch_size, steps)
    data.check_batch_size(batch_size)
    variables = strategy.prepare(model, data.first_batch)
    step = functions_of(strategy, model, variables).test
    callbacks = _callback_list(model, callbacks, _shown(verbose), steps=data.num_batches)
    model.stop_evaluating = False
    model.reset_metrics()
    callbacks.on_test_begin()
    state, logs = read_state(variables), None
    begins = _listen(callbacks, "on_test_batch_begin")
    ends = _listen(callbacks, "on_test_batch_end")
    for number, batch in data.batches():
        if begins:
            callbacks.on_test_batch_begin(number)
        new, metrics, logs = step(state, batch)
        state = state._replace(state=new, metrics=metrics)
        if ends:
            callbacks.on_test_batch_end(number, logs)
        if model.stop_evaluating:
            break
    if logs is None:
        raise BatchError("there is nothing to evaluate: the data holds no batch.")
    write_state(variables, state)
    result = _as_floats(logs)
    callbacks.on_test_end(result)
    return result if return_dict else _compat.in_metric_order(model, result)


def predict(
    strategy: Sharded,
    model: keras.Model,
    x: Any,
    *,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """See :meth:`Sharded.predict`."""
    data = Epochs(strategy.placement, model, x, None, None, batch_size, steps)
    data.check_batch_size(batch_size)
    variables = strategy.prepare(model, data.first_batch, forward_only=True)
    step = functions_of(strategy, model, variables).predict
    callbacks = _callback_list(model, callbacks, _shown(verbose), steps=data.num_batches)
    model.stop_predicting = False
    callbacks.on_predict_begin()
    state = read_state(variables)
    under_way: deque[Any] = deque()
    outputs: list[Any] = []
    for number, batch in data.batches():
        callbacks.on_predict_batch_begin(number)
        under_way.append(step(state.params, state.state, batch))
        callbacks.on_predict_batch_end(number, {"outputs": under_way[-1]})
        if len(under_way) > _AHEAD:  # the devices hold few outputs, the host all
            outputs.append(jax.tree.map(np.asarray, under_way.popleft()))
        if model.stop_predicting:
            break
    outputs += [jax.tree.map(np.asarray, each) for each in under_way]
    callbacks.on_predict_end()
    if not outputs:
        raise BatchError("there is nothing to predict: the data holds no batch.")
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)


class _Training:
    """The state between steps, and what callbacks see of it."""

    def __init__(
        self,
        model: keras.Model,
        variables: KerasVariables,
        functions: Functions,
        callbacks: Any,
    ) -> None:
        self._model = model
        self._variables = variables
        self._functions = functions
        self._at_once: int | None = None
        self._callbacks = callbacks
        self._begins = _listen(callbacks, "on_train_batch_begin", "on_batch_begin")
        self._ends = _listen(callbacks, "on_train_batch_end", "on_batch_end")
        self._state: TrainState | None = None

    def epoch(self, data: Epochs) -> Logs:
        """Train on every batch once; the logs of the last step."""
        model, callbacks = self._model, self._callbacks
        logs = None
        _compat.attach_state(model, None)
        for number, chunk in self._chunks(data):
            if self._begins:
                callbacks.on_train_batch_begin(number)
            if self._state is None or _compat.state_was_synced(model):
                self._state = read_state(self._variables)  # a callback may have changed it
            self._state, logs = self._take(self._state, chunk)
            if self._begins or self._ends:
                _compat.attach_state(model, self._in_keras_order())
            if self._ends:
                callbacks.on_train_batch_end(number + len(chunk) - 1, logs)
            if model.stop_training:
                break
        self.settle()
        if logs is None:
            raise BatchError("there is nothing to train on: the data holds no batch.")
        return _as_floats(logs)

    def _chunks(self, data: Epochs) -> Iterator[tuple[int, list[Any]]]:
        """``(number of the first, batches)``: those that are trained on in one call."""
        batches = data.batches()
        for number, batch in batches:
            chunk, failure = [batch], None
            try:
                for _, another in itertools.islice(batches, self._steps_at_once(batch) - 1):
                    chunk.append(another)
            except BaseException as error:  # what was read before is still trained on
                failure = error
            yield number, chunk
            if failure is not None:
                raise failure

    def _steps_at_once(self, batch: Any) -> int:
        asked = self._model.steps_per_execution
        if asked > 1:
            return asked
        if self._begins or self._ends:
            return 1
        if self._at_once is None:
            self._at_once = self._functions.steps_at_once(read_state(self._variables), batch)
        return self._at_once

    def _take(self, state: TrainState, chunk: list[Any]) -> tuple[TrainState, Logs]:
        functions = self._functions
        if len(chunk) > 1 and functions.train_several is not None and _alike(chunk):
            return functions.train_several(state, tuple(chunk))
        logs: Logs = {}
        for batch in chunk:
            state, logs = functions.train(state, batch)
        return state, logs

    def settle(self) -> None:
        """Write the newest state into the variables, unless a callback has done so."""
        if self._state is not None and not _compat.state_was_synced(self._model):
            write_state(self._variables, self._state)
        _compat.detach_state(self._model)
        self._state = None

    def _in_keras_order(self) -> dict[str, list[Any]]:
        v, state = self._variables, self._state
        assert state is not None  # a step was taken
        return {
            "trainable_variables": [state.params[path] for path in v.params],
            "non_trainable_variables": [state.state[path] for path in v.state],
            "optimizer_variables": [state.slots[path] for path in v.slots],
            "metrics_variables": [state.metrics[path] for path in v.metrics],
        }


@dataclass(frozen=True)
class _Validation:
    data: Any
    batch_size: int | None
    steps: int | None
    freq: Any

    def is_due(self, epoch: int) -> bool:
        if self.data is None:
            return False
        if isinstance(self.freq, int):
            return (epoch + 1) % self.freq == 0
        return epoch + 1 in self.freq

    def run(self, strategy: Sharded, model: keras.Model, callbacks: Any) -> Logs:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(self.data)
        logs = evaluate(
            strategy,
            model,
            x,
            y,
            sample_weight=weights,
            batch_size=self.batch_size,
            steps=self.steps,
            callbacks=callbacks,
            return_dict=True,
        )
        return {f"val_{name}": value for name, value in logs.items()}


def _callback_list(model: Any, callbacks: Any, verbose: Any, epochs: int = 1, **params: Any) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=True,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        model=model,
        **params,
    )


def _listen(callbacks: Any, *hooks: str) -> bool:
    """Whether any callback does something in these hooks; calling the others costs time."""
    base = keras.callbacks.Callback
    return any(
        getattr(type(callback), hook) is not getattr(base, hook)
        for callback in callbacks.callbacks
        for hook in hooks
    )


def _alike(chunk: list[Any]) -> bool:
    """Whether all batches have the same shapes; a smaller last one would compile them all anew."""
    shapes = [[leaf.shape for leaf in jax.tree.leaves(batch)] for batch in chunk]
    return all(each == shapes[0] for each in shapes)


def _shown(verbose: str | int) -> str | int:
    """One process of many shows the progress."""
    return verbose if jax.process_index() == 0 else 0


def _as_floats(logs: Any) -> Logs:
    return {
        name: jax.tree.map(lambda value: float(np.asarray(value)), v) for name, v in logs.items()
    }


def check_compiled(model: keras.Model) -> None:
    """Raise :class:`ModelError` if the model was not compiled."""
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled: call model.compile(optimizer, loss, ...) first."
        )
