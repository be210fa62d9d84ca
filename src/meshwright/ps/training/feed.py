"""What ``fit`` trains on: arrays, a dataset, or a function that makes one on every worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras

from ...errors import BatchError, DataError, ShippingError
from ...run.options import Data
from ..coordinator.shipping import pack
from . import class_weights
from .data import ArrayBatches, DatasetMaker, GoingRound, InputContext, first_element
from .signature import Signature
from .worker_step import as_batch


@dataclass(frozen=True, eq=False)
class Feed:
    """Batches for the workers.

    ``examples`` are one batch of each shape that is known beforehand. ``steps`` is the number of
    batches of an epoch, where that is known. ``whole`` says that one dataset holds all epochs.
    ``changing`` is a ``PyDataset`` with hooks of its own, by which it changes between epochs.
    """

    maker: DatasetMaker
    examples: tuple[Any, ...]
    steps: int | None
    whole: bool = False
    alike: bool = False  # no other shapes than those of the examples
    changing: keras.utils.PyDataset | None = None

    def epoch(self) -> contextlib.AbstractContextManager[None]:
        """Call the hooks of the dataset around an epoch, as Keras does."""
        return _epoch_of(self.changing)

    def maker_for(self, epoch: int, skip: int) -> DatasetMaker:
        """What workers make for an epoch, without what was trained on before."""
        assert self.steps is not None  # fit has seen to that
        before = epoch * self.steps if self.whole else 0
        return replace(self.maker, skip=before + skip)


def feed_of(
    data: Data, epochs: int = 1, *, num_workers: int = 1, seed: int = 0, predicts: bool = False
) -> Feed:
    """The feed of a user's data, for this number of epochs; arrays are shuffled by ``seed``.

    Its first batch is looked at, which Keras counts as an epoch, but not where it ``predicts``.
    Raises :class:`~meshwright.DataError` and :class:`~meshwright.BatchError` for invalid data, and
    :class:`~meshwright.ModelError` for invalid weights of classes.
    """
    data = _without_frames(data)
    x = data.x
    if _is_arrays(x):
        return _of_arrays(class_weights.of_arrays(data), epochs, num_workers, seed)
    if data.y is not None or data.sample_weight is not None or data.batch_size is not None:
        raise BatchError(
            "y=, sample_weight= and batch_size= are for arrays. The elements of a dataset must be "
            "batches: (x, y) or (x, y, sample_weight)."
        )
    goes_round = epochs > 1 and _is_longer(x, data.steps)
    through_all = GoingRound(x, (data.steps or 0) * epochs) if goes_round else x
    function = through_all if callable(through_all) else _Same(through_all)
    dataset = function(InputContext(0, num_workers))
    steps = data.steps or _length(dataset)
    if data.class_weight is not None:
        function = class_weights.of_batches(function, data.class_weight)
        dataset = function.weighted(dataset)
    changing = _with_hooks(x)
    with _epoch_of(None if predicts else changing):
        example = as_batch(first_element(dataset))
    if why := _why_only_here(x):
        raise DataError(
            f"{type(x).__name__} {why}. Pass a function that makes the dataset on each worker: "
            "strategy.fit(model, lambda context: ...)."
        )
    maker = DatasetMaker(function, num_workers)
    return Feed(maker, (example,), steps, whole=goes_round, changing=changing)


def _of_arrays(data: Data, epochs: int, num_workers: int, seed: int) -> Feed:
    arrays = tuple(v for v in (data.x, data.y, data.sample_weight) if v is not None)
    size = data.batch_size or 32
    one = ArrayBatches(arrays, batch_size=size)
    steps = data.steps or one.steps
    batches = ArrayBatches(
        arrays,
        batch_size=size,
        epochs=-(-steps * epochs // one.steps),
        shuffle=data.shuffle,
        seed=seed,
    )
    first, last = one[0], one[len(one) - 1]
    examples = (first,) if Signature.of(first) == Signature.of(last) else (first, last)
    return Feed(DatasetMaker(_Same(batches), num_workers), examples, steps, whole=True, alike=True)


def _without_frames(data: Data) -> Data:
    """The data with arrays in the place of pandas' frames and series, which Keras takes, too."""
    weights = _array_of(data.sample_weight)
    if weights is not data.sample_weight:
        weights = weights.reshape(-1)
    return replace(data, x=_array_of(data.x), y=_array_of(data.y), sample_weight=weights)


def _array_of(x: Any) -> Any:
    """What Keras makes of pandas' objects: of a series, one column; all else as it is."""
    if type(x) is dict:
        return {name: _array_of(one) for name, one in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(_array_of, x))
    # Known by their module: this library does not need pandas.
    if type(x).__module__.partition(".")[0] != "pandas" or not hasattr(x, "iloc"):
        return x
    values = x.to_numpy()
    return values[:, None] if values.ndim == 1 else values


@contextlib.contextmanager
def _epoch_of(changing: keras.utils.PyDataset | None) -> Iterator[None]:
    if changing is not None:
        changing.on_epoch_begin()
    yield
    if changing is not None:
        changing.on_epoch_end()


def _is_longer(x: Any, steps: int | None) -> bool:
    """Whether this is a ``PyDataset`` of more batches than an epoch: the next one goes on with it,
    as in Keras."""
    if steps is None or not isinstance(x, keras.utils.PyDataset):
        return False
    count = x.num_batches
    return count is not None and steps < count


def _with_hooks(x: Any) -> keras.utils.PyDataset | None:
    """The dataset, if it is a ``PyDataset`` that does something of its own between epochs."""
    base = keras.utils.PyDataset
    if not isinstance(x, base):
        return None
    hooks = ("on_epoch_begin", "on_epoch_end")
    return x if any(getattr(type(x), hook) is not getattr(base, hook) for hook in hooks) else None


def _why_only_here(dataset: Any) -> str | None:
    """Why workers cannot have a dataset, such as one of TensorFlow; ``None`` if they can."""
    if isinstance(dataset, Iterator):
        return "is an iterator, which can be read only once and only here"
    if callable(dataset):
        return None
    try:
        pack(dataset)
    except ShippingError as error:
        return f"cannot be sent to workers: {str(error.__cause__).rstrip('.')}"
    return None


class _Same:
    """A dataset that is there already, as a function that returns it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, context: InputContext) -> Any:
        return self._dataset


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _is_arrays(x: Any) -> bool:
    """Whether it is one array, or a dict, tuple or list of them, whose rows are the data.

    A list of arrays is one input after the other, as for Keras, and no dataset of batches.
    """
    leaves = list(x.values()) if isinstance(x, dict) else x if isinstance(x, list | tuple) else [x]
    return bool(leaves) and all(
        hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, keras.Model)
        for leaf in leaves
    )
