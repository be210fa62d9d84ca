"""Weights of classes as weights of rows, which is what batches carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import keras
import numpy as np

from ...errors import ModelError
from ...run.options import Data


def with_class_weights(data: Data) -> Data:
    """The data with a weight for each row in place of ``class_weight``, as Keras gives them.

    Raises :class:`~meshwright.ModelError` where Keras would refuse them, and for a dataset.
    """
    weights = data.class_weight
    if weights is None:
        return data
    if data.sample_weight is not None:
        raise ModelError(
            "class_weight= and sample_weight= cannot be used together. Multiply them into "
            "sample_weight=."
        )
    if wrong := [value for value in weights.values() if not isinstance(value, Real)]:
        raise ModelError(f"class_weight= must have a number for each class; received {wrong[0]!r}.")
    if not hasattr(data.y, "shape"):
        raise ModelError(
            "class_weight= on parameter servers needs x= and y= as arrays, and one output. Give "
            f"batches (x, y, sample_weight); received y of type {type(data.y).__name__}."
        )
    if len(data.y.shape) > 2:
        raise ModelError(
            "class_weight= needs one label in each row of y, a number or one-hot; received y of "
            f"shape {tuple(data.y.shape)}. Give sample_weight=."
        )
    return replace(data, class_weight=None, sample_weight=_of_rows(np.asarray(data.y), weights))


def _of_rows(y: np.ndarray[Any, Any], weights: Mapping[int, float]) -> np.ndarray[Any, Any]:
    """The weight of each row: 1 for classes without one. Labels are numbers or one-hot.

    >>> _of_rows(np.array([[0.0, 1.0], [1.0, 0.0]]), {1: 2.5})
    array([2.5, 1. ], dtype=float32)
    """
    if y.ndim > 1:
        y = y[..., 0] if y.shape[-1] == 1 else y.argmax(-1)
    classes = np.round(y).astype("int32")
    return np.array([weights.get(int(label), 1.0) for label in classes], keras.config.floatx())
