"""What a worker does for ``predict``: the outputs of its share of the batches, by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .data import Made
from .validation import elements_of
from .worker_step import TrainStep, as_batch, engine, here


@dataclass(frozen=True, eq=False)
class PredictShard:
    """Predicts every ``num_shards``-th element of a dataset, of the first ``steps`` if given."""

    step: TrainStep
    made: Made
    num_shards: int
    steps: int | None = None

    def __call__(self, shard: int) -> list[tuple[int, list[np.ndarray]]]:
        """The number of each element, and the arrays that the model returns for it."""
        # Its own engine: the one of a run that predicts between two epochs goes on afterwards.
        computes, context = engine(self.step, "predicting"), here()
        batches = elements_of(self.made(), shard, self.num_shards, self.steps)
        return [
            (shard + at * self.num_shards, computes.predict(context, inputs_of(batch)))
            for at, batch in enumerate(batches)
        ]


def inputs_of(element: Any) -> tuple[Any]:
    """The inputs of an element, as a batch that has nothing else.

    >>> inputs_of(("x", "y", "weights")), inputs_of("x")
    (('x',), ('x',))
    """
    batch = as_batch(element)
    return (batch[0],) if isinstance(batch, tuple) else (batch,)
