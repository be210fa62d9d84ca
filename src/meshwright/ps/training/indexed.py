"""Elements of a dataset by number: a step names its own, so that a retry gets the same one.

The numbers are handed out with the steps, in order, to whichever worker takes a step. Nothing is
asked for on the way, and one worker sees the batches in the order of the dataset.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from ..worker.iterators import IndexedElements
from .data import Made
from .worker_step import TrainStep, engine, here

_MOST_KEPT = 2  # datasets of epochs that a worker keeps of a run


@dataclass(frozen=True, eq=False)
class IndexedStep:
    """A step of training on the elements of these numbers."""

    step: TrainStep
    made: Made

    def __call__(self, dataset: int, number: int, edition: int = 0, count: int = 1) -> float:
        """Train on ``count`` elements from ``number`` on; ``dataset`` changes with the epoch."""
        # When the coordinator says that the run is over, the function goes, and its data with it.
        runs: Any = here().cache.setdefault("training data", weakref.WeakKeyDictionary())
        kept: dict[int, IndexedElements] = runs.setdefault(self, {})
        if dataset not in kept:
            while len(kept) >= _MOST_KEPT:
                del kept[next(iter(kept))]
            kept[dataset] = IndexedElements(self.made)
        elements = [kept[dataset][at] for at in range(number, number + count)]
        if self.step.local:
            return engine(self.step).train_locally(here(), elements, edition)
        return engine(self.step).train(here(), elements[0], edition)
