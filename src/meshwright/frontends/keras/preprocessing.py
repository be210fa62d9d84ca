"""Models whose own ``fit`` makes numbers of raw data first, as Keras Hub's tasks do with text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from ... import _compat
from ...errors import ModelError
from ...run.options import Data, Schedule, Validation
from .hooks import Hooks


def preprocessed(model: keras.Model, method: str, data: Data) -> Data:
    """The data as the model's own ``evaluate`` or ``predict`` reads them."""
    if not _preprocesses(model, data.x):
        return data
    given = {"x": data.x, "batch_size": data.batch_size, "steps": data.steps}
    if method == "evaluate":
        given |= {"y": data.y, "sample_weight": data.sample_weight}
    return _data(_handed_on(model, method, given), "steps", data)


def preprocessed_to_fit(
    model: keras.Model, data: Data, validation: Validation, schedule: Schedule
) -> tuple[Data, Validation, Schedule]:
    """The same for ``fit``: it holds rows out, repeats the data, and may add a callback."""
    if not _preprocesses(model, data.x):
        if _is_task(model):  # it reads arrays in their own order, whatever shuffle= says
            data = replace(data, shuffle=False)
        return data, validation, schedule
    given = {
        "x": data.x,
        "y": data.y,
        "sample_weight": data.sample_weight,
        "batch_size": data.batch_size,
        "class_weight": data.class_weight,
        "steps_per_epoch": data.steps,
        "epochs": schedule.epochs,
        "callbacks": schedule.callbacks,
        "validation_data": validation.data,
        "validation_split": validation.split,
        "validation_steps": validation.steps,
    }
    own = _handed_on(model, "fit", given)
    held_out = own.get("validation_data")
    steps = own.get("validation_steps")
    return (
        _data(own, "steps_per_epoch", data),
        replace(validation, data=held_out, split=0.0, batch_size=None, steps=steps),
        replace(schedule, callbacks=own.get("callbacks")),
    )


def refuse_to_preprocess(model: keras.Model, x: Any) -> None:
    """Raise :class:`ModelError` where such a model's data would have to be sent to workers, which
    do not have its code."""
    if _preprocesses(model, x):
        raise ModelError(
            f"model {model.name!r} makes numbers of its data itself, and workers do not have its "
            "code. Do it beforehand, x = model.preprocessor(x), and set model.preprocessor = None."
        )


def _preprocesses(model: keras.Model, x: Any) -> bool:
    """Whether the model makes numbers of ``x``: of arrays, ``tf.data`` and Grain datasets, and not
    of batches that are made elsewhere."""
    if not _is_task(model) or getattr(model, "preprocessor", model) is None:
        return False
    is_dataset = hasattr(x, "map")
    return is_dataset or isinstance(x, list | tuple | Mapping) or hasattr(x, "__array__")


def _is_task(model: keras.Model) -> bool:
    return hasattr(model, "preprocess_samples")


def _handed_on(model: keras.Model, method: str, given: dict[str, Any]) -> dict[str, Any]:
    _compat.install_keras_hooks(Hooks())
    return _compat.handed_on(model, method, given)


def _data(own: dict[str, Any], steps: str, data: Data) -> Data:
    values = ("x", "y", "sample_weight", "batch_size", "class_weight")
    return replace(data, **{name: own.get(name) for name in values}, steps=own.get(steps))
