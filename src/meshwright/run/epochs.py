"""The loop over the epochs of a run, whatever takes its steps.

What differs between training on this process's devices, on parameter servers, and of a plain JAX
program is a :class:`Steps`; what users attach to the loop are :class:`Callbacks`. When to save, to
validate, to draw and to stop is decided here and in :mod:`~meshwright.run.saver`, once.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..checkpoint import CheckpointInfo, Position
from ..errors import Preempted
from ..launch.join import naming_failures
from ..launch.progress import entering, inside
from ..program import Logs, TrainState
from .options import Schedule
from .progress import Progress
from .saver import Saver
from .stopping import Stopping


class Taken(NamedTuple):
    """The steps of one call: how many, how many batches of the epoch are done, the last logs."""

    steps: int
    done: int  # batches of the epoch, those before included
    logs: Logs  # may still be computing


class Steps(contextlib.AbstractContextManager[Any]):
    """A way to take the steps of a run, which is a context around it.

    However the run ends, leaving the context brings the newest state to where users look for it.
    """

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return None

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch, where that is known."""
        return None

    def begin_epoch(self, epoch: int, start: CheckpointInfo | None) -> None:
        """Prepare for an epoch; ``start`` is the checkpoint that the run resumes in it."""

    @abstractmethod
    def take(self, epoch: int, done: int) -> Iterator[Taken]:
        """Take the epoch's steps after the first ``done`` batches.

        Whenever it yields, no step is half done: the state can be saved, and the run can stop.
        """

    def logs(self, last: Logs) -> Logs:
        """Wait for the steps of the epoch; its logs, where ``last`` are those of the last step."""
        return last

    def settle(self, ends: bool) -> None:
        """Bring the newest state to where callbacks and a validation look for it.

        ``ends`` says that no epoch follows.
        """

    def validate(self, stopping: Stopping) -> Logs:
        """Measure on the validation data; a signal stops it at once, with its error."""
        raise NotImplementedError

    def finish(self) -> None:
        """The last step of a run that was not cut off is done."""

    # What a checkpoint holds

    @abstractmethod
    def state(self) -> TrainState:
        """The newest state, by the names that checkpoints keep."""

    @abstractmethod
    def load(self, state: TrainState) -> None:
        """Continue from a state as :meth:`state` returns it."""

    @abstractmethod
    def position(self, epoch: int, batches: int) -> Position:
        """What is needed to find this place in the data again."""

    def notes(self, position: Position) -> dict[str, Any]:
        """JSON values to go into a checkpoint beside the state."""
        return {}


class Callbacks:
    """What is called as a run goes on, and may end it; these do nothing."""

    may_change_state = False

    @property
    def stop(self) -> bool:
        """Whether the run is to end after this epoch."""
        return False

    def first_epoch(self, epoch: int) -> int:
        """The epoch to begin with, where no checkpoint says so."""
        return epoch

    def begin(self, before: Mapping[str, Any] | None) -> None:
        """The run begins; ``before`` is what :meth:`notes` gave the run that it resumes."""

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, counted from 0."""

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        """An epoch has ended, validation included."""

    def end(self, logs: Logs) -> None:
        """The run has ended, and was not cut off."""

    def notes(self) -> dict[str, Any]:
        """JSON values to go into a checkpoint: what they have counted."""
        return {}


def is_due(freq: int | Sequence[int], epoch: int) -> bool:
    """Whether what comes every ``freq`` epochs, or after those of these numbers from 1, is due.

    ``epoch`` counts from 0.

    >>> [epoch for epoch in range(6) if is_due(2, epoch)], is_due([1, 4], 3)
    ([1, 3, 5], True)
    """
    return (epoch + 1) % freq == 0 if isinstance(freq, int) else epoch + 1 in freq


@dataclass
class Run:
    """One run: epochs of steps, each validated, shown, saved where that is due.

    ``validates`` says after which epochs the steps are to validate (see :func:`is_due`).
    """

    steps: Steps
    saver: Saver
    callbacks: Callbacks
    schedule: Schedule = field(default_factory=Schedule)
    validates: int | Sequence[int] = ()
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._start = self.saver.start
        self._batches_done = 0  # batches of the epoch under way
        self._last: Logs = {}  # of the last step

    def train(self) -> Logs:
        """Train until the last epoch or until a callback ends it; the logs of the last epoch.

        Ctrl-C, and SIGTERM where the run is saved, end it between two steps, after saving: then
        KeyboardInterrupt or :class:`~meshwright.Preempted` is raised.
        """
        start, steps, callbacks, logs = self._start, self.steps, self.callbacks, {}
        if start is not None:
            self.saver.restore(steps)
        with steps, naming_failures():
            callbacks.begin(start.notes if start else None)
            first = callbacks.first_epoch(self.schedule.initial_epoch)
            if start is not None:
                ended = start.notes.get("stopped")
                first = self.schedule.epochs if ended else start.position.epoch
            with self.saver.running():
                for epoch in range(first, self.schedule.epochs):
                    logs = self._epoch(epoch)
                    if callbacks.stop:
                        break
            if self.schedule.epochs > self.schedule.initial_epoch:
                steps.finish()
            callbacks.end(logs)
        entering("script")
        return logs

    def _epoch(self, epoch: int) -> Logs:
        steps, saver, callbacks, progress = self.steps, self.saver, self.callbacks, self.progress
        entering("callbacks")
        callbacks.begin_epoch(epoch)
        self._begin(epoch)
        if progress:
            progress.begin_epoch(epoch, self._batches_done)
        for steps_taken in steps.take(epoch, self._batches_done):
            self._batches_done, self._last = steps_taken.done, steps_taken.logs
            saver.step += steps_taken.steps
            if saver.is_due:
                self._save(epoch, self._batches_done)
            saver.copy(steps, callbacks, epoch, steps_taken.done, steps_taken.logs)
            self._stop_if_asked(epoch, self._batches_done)
            if progress:
                progress.after(steps_taken.done, steps_taken.logs)
        logs = steps.logs(self._last)
        if progress:
            progress.trained()
        steps.settle(self._ends(epoch))
        if is_due(self.validates, epoch):
            logs |= self._validated(epoch)
        if progress:
            progress.end_epoch(logs)
        entering("callbacks")
        callbacks.end_epoch(epoch, logs)
        if saver.by_epoch or self._ends(epoch):
            self._save(epoch + 1, 0)
        self._stop_if_asked(epoch + 1, 0)
        return logs

    def _begin(self, epoch: int) -> None:
        """Begin an epoch, or resume the one that a checkpoint was written in."""
        start, self._start = self._start, None
        self._batches_done, self._last = 0, {}
        if start is not None and start.position.batches:
            self._batches_done = start.position.batches
            self._last = dict(start.notes.get("logs", {}))
            if self.callbacks.may_change_state:
                # What they change as an epoch begins was changed before this state was saved.
                self.saver.restore(self.steps)
        self.steps.begin_epoch(epoch, start)

    def _ends(self, epoch: int) -> bool:
        return self.callbacks.stop or epoch + 1 == self.schedule.epochs

    def _validated(self, epoch: int) -> Logs:
        try:
            logs = self.steps.validate(self.saver.stopping)
        except (KeyboardInterrupt, Preempted):
            self._save(epoch, self._batches_done)  # the next run validates first
            raise
        return {f"val_{name}": value for name, value in logs.items()}

    def _stop_if_asked(self, epoch: int, batches: int) -> None:
        if self.saver.stopping.asked():
            self.steps.settle(ends=True)
            self._save(epoch, batches)
            raise self.saver.stopping.error()

    def _save(self, epoch: int, batches: int) -> None:
        ended = batches == 0 and self._ends(epoch - 1)
        with inside("save"):
            self.saver.save(self.steps, self.callbacks, epoch, batches, self._last, ended)
