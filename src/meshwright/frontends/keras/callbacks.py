"""Keras' callbacks as the loop calls them, and what a checkpoint keeps of them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from ... import _compat
from ...errors import ModelError
from ...program import Logs
from ...run.epochs import Callbacks
from ...run.logs import as_json, history_from_json

_OWN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)


def callback_list(
    model: keras.Model, callbacks: Any, verbose: str | int, bar: bool = True, **params: Any
) -> keras.callbacks.CallbackList:
    """Callbacks with a history, and with Keras' bar; a list that is one already stays as it is."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    verbosity = verbose if jax.process_index() == 0 else 0  # one process of many shows the progress
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=True,
        # In every process: what callbacks there are decides how many steps are taken in one call.
        add_progbar=bar and verbose != 0,
        verbose=verbosity,
        model=model,
        **{"epochs": 1, **params},
    )


def shows_line(verbose: str | int, callbacks: Any) -> bool:
    """Whether our own line of progress stands in for Keras' bar."""
    ready = isinstance(callbacks, keras.callbacks.CallbackList)
    return verbose in (1, "auto") and not ready


def listen(callbacks: keras.callbacks.CallbackList, *hooks: str) -> bool:
    """Whether any callback does something in these hooks; calling the others costs time."""
    return any(overrides(callback, hook) for callback in callbacks.callbacks for hook in hooks)


def overrides(callback: Any, hook: str) -> bool:
    """Whether a callback has a hook of its own: by its class, or given to it alone.

    >>> mine = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    >>> overrides(mine, "on_train_batch_end"), overrides(mine, "on_train_batch_begin")
    (True, False)
    """
    method = getattr(callback, hook)
    return getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, hook)


def others(callbacks: keras.callbacks.CallbackList) -> dict[str, Any]:
    """The callbacks besides Keras' history and bar, by their numbers and kinds."""
    return {
        f"{number}:{type(callback).__name__}": callback
        for number, callback in enumerate(callbacks.callbacks)
        if not isinstance(callback, _OWN)
    }


class TrainingSetup:
    """What the steps of one ``fit`` were made for; a callback cannot change it under way."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._before = self._parts()

    def check(self) -> None:
        """Raise :class:`ModelError` where the model has something else now."""
        now = self._parts()
        changed = [part for part in now if not _same(now[part], self._before[part])]
        if changed:
            raise ModelError(
                f"a callback gave model {self._model.name!r} another {changed[0]} while fit "
                "trained it, and fit would go on with the one that it began with. Make the change "
                "between two calls of fit: initial_epoch= goes on with the count of epochs."
            )

    def _parts(self) -> dict[str, tuple[Any, ...]]:
        optimizer, loss, metrics = _compat.compile_token(self._model)
        return {
            "optimizer": (optimizer,),
            "loss": (loss,),
            "list of metrics": (metrics,),
            "list of trainable variables": tuple(self._model.trainable_variables),
            "list of variables of the optimizer": tuple(optimizer.variables),
        }


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


class KerasCallbacks(Callbacks):
    """Calls Keras' callbacks for a :class:`~meshwright.run.epochs.Run`.

    A checkpoint keeps the history, and what callbacks have counted: their numbers, words and flags,
    as far as training changed them. What their constructors were given is the new run's own to say
    (and EarlyStopping turns its sign).
    """

    may_change_state = True

    def __init__(self, model: keras.Model, callbacks: keras.callbacks.CallbackList) -> None:
        self._model, self._list = model, callbacks
        self._fresh: dict[str, dict[str, Any]] = {}
        self._setup = TrainingSetup(model)

    @property
    def stop(self) -> bool:
        return bool(self._model.stop_training)

    def first_epoch(self, epoch: int) -> int:
        return _compat.initial_epoch_of(self._model) or epoch  # BackupAndRestore sets it

    def begin(self, before: Mapping[str, Any] | None) -> None:
        self._model.stop_training = False
        self._list.on_train_begin()  # resets what they have counted
        self._fresh = self._attributes()
        if before is None:
            return
        for key, values in before.get("callbacks", {}).items():
            if key in self._fresh:
                others(self._list)[key].__dict__.update(values)
        history, noted = self._history, before.get("history")
        if history is not None and noted is not None:
            history.epoch = list(noted["epoch"])
            history.history = history_from_json(noted["logs"])

    def begin_epoch(self, epoch: int) -> None:
        self._model.reset_metrics()
        self._list.on_epoch_begin(epoch)
        self._setup.check()

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        self._list.on_epoch_end(epoch, logs)

    def end(self, logs: Logs) -> None:
        self._list.on_train_end(logs=logs)

    def notes(self) -> dict[str, Any]:
        history = self._history
        epochs, logs = ([], {}) if history is None else (history.epoch, history.history)
        return {
            "history": {"epoch": list(epochs), "logs": as_json(logs)},
            "callbacks": self._changed(),
            "stopped": self.stop,
        }

    @property
    def _history(self) -> keras.callbacks.History | None:
        kind = keras.callbacks.History
        return next(
            (callback for callback in self._list.callbacks if isinstance(callback, kind)), None
        )

    def _attributes(self) -> dict[str, dict[str, Any]]:
        return {
            key: {
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in vars(callback).items()
                if (value is None or isinstance(value, bool | int | float | str | np.generic))
                and name not in inspect.signature(type(callback)).parameters
            }
            for key, callback in others(self._list).items()
        }

    def _changed(self) -> dict[str, dict[str, Any]]:
        return {
            key: {
                name: value
                for name, value in values.items()
                if name not in self._fresh[key] or self._fresh[key][name] != value
            }
            for key, values in self._attributes().items()
        }
