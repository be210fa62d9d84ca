"""The steps of a :class:`Trainer` in a run: one epoch, which goes on in every run."""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..checkpoint import CheckpointInfo, Position
from ..checkpoint.randomness import read_randomness, write_randomness
from ..data.shard import reading_of
from ..errors import CheckpointError
from ..program import Batch, TrainState
from .epochs import Steps, Taken
from .saver import Saver

if TYPE_CHECKING:
    from .trainer import Trainer


class ProgramSteps(Steps):
    """Trains on every batch once, over all runs together."""

    def __init__(
        self,
        trainer: Trainer,
        state: TrainState,
        batches: Iterable[Batch],
        saver: Saver,
    ) -> None:
        self._trainer, self.newest = trainer, state
        source = reading_of(batches, trainer.placement)
        self._source = TrainedBatches(source, saver.start, saver.is_on)
        self._position = saver.start.position.batches if saver.start else 0

    def take(self, epoch: int, done: int) -> Iterator[Taken]:
        per_step = self._trainer.how.batches
        for info in self._trainer.steps(self.newest, self._source):
            self.newest = info.state
            self._source.took(per_step)
            self._position += per_step
            yield Taken(1, self._position, info.logs)

    def state(self) -> TrainState:
        return self._trainer.unpadded(self.newest)

    def load(self, state: TrainState) -> None:
        self.newest = self._trainer.padded(state)

    def position(self, epoch: int, batches: int) -> Position:
        """The batches have no epochs: a longer source goes on behind its former end."""
        return self._source.position(self._position)


class TrainedBatches:
    """Batches from where the last run stood, which are counted as they are trained on.

    An iterator that has ``get_state`` and ``set_state``, as Grain's do, is put there directly. Of
    any other, what was trained on is drawn again, from the same randomness, and left out. The
    position is noted for a run that ``saves`` only.
    """

    def __init__(self, batches: Iterable[Batch], start: CheckpointInfo | None, saves: bool) -> None:
        before = start.position if start else Position()
        if before.random is not None:
            write_randomness(before.random)
        self._random = read_randomness()
        self._items = iter(batches)
        has_state = hasattr(self._items, "get_state") and hasattr(self._items, "set_state")
        self._has_state = saves and has_state
        self._states: deque[Any] = deque()  # after each batch that was read but not yet trained on
        self._state: Any = before.data
        self._skip = before.batches
        if self._has_state and before.data is not None:
            self._items.set_state(_decoded(before.data))  # pyright: ignore[reportAttributeAccessIssue]
            self._skip = 0

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self._items):
            if number >= self._skip:
                if self._has_state:
                    self._states.append(_encoded(self._items.get_state()))  # pyright: ignore[reportAttributeAccessIssue]
                yield batch

    def took(self, batches: int) -> None:
        """Note that ``batches`` more batches were trained on."""
        for _ in range(min(batches, len(self._states))):
            self._state = self._states.popleft()

    def position(self, batches: int) -> Position:
        """The position after ``batches`` batches."""
        return Position(0, batches, self._random, self._state)


def _encoded(state: Any) -> Any:
    """An iterator's state as a JSON value."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        return {"value": json.loads(json.dumps(state))}
    except TypeError as error:
        raise CheckpointError(
            f"the position in the data cannot be saved: get_state() of the dataset gave {state!r}, "
            "which is neither bytes nor made of JSON values."
        ) from error


def _decoded(state: Any) -> Any:
    return base64.b64decode(state["bytes"]) if "bytes" in state else state["value"]
