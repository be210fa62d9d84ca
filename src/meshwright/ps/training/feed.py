"""What ``fit`` trains on: arrays, a dataset, or a function that makes one on every worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras

from ...errors import BatchError, DataError
from .data import ArrayBatches, InputContext, Made, first_element
from .signature import Signature
from .worker_step import as_batch


@dataclass(frozen=True, eq=False)
class Feed:
    """Batches for the workers.

    ``examples`` are one batch of each shape that is known beforehand. ``steps`` is the number of
    batches of an epoch, where that is known. ``whole`` says that one dataset holds all epochs.
    """

    made: Made
    examples: tuple[Any, ...]
    steps: int | None
    whole: bool = False
    alike: bool = False  # no other shapes than those of the examples

    def made_for(self, epoch: int, skip: int) -> Made:
        """What workers make for an epoch, without what was trained on before."""
        assert self.steps is not None  # fit has seen to that
        before = epoch * self.steps if self.whole else 0
        return replace(self.made, skip=before + skip)


def feed_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool = False,
    num_workers: int = 1,
    seed: int = 0,
) -> Feed:
    """The feed of a user's data, for ``epochs`` of ``steps`` each.

    Raises :class:`~meshwright.DataError` and :class:`~meshwright.BatchError` for invalid data.
    """
    if _is_arrays(x):
        arrays = tuple(part for part in (x, y, sample_weight) if part is not None)
        options = {"batch_size": batch_size or 32, "shuffle": shuffle, "seed": seed}
        return _of_arrays(arrays, options, epochs, steps, num_workers)
    if y is not None or sample_weight is not None or batch_size is not None:
        raise BatchError(
            "y=, sample_weight= and batch_size= are for arrays. The elements of a dataset must be "
            "batches: (x, y) or (x, y, sample_weight)."
        )
    function = x if callable(x) else _Same(x)
    dataset = function(InputContext(0, num_workers))
    example = as_batch(first_element(dataset))
    if isinstance(x, Iterator):
        raise DataError(
            f"{type(x).__name__} is an iterator, which can be read only once and only here. Pass "
            "a function that makes the dataset on each worker: strategy.fit(model, lambda "
            "context: ...)."
        )
    steps = steps or (_length(dataset))
    return Feed(Made(function, num_workers), (example,), steps)


def _of_arrays(
    arrays: Any, options: dict[str, Any], epochs: int, steps: int | None, num_workers: int
) -> Feed:
    one = ArrayBatches(arrays, batch_size=options["batch_size"])
    num_steps = steps or one.steps
    batches = ArrayBatches(arrays, epochs=-(-num_steps * epochs // one.steps), **options)
    first, last = one[0], one[len(one) - 1]
    examples = (first,) if Signature.of(first) == Signature.of(last) else (first, last)
    return Feed(Made(_Same(batches), num_workers), examples, num_steps, whole=True, alike=True)


class _Same:
    """A dataset that is there already, as a function that returns it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, context: InputContext) -> Any:
        return self._dataset


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _is_arrays(x: Any) -> bool:
    """Whether it is one array, or a dict or tuple of them, whose rows are the data."""
    leaves = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]
    return bool(leaves) and all(
        hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, keras.Model)
        for leaf in leaves
    )
