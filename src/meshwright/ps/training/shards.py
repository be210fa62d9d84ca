"""Evaluation and prediction on the workers: every element once, also when workers die.

The elements are cut into shards by their numbers. A shard is one scheduled function: it counts all
its elements and returns the counts. If its worker dies, it is done again as a whole elsewhere, and
only the result of the attempt that ended is taken. So does TensorFlow's exact evaluation
(``pss_evaluation_shards``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError
from .data import DatasetMaker
from .worker_step import Seeds, TrainStep, as_batch, engine, here

_SHARDS_PER_WORKER = 5  # as TensorFlow: so much is done again at most when a worker dies


@dataclass(frozen=True, eq=False)
class _Shards:
    """A dataset in ``num_shards`` parts, each with every ``num_shards``-th element;
    with ``steps``, of the first ``steps`` elements.
    """

    step: TrainStep
    maker: DatasetMaker
    num_shards: int
    steps: int | None = None

    def elements(self, shard: int) -> Iterator[tuple[int, Any]]:
        """The number of each element of a shard, and the element."""
        numbers = itertools.count(shard, self.num_shards)
        elements = elements_of(self.maker(), shard, self.num_shards, self.steps)
        return zip(numbers, elements, strict=False)


class MeasureShard(_Shards):
    """Counts the metrics of one shard."""

    def __call__(self, shard: int, edition: int, seeds: Seeds) -> tuple[np.ndarray, int]:
        """The counts of one shard's elements, and how many there were."""
        measures, context = engine(self.step), here()
        counts: Any = np.zeros([])
        elements = 0
        for number, batch in self.elements(shard):
            seeds_here = measures.seeds_at(seeds, number)
            counts = counts + measures.measure(context, batch, edition, seeds_here)
            elements += 1
        return np.atleast_1d(counts), elements


class PredictShard(_Shards):
    """Predicts one shard."""

    def __call__(self, shard: int) -> list[tuple[int, list[np.ndarray]]]:
        """The number of each element, and the arrays that the model returns for it."""
        # Its own engine: the one of a run that predicts between two epochs goes on afterwards.
        computes, context = engine(self.step, "predicting"), here()
        return [
            (number, computes.predict(context, inputs_of(batch), seeds))
            for number, batch in self.elements(shard)
            for seeds in [computes.seeds_at(self.step.seeds, number)]
        ]


def inputs_of(element: Any) -> tuple[Any]:
    """The inputs of an element, as a batch that has nothing else.

    >>> inputs_of(("x", "y", "weights")), inputs_of("x")
    (('x',), ('x',))
    """
    batch = as_batch(element)
    return (batch[0],) if isinstance(batch, tuple) else (batch,)


def elements_of(dataset: Any, shard: int, num_shards: int, steps: int | None) -> Iterator[Any]:
    """Every ``num_shards``-th element from ``shard`` on, by number where the dataset has them.

    >>> list(elements_of("abcdefg", 1, 3, None)), list(elements_of(iter("abcdefg"), 1, 3, 4))
    (['b', 'e'], ['b'])
    """
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        stop = len(dataset) if steps is None else min(steps, len(dataset))
        return (dataset[number] for number in range(shard, stop, num_shards))
    return itertools.islice(iter(dataset), shard, steps, num_shards)


def num_shards(num_workers: int, steps: int | None) -> int:
    """Into how many shards a validation is cut.

    >>> num_shards(2, None), num_shards(2, 3)
    (10, 3)
    """
    most = _SHARDS_PER_WORKER * max(1, num_workers)
    return most if steps is None else max(1, min(most, steps))


class Measured(NamedTuple):
    """The counts of the metrics over all elements, and how many elements there were."""

    counts: np.ndarray
    elements: int


def validate(
    coordinator: Any,
    measure: MeasureShard,
    edition: int,
    seeds: Seeds,
    interrupted: Callable[[], bool] = lambda: False,
    after: Callable[[int], None] = lambda ended: None,
) -> Measured | None:
    """What was measured over all elements; ``None`` where it was ``interrupted``.

    ``seeds`` are those of the first element. ``after`` is called with the number of shards that
    have ended, again and again. The same ``measure`` should be given each time: it travels to a
    worker once. Raises :class:`~meshwright.DataError` if there are no elements.
    """
    shards = range(measure.num_shards)
    values = [coordinator.schedule(measure, args=(shard, edition, seeds)) for shard in shards]
    if coordinator.join_unless(watching(values, after, interrupted)):
        return None
    results = coordinator.fetch(values)
    total = sum(elements for _, elements in results)
    if not total:
        raise DataError("cannot evaluate: the data holds no batch.")
    counts = sum((counts for counts, elements in results if elements), np.zeros([]))
    return Measured(counts, total)


def watching(
    values: Sequence[Any],
    after: Callable[[int], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> Callable[[], bool]:
    """What ``join_unless`` asks: whether to stop. It reports the number of ended shards as well."""

    def look() -> bool:
        after(sum(value.done() for value in values))
        return interrupted()

    return look
