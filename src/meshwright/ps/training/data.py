"""The data of ``fit``: the context of ``dataset_fn``, and arrays as a dataset with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...data import InputContext
from ...errors import DataError


class ArrayBatches:
    """Batches of arrays by number, through all epochs: number ``steps`` begins the second one.

    ``shuffle`` orders each epoch by ``seed`` and its number, alike on every worker. Raises
    :class:`~meshwright.DataError` for arrays of different lengths.

    >>> batches = ArrayBatches((np.arange(5),), batch_size=2, epochs=2)
    >>> len(batches), batches.steps, batches[0], batches[2], batches[3]
    (6, 3, (array([0, 1]),), (array([4]),), (array([0, 1]),))
    """

    def __init__(
        self,
        arrays: Any,
        *,
        batch_size: int = 32,
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self._arrays = jax.tree.map(np.asarray, arrays)
        for value, array in zip(*map(jax.tree.leaves, (arrays, self._arrays)), strict=True):
            if not array.ndim:
                raise DataError(
                    f"expected arrays with rows; received a {type(value).__name__}, which NumPy "
                    "reads as one value. Of a sparse matrix pass .toarray(), or batches of it from "
                    "a function that workers call."
                )
        lengths = {len(array) for array in jax.tree.leaves(self._arrays)}
        if len(lengths) != 1 or not min(lengths):
            raise DataError(
                "all arrays must have the same number of rows, at least 1; received "
                f"{', '.join(map(str, sorted(lengths)))} rows."
            )
        (self._rows,) = lengths
        self._size, self._epochs = batch_size, epochs
        self._shuffle, self._seed = shuffle, seed
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def steps(self) -> int:
        """Batches of one epoch."""
        return -(-self._rows // self._size)

    def __len__(self) -> int:
        return self.steps * self._epochs

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        epoch, at = divmod(number, self.steps)
        rows: Any = slice(at * self._size, (at + 1) * self._size)
        if self._shuffle:
            rows = self._order_of(epoch)[rows]
        return jax.tree.map(lambda array: array[rows], self._arrays)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
            self._order = epoch, shuffled
        return self._order[1]


@dataclass(frozen=True, eq=False)
class GoingRound:
    """A dataset with numbers through all epochs, as many elements: the first follows the last.

    >>> "".join(GoingRound("abcde", 9))
    'abcdeabcd'
    """

    dataset: Any
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < self.length:
            raise IndexError(number)
        return self.dataset[number % len(self.dataset)]


@dataclass(frozen=True)
class DatasetMaker:
    """A dataset as ``dataset_fn`` makes it, without its first ``skip`` elements."""

    dataset_fn: Callable[[InputContext], Any]
    num_workers: int = 1
    skip: int = 0

    def __call__(self) -> Any:
        """The dataset, for the worker that this runs on."""
        from ..worker.context import current

        context = current()
        index = context.index if context is not None else 0
        dataset = self.dataset_fn(InputContext(index, max(self.num_workers, index + 1)))
        if not self.skip:
            return dataset
        by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        return (_RestByNumber if by_number else _Rest)(dataset, self.skip)


class _Rest:
    """A dataset without its first elements: a run that goes on has trained on them before."""

    def __init__(self, dataset: Any, skip: int) -> None:
        self._dataset, self._skip = dataset, skip

    def __iter__(self) -> Iterator[Any]:
        elements = iter(self._dataset)
        for _ in range(self._skip):
            next(elements, None)
        return elements


class _RestByNumber(_Rest):
    """The same of a dataset whose elements have numbers."""

    def __len__(self) -> int:
        return max(0, len(self._dataset) - self._skip)

    def __getitem__(self, number: int) -> Any:
        return self._dataset[number + self._skip]


def first_element(dataset: Any) -> Any:
    """The first element, to see shapes from. Raises :class:`~meshwright.DataError` if none."""
    try:
        return next(iter(dataset))
    except StopIteration:
        raise DataError("dataset_fn returned an empty dataset.") from None
    except TypeError as error:
        raise DataError(
            f"dataset_fn must return an iterable of batches (a list, a generator, a PyDataset, a "
            f"tf.data.Dataset); received {type(dataset).__name__}: {error}."
        ) from error
