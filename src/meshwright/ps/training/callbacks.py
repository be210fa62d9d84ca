"""Callbacks of Keras while steps run elsewhere: those that look at every batch, and the others.

A step's batch, weights and outputs are on a worker, and several steps run at once. So hooks of
single batches cannot be kept, as under TensorFlow's strategy; hooks of epochs are called as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ...errors import ModelError

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
    base = keras.callbacks.Callback
    argument, by_epoch = _BY_EPOCH.get(type(callback).__name__, ("", None))
    if isinstance(callback, _FED) or (argument and getattr(callback, argument) == by_epoch):
        return []
    return [hook for hook in _HOOKS if getattr(type(callback), hook) is not getattr(base, hook)]


def callback_list(
    model: keras.Model, callbacks: Any, epochs: int, steps: int, verbose: Any
) -> keras.callbacks.CallbackList:
    """All callbacks of a run, checked, with the history."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        check_callbacks([c for c in callbacks.callbacks if not isinstance(c, _OURS)])
        return callbacks
    given = (
        list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] * bool(callbacks)
    )
    check_callbacks(given)
    return keras.callbacks.CallbackList(
        given,
        add_history=True,
        add_progbar=False,
        model=model,
        epochs=epochs,
        steps=steps,
        verbose=verbose,
    )


_OURS = (keras.callbacks.History, keras.callbacks.ProgbarLogger)


def feed_batch_end(callbacks: keras.callbacks.CallbackList, step: int, logs: Any) -> None:
    """Give the loss of an epoch to callbacks that want one: they may stop the run."""
    for callback in callbacks.callbacks:
        if isinstance(callback, _FED):
            callback.on_batch_end(step, logs)


def others(callbacks: keras.callbacks.CallbackList) -> bool:
    """Whether a callback besides the history may look at the model after an epoch."""
    return any(not isinstance(callback, _OURS) for callback in callbacks.callbacks)


def saves(callbacks: keras.callbacks.CallbackList) -> bool:
    """Whether a callback may write the optimizer's slots."""
    return any(type(callback).__name__ in _BY_EPOCH for callback in callbacks.callbacks)
