"""When ``fit`` validates, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...frontends.keras.epochs import is_due
from .feed import Feed, feed_of
from .signature import Signature


@dataclass(frozen=True, eq=False)
class Validation:
    """The ``validation_*`` arguments: data, how much of it, and after which epochs."""

    feed: Feed | None = None
    steps: int | None = None
    freq: int | Sequence[int] = 1

    @classmethod
    def of(
        cls,
        data: Any,
        steps: int | None,
        freq: int | Sequence[int],
        batch_size: int | None,
        num_workers: int,
    ) -> Validation:
        """From what ``fit`` is given."""
        if data is None:
            return cls()
        arrays = data if isinstance(data, tuple) else (data,)
        size = batch_size if isinstance(data, tuple) else None
        feed = feed_of(*arrays, batch_size=size, num_workers=num_workers)
        return cls(feed, steps, freq)

    def examples(self, others: Feed) -> list[Any]:
        """One batch of each shape that the training data does not have."""
        if self.feed is None:
            return []
        known = {Signature.of(batch) for batch in others.examples}
        return [batch for batch in self.feed.examples if Signature.of(batch) not in known]

    @property
    def alike(self) -> bool:
        """Whether all shapes are known."""
        return self.feed is None or self.feed.alike

    def is_due(self, epoch: int) -> bool:
        """Whether this epoch, counted from 0, ends with a validation."""
        return self.feed is not None and is_due(self.freq, epoch)
