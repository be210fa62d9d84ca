"""Elements of a dataset by number: a step names its own, so that a retry gets the same one.

The numbers are handed out with the steps, in order, to whichever worker takes a step. Nothing is
asked for on the way, and one worker sees the batches in the order of the dataset.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import DataError, ExhaustedError
from .data import Made
from .worker_step import TrainStep, engine, here

_MOST_KEPT = 2  # datasets of epochs that a worker keeps of a run


class IndexedDataset:
    """A dataset whose elements are taken by number; by index, where it can be indexed.

    Others are iterated, and made again where an earlier element is needed, for a step that another
    worker has lost. Such a dataset must come in the same order each time that it is made.

    >>> letters = IndexedDataset(Made(lambda context: iter("abc")))
    >>> letters[1], letters[2], letters[0]
    ('b', 'c', 'a')
    """

    def __init__(self, made: Made) -> None:
        self._made = made
        self._dataset = made()
        self._running: Iterator[Any] | None = None
        self._next = 0

    def __getitem__(self, number: int) -> Any:
        """Raises :class:`~meshwright.ExhaustedError` behind the last element."""
        dataset = self._dataset
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            if number >= len(dataset):
                raise _ended(number, len(dataset))
            return dataset[number]
        return self._run_to(number)

    def _run_to(self, number: int) -> Any:
        if self._running is None:
            self._running = self._begun()
        elif number < self._next:
            self._dataset = self._made()
            self._running = self._begun()
        for element in self._running:
            self._next += 1
            if self._next == number + 1:
                return element
        raise _ended(number, self._next)

    def _begun(self) -> Iterator[Any]:
        self._next = 0
        try:
            return iter(self._dataset)
        except TypeError as error:
            raise DataError(
                "dataset_fn must return an iterable of batches; received "
                f"{type(self._dataset).__name__}."
            ) from error


@dataclass(frozen=True, eq=False)
class IndexedStep:
    """A step of training on the elements of these numbers."""

    step: TrainStep
    made: Made

    def __call__(self, dataset: int, number: int, edition: int = 0, count: int = 1) -> float:
        """Train on ``count`` elements from ``number`` on; ``dataset`` changes with the epoch."""
        # When the coordinator says that the run is over, the function goes, and its data with it.
        runs: Any = here().cache.setdefault("training data", weakref.WeakKeyDictionary())
        kept: dict[int, IndexedDataset] = runs.setdefault(self, {})
        if dataset not in kept:
            while len(kept) >= _MOST_KEPT:
                del kept[next(iter(kept))]
            kept[dataset] = IndexedDataset(self.made)
        elements = [kept[dataset][at] for at in range(number, number + count)]
        if self.step.local:
            return engine(self.step).train_locally(here(), elements, edition)
        return engine(self.step).train(here(), elements[0], edition)


def _ended(number: int, length: int) -> ExhaustedError:
    return ExhaustedError(f"the dataset has {length} elements; number {number} was requested.")
