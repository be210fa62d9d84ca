"""A training loop that saves as it goes, and goes on where an earlier run of it stood."""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..checkpoint import CheckpointInfo, Checkpoints, Position
from ..checkpoint.asked import check_every
from ..checkpoint.randomness import read_randomness, write_randomness
from ..errors import CheckpointError
from ..program import Batch, Logs, TrainState
from .stopping import Stopping

if TYPE_CHECKING:
    from .loop import Trainer


def train_saving(
    trainer: Trainer,
    state: TrainState,
    batches: Iterable[Batch],
    checkpoints: Checkpoints,
    every: int | None,
    layout: str,
) -> tuple[TrainState, Logs]:
    """Train on every batch once over all runs; see :meth:`Trainer.train`."""
    check_every(every)
    start = checkpoints.latest
    if start is not None:
        state = trainer.padded(checkpoints.restore(trainer.unpadded(state), start))
    source = Source(batches, start)
    step = start.step if start else 0
    per_step = trainer.how.accumulate
    logs: Logs = _logs_before(start)
    stopping = Stopping(saves=True)

    def save() -> None:
        late = dict(logs)
        checkpoints.save(
            step,
            trainer.unpadded(state),
            source.position(step * per_step),
            layout=layout,
            late_notes=lambda: {"logs": {name: _float(value) for name, value in late.items()}},
        )

    saved = step
    with stopping:
        for _, state, logs in trainer.steps(state, source):  # noqa: B007, B020 - save() reads them
            step += 1
            source.took(per_step)
            asked = stopping.asked()
            if (every and step % every == 0) or (asked and stopping.saves):
                save()
                saved = step
            if asked:
                break
        if step > saved and not stopping.is_asked:
            save()
        checkpoints.wait()
    if stopping.is_asked:
        raise stopping.error()
    return state, logs


class Source:
    """Batches from where the last run stood, which are counted as they are trained on.

    An iterator that has ``get_state`` and ``set_state``, as Grain's do, is put there directly. Of
    any other, what was trained on is drawn again, from the same randomness, and left out.
    """

    def __init__(self, batches: Iterable[Batch], start: CheckpointInfo | None) -> None:
        before = start.position if start else Position()
        if before.random is not None:
            write_randomness(before.random)
        self._random = read_randomness()
        self._items = iter(batches)
        self._has_state = hasattr(self._items, "get_state") and hasattr(self._items, "set_state")
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


def _logs_before(start: CheckpointInfo | None) -> Logs:
    return dict(start.notes.get("logs", {})) if start else {}


def _float(value: Any) -> Any:
    import numpy as np

    return np.asarray(value).tolist()
