"""The arguments of ``fit``, ``evaluate`` and ``predict``, checked before any work begins."""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from ... import _compat
from ...data.putter import holds_numbers, not_numbers_text, symbolic_text
from ...errors import DataError, ModelError
from ...run.options import Data, Schedule, Validation
from .host_layers import check_traceable, check_trainable
from .preprocessing import preprocessed_to_fit


def check_model(model: Any) -> None:
    """Raise :class:`ModelError` for a value that is not a Keras model."""
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"expected a Keras model, received {reprlib.repr(model)}. The model comes first: "
            "strategy.fit(model, x, y); a Program is trained by mw.Trainer."
        )


def check_predicts(model: Any) -> None:
    """Raise :class:`ModelError` for what no compiled forward pass can be made of."""
    check_model(model)
    check_traceable(model)


def check_compiled(model: Any) -> None:
    """Raise :class:`ModelError` for a model that was not compiled, or another value."""
    check_model(model)
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled: call model.compile(optimizer, loss, ...) first."
        )
    check_traceable(model)
    for method in ("train_step", "test_step"):
        if _compat.has_own(model, method):
            _check_own_step(model, method)


def check_fit(
    model: Any, data: Data, validation: Validation, schedule: Schedule
) -> tuple[Data, Validation, Schedule]:
    """The data to train and to validate on, after a split if one is asked for, and the schedule.

    Raises :class:`ModelError` and :class:`DataError` for invalid arguments.
    """
    check_compiled(model)
    check_trainable(model)
    reading = {"batch_size": data.batch_size, "steps_per_epoch": data.steps}
    reading |= {"shuffle": data.shuffle, "class_weight": data.class_weight}
    held_out = {f"validation_{name}": v for name, v in vars(validation).items() if name != "data"}
    check_options(**reading, **vars(schedule), **held_out)
    data, validation, schedule = preprocessed_to_fit(model, data, validation, schedule)
    check_data(model, data)
    _check_validation(validation.data)
    if validation.split and validation.data is None:
        arrays, held_out = _compat.split_validation(
            (data.x, data.y, data.sample_weight), validation.split
        )
        data = replace(data, **dict(zip(("x", "y", "sample_weight"), arrays, strict=True)))
        validation = replace(validation, data=held_out)
    validation = replace(validation, batch_size=validation.batch_size or data.batch_size)
    return data, validation, schedule


def _check_own_step(model: keras.Model, method: str) -> None:
    """Raise :class:`ModelError` for a step as it is written for TensorFlow or PyTorch."""
    takes = inspect.signature(getattr(model, method))
    try:
        takes.bind(None, None)
    except TypeError:
        raise ModelError(
            f"{method} of model {model.name!r} takes {takes}, as for TensorFlow or PyTorch. On JAX "
            f"it must take (state, data), change no variable and return (logs, new state): "
            "https://keras.io/guides/custom_train_step_in_jax. To change the loss alone, override "
            "compute_loss instead."
        ) from None


def check_options(**options: Any) -> None:
    """Raise :class:`ModelError` that lists every option of a wrong type or size.

    >>> check_options(epochs=2.5, batch_size=16, callbacks=None, verbose="auto")
    Traceback (most recent call last):
    meshwright.errors.ModelError: epochs=2.5: expected a whole number, at least 0.
    """
    faults = []
    for name, value in options.items():
        accepts, expected = _EXPECTED[name]
        if not accepts(value):
            faults.append(f"{name}={value!r}: expected {expected}.")
    if faults:
        raise ModelError("\n".join(faults))


def check_data(model: keras.Model, data: Data, kind: str = "train") -> None:
    """Raise :class:`DataError` where there are no inputs, or no targets for a loss."""
    _check_source("x", data.x)
    _check_values("y", data.y)
    _check_values("sample_weight", data.sample_weight)
    own = kind != "predict" and _compat.has_own(model, f"{kind}_step")
    needs_y = kind != "predict" and _compat.has_loss(model) and not own
    if needs_y and data.y is None and _are_arrays(data.x):
        raise DataError(
            f"y is None, and the loss of model {model.name!r} compares outputs with targets. Give "
            "y=, or compile the model without a loss if it adds its own (add_loss)."
        )


def _check_validation(data: Any) -> None:
    """Raise :class:`DataError` for what cannot be validation data: not after an epoch, but now."""
    if isinstance(data, tuple | list) and len(data) in (1, 2, 3):
        _check_source("validation_data[0]", data[0])
        for place, value in enumerate(data[1:], 1):
            _check_values(f"validation_data[{place}]", value)
    elif data is not None:
        _check_source("validation_data", data)


def _check_source(name: str, value: Any) -> None:
    is_scalar = value is None or isinstance(value, int | float | complex | str | bytes)
    is_empty = isinstance(value, list | tuple | Mapping) and not value
    if is_scalar or is_empty:
        raise DataError(f"{name}={value!r}: expected arrays, a dataset or a generator of batches.")
    _check_values(name, value)


def _check_values(name: str, value: Any) -> None:
    """Raise :class:`DataError` where arrays hold no numbers, or no values at all."""
    for array in keras.tree.flatten(value):
        if _compat.is_symbolic(array):
            raise DataError(f"{name} is {symbolic_text(array)}")
        if isinstance(array, np.ndarray) and not holds_numbers(array):
            raise DataError(f"{name} has {not_numbers_text(array)}")


def _are_arrays(x: Any) -> bool:
    return all(isinstance(value, np.ndarray) for value in _values(x))


def _values(x: Any) -> list[Any]:
    return list(x.values()) if isinstance(x, Mapping) else x if isinstance(x, list) else [x]


def _whole(least: int | None) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        try:
            number = operator.index(value)
        except TypeError:
            return False
        return least is None or number >= least

    return accepts


def _maybe(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and bool(0 <= value < 1)


def _is_due(value: Any) -> bool:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return all(map(_whole(1), value))
    return _whole(1)(value)


def _are_callbacks(value: Any) -> bool:
    if isinstance(value, keras.callbacks.CallbackList | keras.callbacks.Callback):
        return True
    return isinstance(value, list | tuple) and all(
        isinstance(item, keras.callbacks.Callback) for item in value
    )


_NUMBER = _maybe(_whole(1)), "a whole number, at least 1, or None"
_STEPS = _maybe(_whole(None)), "a whole number, or None"
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "batch_size": _NUMBER,
    "validation_batch_size": _NUMBER,
    "epochs": (_whole(0), "a whole number, at least 0"),
    "initial_epoch": (_whole(0), "a whole number, at least 0"),
    "steps": _STEPS,
    "steps_per_epoch": _STEPS,
    "validation_steps": _STEPS,
    "validation_split": (_is_share, "a number from 0 to 1, without 1"),
    "validation_freq": (_is_due, "a whole number, at least 1, or the numbers of epochs"),
    "callbacks": (_maybe(_are_callbacks), "Keras callbacks in a list"),
    "class_weight": (
        _maybe(lambda value: isinstance(value, Mapping)),
        "a dict, such as {0: 1.0, 1: 2.5}",
    ),
    "shuffle": (lambda value: isinstance(value, bool | np.bool_ | str | int), "True or False"),
    "verbose": (
        lambda value: isinstance(value, int | str | np.integer) and value in (0, 1, 2, "auto"),
        "'auto', 0, 1 or 2",
    ),
}
