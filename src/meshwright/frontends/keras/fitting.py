"""``fit``, ``evaluate`` and ``predict`` of a Keras model, as loops of our own over pure functions.

Keras' own loops cannot carry everything that a strategy says: they know a batch by its shape only,
and lay a smaller last one out like the first. These take the same arguments, drive the same
callbacks and return the same things. They never wait for the devices within an epoch, and whatever
happens, the variables end up with the newest state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from ... import _compat
from ...errors import BatchError, ModelError
from ...jaxprs.flops import model_flops
from ...program import Logs, TrainState
from ...step.padding import Padded
from ...step.several import Together
from .backlog import Backlog
from .batches import abstract
from .compiled import Functions, functions_of
from .epochs import Epochs, chunk_size, is_due
from .finite import FiniteGuard, NanGuard, check_nan_guard
from .logs import on_host
from .options import check_data, check_model, check_options, check_validation
from .program import KerasVariables, read_state, take_state, write_state
from .progress import Progress
from .saving import Resume, Saver, saver_for
from .work import StepWork, peak_flops_per_s, samples_and_tokens

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
    checkpoint: str | Path | None = None,
    save_every: int | None = None,
    keep: int | None = 3,
    resume: Resume = "auto",
    nan_guard: NanGuard = "warn",
) -> Any:
    """See :meth:`Sharded.fit`."""
    check_compiled(model)
    check_nan_guard(nan_guard)
    check_options(
        batch_size=batch_size,
        epochs=epochs,
        verbose=verbose,
        callbacks=callbacks,
        validation_split=validation_split,
        shuffle=shuffle,
        class_weight=class_weight,
        initial_epoch=initial_epoch,
        steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps,
        validation_batch_size=validation_batch_size,
        validation_freq=validation_freq,
    )
    check_data(model, x, y)
    check_validation(validation_data)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = _compat.split_validation(
            (x, y, sample_weight), validation_split
        )
    saver = saver_for(strategy, checkpoint, save_every, keep, resume)
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
    )
    variables = strategy.prepare(model, data.first_batch)
    saver.restore(model, variables)
    shows_bar = _shows_bar(verbose, callbacks)
    callbacks = _callback_list(
        model, callbacks, _shown(verbose), not shows_bar, epochs=epochs, steps=data.num_batches
    )
    validation = _Validation(
        validation_data,
        validation_batch_size or batch_size,
        validation_steps,
        validation_freq,
    )
    guard = FiniteGuard(nan_guard, strategy, model, variables)
    functions = functions_of(strategy, model, variables, guard.stands_still)
    data.pad_where(functions.row_wise)
    devices = strategy.mesh.devices or ()
    training = _Training(model, variables, functions, callbacks, saver, guard, devices)
    if shows_bar:
        training.progress = Progress(epochs, data.num_batches, training.work)
    model.stop_training = False
    callbacks.on_train_begin()
    saver.begin(callbacks)
    epoch_logs: Logs = {}
    first = saver.first_epoch(getattr(model, "_initial_epoch", None) or initial_epoch)
    try:
        with saver.running():
            for epoch in range(first, first if saver.was_stopped else epochs):
                model.reset_metrics()
                callbacks.on_epoch_begin(epoch)
                epoch_logs = training.epoch(data, epoch)
                if validation.is_due(epoch):
                    with saver.validating(epoch_logs):
                        epoch_logs |= validation.run(strategy, model, callbacks)
                if training.progress:
                    training.progress.end_epoch(epoch_logs)
                callbacks.on_epoch_end(epoch, epoch_logs)
                saver.after_epoch(epoch, last=model.stop_training or epoch + 1 == epochs)
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
    check_options(batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks)
    check_data(model, x, y, "test")
    data = Epochs(strategy.placement, model, x, y, sample_weight, batch_size, steps, kind="test")
    variables = strategy.prepare(model, data.first_batch)
    functions = functions_of(strategy, model, variables)
    data.pad_where(functions.row_wise)
    step = functions.test
    callbacks = _callback_list(model, callbacks, _shown(verbose), steps=data.num_batches)
    model.stop_evaluating = False
    model.reset_metrics()
    callbacks.on_test_begin()
    state, logs, backlog = read_state(variables), None, Backlog()
    begins = _listen(callbacks, "on_test_batch_begin")
    ends = _listen(callbacks, "on_test_batch_end")
    for number, batch in data.batches():
        if begins:
            callbacks.on_test_batch_begin(number)
        new, metrics, logs = step(state, batch)
        backlog.add(logs)
        state = state._replace(state=new, metrics=metrics)
        if ends:
            callbacks.on_test_batch_end(number, logs)
        if model.stop_evaluating:
            break
    if logs is None:
        raise BatchError("there is nothing to evaluate: the data holds no batch.")
    write_state(variables, state)
    result = on_host(logs)
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
    check_model(model)
    check_options(batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks)
    check_data(model, x, None, "predict")
    data = Epochs(strategy.placement, model, x, None, None, batch_size, steps, kind="predict")
    variables = strategy.prepare(model, data.first_batch, forward_only=True)
    functions = functions_of(strategy, model, variables)
    data.pad_where(functions.row_wise)
    step = functions.predict
    callbacks = _callback_list(model, callbacks, _shown(verbose), steps=data.num_batches)
    model.stop_predicting = False
    callbacks.on_predict_begin()
    state = read_state(variables)
    under_way: deque[Any] = deque()
    outputs: list[Any] = []
    for number, batch in data.batches():
        callbacks.on_predict_batch_begin(number)
        under_way.append(_predicted(step, state, batch))
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


def _predicted(step: Any, state: TrainState, batch: Any) -> Any:
    """Outputs for the rows that count."""
    if not isinstance(batch, Padded):
        return step(state.params, state.state, batch)
    outputs = step(state.params, state.state, batch.arrays)
    return jax.tree.map(lambda array: np.asarray(array)[: batch.rows], outputs)


class _Training:
    """The state between steps, and what callbacks see of it."""

    def __init__(
        self,
        model: keras.Model,
        variables: KerasVariables,
        functions: Functions,
        callbacks: Any,
        saver: Saver,
        guard: FiniteGuard,
        devices: Sequence[Any],
    ) -> None:
        self._devices = devices
        self._model = model
        self._variables = variables
        self._functions = functions
        self._at_once: int | None = None
        self._backlog = Backlog()
        self._callbacks = callbacks
        self._begins = _listen(callbacks, "on_train_batch_begin", "on_batch_begin")
        self._ends = _listen(callbacks, "on_train_batch_end", "on_batch_end")
        self._saver = saver
        self._guard = guard
        self._state: TrainState | None = None
        self.progress: Progress | None = None
        self._last_step: Any = None
        # The guard looks at single batches again.
        self._stacks = functions.train_together is not None and not guard.stands_still

    def work(self) -> StepWork:
        """What training on one batch takes, on all devices; FLOPs as the step is traced."""
        train, how = self._functions.train, self._functions.how
        batch = self._last_step if how.accumulate == 1 else self._last_step[0]
        samples, tokens = samples_and_tokens(batch)
        flops = None
        if self._state is not None and hasattr(train, "trace"):
            flops = model_flops(train.trace(self._state, self._last_step).jaxpr)
        return StepWork(
            samples,
            tokens,
            flops and flops / how.accumulate,
            peak_flops_per_s(self._devices, self._model.compute_dtype),
            is_recomputed=how.remat != "none",
        )

    def epoch(self, data: Epochs, epoch: int) -> Logs:
        """Train on every batch once; the logs of the last step."""
        model, callbacks = self._model, self._callbacks
        skip, logs = self._saver.begin_epoch(epoch, data)
        self._guard.begin(epoch)
        if self.progress:
            self.progress.begin_epoch(epoch)
        _compat.attach_state(model, None)
        for number, chunk in data.chunks(skip, self._size_for, self._stacks):
            size = chunk_size(chunk)
            if self._begins:
                callbacks.on_train_batch_begin(number)
            if self._state is None or _compat.state_was_synced(model):
                self._state = take_state(self._variables)  # a callback may have changed it
            self._state, logs = self._take(self._state, chunk)
            if self._begins or self._ends:
                _compat.attach_state(model, self._in_keras_order())
            if self._ends:
                callbacks.on_train_batch_end(number + size - 1, logs)
            self._saver.after_steps(size, number + size, self._newest(), logs)
            self._guard.check(self._newest)
            if self.progress:
                self.progress.after(number + size, logs)
            if model.stop_training:
                break
        self._guard.wait(self._newest)
        self.settle()
        if logs is None:
            raise BatchError("there is nothing to train on: the data holds no batch.")
        on_the_host = on_host(logs)
        self._guard.end(on_the_host)
        if self.progress:
            self.progress.trained()
        return on_the_host

    def _newest(self) -> TrainState:
        """The state after the last step, or as a callback has changed it."""
        if self._state is None or _compat.state_was_synced(self._model):
            return read_state(self._variables)
        return self._state

    def _size_for(self, batch: Any) -> int:
        """How many batches, from this one on the host on, are trained on in one call."""
        accumulate, asked = self._functions.how.accumulate, self._model.steps_per_execution
        if asked > 1:
            return asked * accumulate
        if self._begins or self._ends:
            return accumulate
        if self._at_once is None:
            state = read_state(self._variables)
            self._at_once = self._functions.steps_at_once(state, abstract(batch))
        return self._at_once * accumulate

    def _take(self, state: TrainState, chunk: list[Any] | Together) -> tuple[TrainState, Logs]:
        functions = self._functions
        if isinstance(chunk, Together):
            state, logs = functions.train_together(state, chunk)
            one = abstract(chunk.arrays, without=1)
            (self._last_step,) = functions.how.for_steps([one] * functions.how.accumulate)
            self._backlog.add(logs)
            return state, logs
        steps = list(functions.how.for_steps(chunk))
        if len(steps) > 1 and functions.train_several is not None and _alike(steps):
            state, logs = functions.train_several(state, tuple(steps))
        else:
            logs: Logs = {}
            for step in steps:
                state, logs = functions.train(state, step)
        self._backlog.add(logs)
        self._guard.took(steps, logs)
        self._last_step = steps[-1]
        return state, logs

    def settle(self) -> None:
        """Write the newest state into the variables, unless a callback has done so."""
        if self._state is not None and not _compat.state_was_synced(self._model):
            write_state(self._variables, self._state)
        _compat.detach_state(self._model)
        self._state = None

    def _in_keras_order(self) -> dict[str, list[Any]]:
        v = self._variables
        assert self._state is not None  # a step was taken
        state = v.storing.restore(self._state)
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
        return self.data is not None and is_due(self.freq, epoch)

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


def _callback_list(
    model: Any, callbacks: Any, verbose: Any, bar: bool = True, epochs: int = 1, **params: Any
) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=True,
        add_progbar=bar and verbose != 0,
        verbose=verbose,
        epochs=epochs,
        model=model,
        **params,
    )


def _shows_bar(verbose: str | int, callbacks: Any) -> bool:
    """Whether our own line stands in for Keras' bar."""
    ready = isinstance(callbacks, keras.callbacks.CallbackList)
    return _shown(verbose) in (1, "auto") and not ready


def _listen(callbacks: Any, *hooks: str) -> bool:
    """Whether any callback does something in these hooks; calling the others costs time."""
    base = keras.callbacks.Callback
    return any(
        getattr(type(callback), hook) is not getattr(base, hook)
        for callback in callbacks.callbacks
        for hook in hooks
    )


def _alike(steps: list[Any]) -> bool:
    """Whether all batches have equal shapes; a smaller last one would recompile the whole call."""
    trees = [jax.tree.map(lambda leaf: leaf.shape, batch) for batch in steps]
    return all(each == trees[0] for each in trees)


def _shown(verbose: str | int) -> str | int:
    """One process of many shows the progress."""
    return verbose if jax.process_index() == 0 else 0


def check_compiled(model: keras.Model) -> None:
    """Raise :class:`ModelError` if the model was not compiled, or is none."""
    check_model(model)
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled: call model.compile(optimizer, loss, ...) first."
        )
