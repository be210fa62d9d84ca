"""``fit``, ``evaluate`` and ``predict`` of a Keras model, as loops of our own over pure functions.

Keras' own loops cannot carry everything that a strategy says: they know a batch by its shape only,
and lay a smaller last one out like the first. These take the same arguments, drive the same
callbacks and return the same things.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import keras
import numpy as np

from ... import _compat
from ...errors import BatchError
from ...launch.join import agree
from ...program import Arrays, Logs, TrainState
from ...run.backlog import Backlog
from ...run.epochs import Run
from ...run.logs import on_host
from ...run.options import Data, Schedule, Validation
from ...run.progress import Progress
from ...run.saver import Saver
from ...step.padding import Padded
from .batches import abstract
from .callbacks import KerasCallbacks, callback_list, listen, shows_line
from .compiled import Functions, functions_of
from .epochs import Epochs
from .facts import fit_facts, pass_facts
from .memory import separate
from .nan_guard import FiniteGuard, NanGuard, check_nan_guard
from .options import check_compiled, check_data, check_fit, check_options, check_predicts
from .preprocessing import preprocessed
from .program import KerasVariables, read_state, write_state
from .rowwise import Kind
from .steps import KerasSteps, WorkRates

if TYPE_CHECKING:
    from .sharded import Sharded

_AHEAD = 2  # batches that predict lets the devices work on before it fetches outputs


def fit(
    strategy: Sharded,
    model: keras.Model,
    data: Data,
    validation: Validation,
    schedule: Schedule,
    saver: Callable[[], Saver],
    nan_guard: NanGuard,
) -> keras.callbacks.History:
    """See :meth:`Sharded.fit`; ``saver`` makes one when all else was checked."""
    check_nan_guard(nan_guard)
    data, validation, schedule = check_fit(model, data, validation, schedule)
    saves = saver()
    agree("fit", lambda: fit_facts(strategy, model, data, validation, schedule, saves))
    epochs = Epochs(strategy.placement, model, data)
    first_batch = functools.cache(epochs.first_batch)
    variables = strategy.prepare(model, first_batch)
    line = shows_line(schedule.verbose, schedule.callbacks)
    callbacks = callback_list(
        model,
        schedule.callbacks,
        schedule.verbose,
        not line,
        epochs=schedule.epochs,
        steps=epochs.num_batches,
    )
    guard = FiniteGuard(nan_guard, strategy, model, variables)
    example = None if strategy.how.pipeline is None else abstract(first_batch())
    functions = functions_of(strategy, model, variables, guard.stands_still, example)
    variables = variables.stored_by(functions.steps.outside)
    guard.stored_by(functions.steps.outside)
    epochs.again()
    epochs.pad_where(functions.row_wise)

    held_out: list[Epochs] = []  # one reader for all validations, as in Keras

    def measure() -> Logs:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(validation.data)
        data = Data(x, y, weights, validation.batch_size, validation.steps)
        over = _Pass.of(strategy, model, data, "auto", callbacks, "test", *held_out, raw=False)
        held_out[:] = [over.epochs]
        return _measured(model, over)

    steps = KerasSteps(
        strategy,
        model,
        variables,
        functions,
        epochs,
        callbacks,
        guard,
        measure,
        schedule.initial_epoch,
        saves.is_on,
    )
    progress = None
    if line and jax.process_index() == 0:
        progress = Progress(schedule.epochs, epochs.num_batches, WorkRates(steps.work))
    due = () if validation.data is None else validation.freq
    with saves.claimed():
        Run(steps, saves, KerasCallbacks(model, callbacks), schedule, due, progress).train()
    separate(model)
    return model.history


def evaluate(
    strategy: Sharded, model: keras.Model, data: Data, verbose: str | int, callbacks: Any
) -> Logs:
    """See :meth:`Sharded.evaluate`; what it measures, by name."""
    _agree_on_pass("evaluate", strategy, model, data)
    return _measured(model, _Pass.of(strategy, model, data, verbose, callbacks, "test"))


def _measured(model: keras.Model, over: _Pass) -> Logs:
    callbacks = over.callbacks
    model.stop_evaluating = False
    model.reset_metrics()
    callbacks.on_test_begin()
    state, logs, backlog = read_state(over.variables), None, Backlog()
    begins = listen(callbacks, "on_test_batch_begin")
    ends = listen(callbacks, "on_test_batch_end")
    for number, batch in over.epochs.batches():
        if begins:
            callbacks.on_test_batch_begin(number)
        new, metrics, logs = over.functions.test(state, batch)
        backlog.add(logs)
        state = state._replace(state=new, metrics=metrics)
        if ends:
            callbacks.on_test_batch_end(number, logs)
        if model.stop_evaluating:
            break
    if logs is None:
        raise BatchError("there is nothing to evaluate: the data holds no batch.")
    write_state(over.variables, state)
    if _compat.has_own(model, "test_step"):
        values = [_compat.raw_value(variable) for variable in model.metrics_variables]
        logs = _compat.logs_at_the_end(model, logs, values)
    result = on_host(logs)
    callbacks.on_test_end(result)
    return result


def predict(
    strategy: Sharded, model: keras.Model, data: Data, verbose: str | int, callbacks: Any
) -> Any:
    """See :meth:`Sharded.predict`."""
    _agree_on_pass("predict", strategy, model, data)
    over = _Pass.of(strategy, model, data, verbose, callbacks, "predict")
    step, callbacks = over.functions.predict, over.callbacks
    model.stop_predicting = False
    callbacks.on_predict_begin()
    state = read_state(over.variables)
    moved: Arrays = {}  # seeds, and what layers remember from batch to batch
    under_way: deque[Any] = deque()
    outputs: list[Any] = []
    for number, batch in over.epochs.batches():
        callbacks.on_predict_batch_begin(number)
        computed, new = _predicted(step, state, batch)
        moved |= new
        state = state._replace(state={**state.state, **new})
        under_way.append(computed)
        callbacks.on_predict_batch_end(number, {"outputs": under_way[-1]})
        if len(under_way) > _AHEAD:  # the devices hold few outputs, the host all
            outputs.append(jax.tree.map(np.asarray, under_way.popleft()))
        if model.stop_predicting:
            break
    outputs += [jax.tree.map(np.asarray, output) for output in under_way]
    own_dims = over.variables.storing.restore(TrainState({}, moved, {}, {}))
    for path, value in own_dims.state.items():
        over.variables.state[path].assign(value)
    callbacks.on_predict_end()
    if not outputs:
        raise BatchError("there is nothing to predict: the data holds no batch.")
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)


def _agree_on_pass(call: str, strategy: Sharded, model: keras.Model, data: Data) -> None:
    """Compare what all processes are about to do, unless the mesh belongs to this one alone."""
    devices = strategy.mesh.devices or ()
    if len({device.process_index for device in devices}) > 1:
        agree(call, lambda: pass_facts(strategy, model, data))


class _Pass(NamedTuple):
    """All that one pass over data needs."""

    epochs: Epochs
    variables: KerasVariables
    functions: Functions
    callbacks: keras.callbacks.CallbackList

    @classmethod
    def of(
        cls,
        strategy: Sharded,
        model: keras.Model,
        data: Data,
        verbose: str | int,
        callbacks: Any,
        kind: Kind,
        epochs: Epochs | None = None,
        raw: bool = True,
    ) -> _Pass:
        """To evaluate or to predict; raises for invalid arguments before any work.

        ``epochs`` are those of an earlier pass over the same data. Data that are not ``raw`` were
        preprocessed with those of ``fit``.
        """
        predicts = kind == "predict"
        (check_predicts if predicts else check_compiled)(model)
        check_options(
            batch_size=data.batch_size, verbose=verbose, steps=data.steps, callbacks=callbacks
        )
        if raw:
            data = preprocessed(model, "predict" if predicts else "evaluate", data)
        check_data(model, data, kind)
        strategy = strategy.unstaged
        if epochs is None:
            epochs = Epochs(strategy.placement, model, data, kind)
        variables = strategy.prepare(model, epochs.first_batch, forward_only=predicts)
        if not predicts:
            epochs.again()
        functions = functions_of(strategy, model, variables)
        epochs.pad_where(functions.row_wise)
        listed = callback_list(model, callbacks, verbose, steps=epochs.num_batches)
        return cls(epochs, variables, functions, listed)


def _predicted(step: Any, state: TrainState, batch: Any) -> tuple[Any, Arrays]:
    """Outputs for the rows that count, and what of the state has changed."""
    if not isinstance(batch, Padded):
        return step(state.params, state.state, batch)
    outputs, moved = step(state.params, state.state, batch.arrays)
    return jax.tree.map(lambda array: np.asarray(array)[: batch.rows], outputs), moved
