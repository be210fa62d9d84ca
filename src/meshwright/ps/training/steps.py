"""The steps of ``fit`` on parameter servers: workers take them, and the coordinator waits.

A step is one batch on one worker. The coordinator schedules the steps up to the next checkpoint or
the end of the epoch, waits for all of them, and reads the metrics off the servers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import keras

from ...checkpoint import CheckpointInfo, Position
from ...errors import ExhaustedError, MeshwrightError, UnreachableError
from ...frontends.keras.callbacks import others
from ...frontends.keras.checkpoint_names import LastingNames
from ...frontends.keras.program import read_state, write_state
from ...program import Logs, TrainState
from ...run.epochs import Steps, Taken
from ...run.progress import Progress
from ...run.saver import Saver
from ...run.stopping import Stopping
from ...step.local import Local
from ..coordinator.coordinator import ClusterCoordinator
from ..options import Sharding
from ..shared.consistency import Async
from .callbacks import feed_batch_end, saves
from .compression import Compression
from .feed import Feed
from .saving import TableSaver
from .serving import Served
from .shards import MeasureShard, num_shards, validate
from .worker_step import IndexedStep, Seeds, TrainStep

_DRAWS_EVERY_S = 0.2


class ServerSteps(Steps):
    """Takes the steps of one run of ``fit``."""

    def __init__(
        self,
        strategy: Any,
        of_model: Served,
        feed: Feed,
        callbacks: keras.callbacks.CallbackList,
        saver: Saver,
        *,
        compression: Compression | None,
        local: Local | None,
        sharding: Sharding,
        held_out: Feed | None,
        progress: Progress | None,
    ) -> None:
        self._served, self._feed, self._callbacks = of_model, feed, callbacks
        self._saver, self._sharding, self._progress = saver, sharding, progress
        self._model = of_model.model
        self._names = LastingNames.of(self._model, of_model.variables)
        self._coordinator = ClusterCoordinator(strategy)
        self._tables = TableSaver(saver, self._coordinator)
        # Only then may a worker keep what its last push has brought.
        fresh = not isinstance(strategy.consistency, Async)
        self._how = uuid.uuid4().hex, compression, fresh
        self._held_out, self._num_workers = held_out, strategy.num_workers
        self._measure: MeasureShard | None = None
        self._every = local.every if local else 1
        self._edition = self._num_trained = 0
        self._has_values = self._has_slots = True  # the model, not only the servers

    @property
    def num_batches(self) -> int:
        assert self._feed.steps is not None  # fit has seen to that
        return self._feed.steps

    @functools.cached_property
    def _step(self) -> TrainStep:
        """What workers run. It begins with the model's seeds, which a checkpoint may bring."""
        return self._served.step(*self._how)

    @functools.cached_property
    def _numbered(self) -> IndexedStep:
        return IndexedStep(self._step, self._feed.maker)

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[MeasureShard]:
        """What workers run to validate. A dataset that changes hears of each validation, and that
        an epoch ends before it, as in Keras; before the first one, a look at it has ended."""
        held_out = self._held_out
        assert held_out is not None  # there is data
        if held_out.changing is not None and self._measure is not None:
            held_out.changing.on_epoch_end()
        with held_out.epoch():
            if self._measure is None or held_out.changing is not None:
                shards = num_shards(self._num_workers, held_out.steps)
                self._measure = MeasureShard(self._step, held_out.maker, shards, held_out.steps)
            yield self._measure

    def __enter__(self) -> None:
        self._served.put()
        self._tables.restore(self._served.tables_away)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, UnreachableError):
            with contextlib.suppress(MeshwrightError):
                self._take()  # what was trained until then is kept
        self._tables.remove_old()

    def begin_epoch(self, epoch: int, start: CheckpointInfo | None) -> None:
        if self._served.put_changed():
            self._edition += 1
        # An epoch that was saved in its midst goes on with what its metrics have counted.
        self._served.begin_counts(start.notes.get("counts") if start else None)

    def take(self, epoch: int, done: int) -> Iterator[Taken]:
        batches = None
        with self._feed.epoch():
            if self._sharding != "dynamic":  # each worker has an iterator over its share
                maker = self._feed.maker_for(epoch, done)
                batches = iter(self._coordinator.create_per_worker_dataset(maker, self._sharding))
            elif self._feed.changing is not None:  # workers get it again, as it is now
                self._numbered = IndexedStep(self._step, self._feed.maker)
            while done < self.num_batches:
                count = self._saver.until_due(self.num_batches - done)
                self._has_values = self._has_slots = False
                with self._drawing(done):
                    trained = self._train(batches, epoch, done, count)
                self._served.move_on(trained)
                self._num_trained += trained
                done += trained
                yield Taken(trained, done, {})

    def logs(self, last: Logs) -> Logs:
        logs = self._served.logs()
        feed_batch_end(self._callbacks, self.num_batches - 1, logs)
        return logs

    def settle(self, ends: bool) -> None:
        if ends or others(self._callbacks):
            # Slots are large, and only callbacks that save look at them.
            self._take(slots=ends or saves(self._callbacks))

    def validate(self, stopping: Stopping) -> Logs:
        self._edition += 1  # workers have what they read before other workers' last steps
        seeds = self._served.seeds()
        with self._measuring() as measure:
            measured = validate(
                self._coordinator, measure, self._edition, seeds, lambda: stopping.is_asked
            )
        if measured is None:
            self._take()
            raise stopping.error()
        self._served.move_on(measured.elements, held_out=True)
        return self._served.logs_from(measured.counts)

    def finish(self) -> None:
        if self._served.average_tables():
            self._has_values = False
        self._take()
        self._model.optimizer.finalize_variable_values(self._model.trainable_weights)

    # What a checkpoint holds

    def state(self) -> TrainState:
        self._take()
        return self._names.to_checkpoint(read_state(self._served.variables))

    def load(self, state: TrainState) -> None:
        write_state(self._served.variables, self._names.from_checkpoint(state))

    def position(self, epoch: int, batches: int) -> Position:
        return Position(epoch, batches)

    def notes(self, position: Position) -> dict[str, Any]:
        counts = {"counts": self._served.counts().tolist()} if position.batches else {}
        return counts | self._tables.save(self._served.tables_away)

    def _take(self, slots: bool = True) -> None:
        """Give the model what is newer on the servers."""
        if not self._has_values:
            self._served.take(slots=False)
            self._has_values = True
        if slots and not self._has_slots:
            self._served.take_slots()
            self._has_slots = True

    # One call of the workers

    def _train(self, batches: Any, epoch: int, first: int, count: int) -> int:
        """Take ``count`` steps and wait for them; the number of steps done, also after a signal."""
        steps = self.num_batches
        dataset, begin = (0, epoch * steps) if self._feed.whole else (epoch, 0)
        scheduled, stopping, aside = 0, self._saver.stopping, self._seeds_aside()
        counted = self._served.epoch
        try:
            for at in range(first, first + count, self._every):
                if stopping.is_asked:
                    break
                scheduled += 1
                size = min(self._every, first + count - at)
                if batches is None:
                    args = (dataset, begin + at, self._edition, size, aside, counted)
                    self._coordinator.schedule(self._numbered, args)
                else:
                    args = (batches, self._edition, size, aside, counted)
                    self._coordinator.schedule(self._step, args)
            dropped = self._coordinator.join_unless(lambda: stopping.is_asked)
        except ExhaustedError as error:
            raise ExhaustedError(
                f"the data ended in epoch {epoch + 1}, before its {steps} batches "
                f"(steps_per_epoch): {error} Reduce steps_per_epoch, or repeat the dataset."
            ) from error
        return min(count, (scheduled - dropped) * self._every)

    def _seeds_aside(self) -> Seeds | None:
        """How far validation, predictions and callbacks have moved the model's seeds so far.

        Workers count on from the seeds that the run began with, and know of their own steps alone.
        """
        trained = self._served.moved(self._step.seeds, self._num_trained)
        aside = {path: now - trained[path] for path, now in self._served.seeds().items()}
        return aside if any(way.any() for way in aside.values()) else None

    @contextlib.contextmanager
    def _drawing(self, done: int) -> Iterator[None]:
        """Draw the line from a thread, while this one waits for workers."""
        progress = self._progress
        if progress is None or not progress.live:
            yield
            return
        ended, began = threading.Event(), self._coordinator.stats()["done"]

        def draw() -> None:
            while not ended.wait(_DRAWS_EVERY_S):
                calls = self._coordinator.stats()["done"] - began
                progress.after(min(done + self._every * calls, self.num_batches), {})

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
