"""Callbacks of Keras while steps run elsewhere: those that look at every batch, and the others.

A step's batch, weights and outputs are on a worker, and several steps run at once. So hooks of
single batches cannot be kept, as under TensorFlow's strategy; hooks of epochs are called as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from ...errors import ModelError
from ...frontends.keras.callbacks import callback_list, others, overrides
from ...run.options import Schedule
from ...warn import warn

_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
)
# Keras' own that look at batches only if they are asked to: the argument, and when they do not.
_BY_EPOCH = {
    "ModelCheckpoint": ("save_freq", "epoch"),
    "BackupAndRestore": ("save_freq", "epoch"),
    "OrbaxCheckpoint": ("save_freq", "epoch"),
    "TensorBoard": ("update_freq", "epoch"),
}
_FED = (keras.callbacks.TerminateOnNaN,)  # need the loss alone, and get that of the epoch


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise :class:`~meshwright.ModelError` that names all callbacks that look at batches."""
    refused = [
        f"{type(callback).__name__} ({', '.join(hooks)})"
        for callback in callbacks
        if (hooks := batch_hooks(callback))
    ]
    if refused:
        raise ModelError(
            f"callbacks with hooks for single batches are not supported: {'; '.join(refused)}. "
            "Batches are trained on several workers at once, without the model of this process. "
            "Use on_epoch_end instead, with fewer steps_per_epoch if it must run more often; "
            "Keras' own callbacks take save_freq='epoch' or update_freq='epoch'."
        )


def batch_hooks(callback: Any) -> list[str]:
    """The hooks of single batches that a callback needs.

    >>> batch_hooks(keras.callbacks.EarlyStopping())
    []
    >>> batch_hooks(keras.callbacks.ModelCheckpoint("best.keras", save_freq=10))
    ['on_train_batch_end']
    """
    argument, by_epoch = _BY_EPOCH.get(type(callback).__name__, ("", None))
    if isinstance(callback, _FED) or (argument and getattr(callback, argument) == by_epoch):
        return []
    return [hook for hook in _HOOKS if overrides(callback, hook)]


def checked_callbacks(
    model: keras.Model, schedule: Schedule, steps: int
) -> keras.callbacks.CallbackList:
    """All callbacks of a run, checked, with the history."""
    called = callback_list(
        model,
        schedule.callbacks,
        schedule.verbose,
        bar=False,
        epochs=schedule.epochs,
        steps=steps,
    )
    check_callbacks(list(others(called).values()))
    return called


def warn_of_tables(callbacks: keras.callbacks.CallbackList, tables: Iterable[str]) -> None:
    """Warn where a callback puts back the best weights, and tables on the servers stay."""
    puts_back = any(getattr(one, "restore_best_weights", False) for one in callbacks.callbacks)
    if puts_back and (names := ", ".join(map(repr, tables))):
        warn(
            "restore_best_weights=True of a callback puts back the weights that the model has, and "
            f"not the rows of {names}, which are on the servers: they stay as they were trained "
            "last. To have both from the best step, give fit checkpoint= and keep=None, and "
            "restore that step: strategy.restore(directory / 'step_800', model)."
        )


def refuse_callbacks(method: str, callbacks: Any) -> None:
    """Raise :class:`~meshwright.ModelError` for callbacks of an evaluation or a prediction."""
    if callbacks:
        raise ModelError(
            f"callbacks= of {method} is not supported on parameter servers: workers compute the "
            "batches, without the model of this process."
        )


def feed_batch_end(callbacks: keras.callbacks.CallbackList, step: int, logs: Any) -> None:
    """Give the loss of an epoch to callbacks that want one: they may stop the run."""
    for callback in callbacks.callbacks:
        if isinstance(callback, _FED):
            callback.on_batch_end(step, logs)


def saves(callbacks: keras.callbacks.CallbackList) -> bool:
    """Whether a callback may write the optimizer's slots."""
    return any(type(callback).__name__ in _BY_EPOCH for callback in callbacks.callbacks)
