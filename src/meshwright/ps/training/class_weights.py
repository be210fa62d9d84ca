"""Weights of classes as weights of rows, which is what batches carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import keras
import numpy as np

from ...data import InputContext
from ...errors import ModelError
from ...run.options import Data
from .worker_step import as_batch

Weights = Mapping[int, float]

_NOT_BOTH = (
    "class_weight= and sample_weight= cannot be used together. Multiply them into sample_weight=."
)


def of_arrays(data: Data) -> Data:
    """The arrays with a weight for each row in place of ``class_weight``, as Keras gives them.

    Raises :class:`~meshwright.ModelError` where Keras would refuse them.
    """
    weights = data.class_weight
    if weights is None:
        return data
    if data.sample_weight is not None:
        raise ModelError(_NOT_BOTH)
    _check(weights)
    return replace(data, class_weight=None, sample_weight=_of_labels(data.y, weights))


def of_batches(dataset_fn: Callable[[InputContext], Any], weights: Weights) -> WeightedDataset:
    """What makes the same dataset with these weights in its batches ``(x, y)``.

    Raises :class:`~meshwright.ModelError` for invalid ones; so does a batch that Keras would
    refuse, when it is read.
    """
    _check(weights)
    return WeightedDataset(dataset_fn, weights)


@dataclass(frozen=True, eq=False)
class WeightedDataset:
    """The function that makes a dataset on a worker, with the weights of classes."""

    dataset_fn: Callable[[InputContext], Any]
    weights: Weights

    def __call__(self, context: InputContext) -> Any:
        """The dataset; its elements have numbers where they had."""
        return self.weighted(self.dataset_fn(context))

    def weighted(self, dataset: Any) -> Any:
        """The same of a dataset that is there."""
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return _WeightedByNumber(dataset, self.weights)
        return _WeightedBatches(dataset, self.weights) if hasattr(dataset, "__iter__") else dataset


@dataclass(frozen=True, eq=False)
class _WeightedBatches:
    dataset: Any
    weights: Weights

    def __iter__(self) -> Iterator[Any]:
        return map(self.weighted, self.dataset)

    def weighted(self, element: Any) -> Any:
        batch = as_batch(element)
        if not isinstance(batch, tuple) or len(batch) < 2:
            raise ModelError("class_weight= needs batches (x, y); received one without y.")
        if len(batch) > 2:
            raise ModelError(_NOT_BOTH)
        return (*batch, _of_labels(batch[1], self.weights))


class _WeightedByNumber(_WeightedBatches):
    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return self.weighted(self.dataset[number])


def _check(weights: Weights) -> None:
    if wrong := [value for value in weights.values() if not isinstance(value, Real)]:
        raise ModelError(f"class_weight= must have a number for each class; received {wrong[0]!r}.")


def _of_labels(y: Any, weights: Weights) -> np.ndarray[Any, Any]:
    """The weight of each row: 1 for classes without one. Labels are numbers or one-hot.

    >>> _of_labels(np.array([[0.0, 1.0], [1.0, 0.0]]), {1: 2.5})
    array([2.5, 1. ], dtype=float32)
    """
    if not hasattr(y, "shape"):
        raise ModelError(
            "class_weight= on parameter servers needs y as one array, of one output; received y "
            f"of type {type(y).__name__}. Give weights of rows (sample_weight) instead."
        )
    if len(y.shape) > 2:
        raise ModelError(
            "class_weight= needs one label in each row of y, a number or one-hot; received y of "
            f"shape {tuple(y.shape)}. Give sample_weight=."
        )
    labels = np.asarray(y)
    if labels.dtype.kind in "OSU":
        raise ModelError(
            f"class_weight= needs labels that are numbers; received y of dtype {labels.dtype}. "
            "Number the classes first, as keras.layers.StringLookup does."
        )
    if labels.ndim > 1:
        labels = labels[..., 0] if labels.shape[-1] == 1 else labels.argmax(-1)
    classes = np.round(labels).astype("int32")
    return np.array([weights.get(int(label), 1.0) for label in classes], keras.config.floatx())
