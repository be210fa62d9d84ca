"""``fit`` and ``evaluate`` of a Keras model on parameter servers.

A step is one batch on one worker. ``steps_per_epoch`` counts the steps of all workers together, as
TensorFlow does. The coordinator schedules the steps of an epoch, waits for all of them, reads the
metrics off the servers, and calls the callbacks.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import keras

from ...checkpoint import Position
from ...checkpoint.asked import Resume
from ...errors import DataError, ExhaustedError, MeshwrightError, UnreachableError
from ...frontends.keras.options import check_compiled
from ...run.logs import as_json, history_from_json
from ...program import Logs
from ..coordinator.coordinator import ClusterCoordinator
from ..coordinator.data import check_sharding
from ..shared.consistency import Async
from .callbacks import callback_list, feed_batch_end, others, saves
from .compression import Compression
from .compression import compression as compression_of
from .embeddings import LEAST_BYTES
from .feed import Feed, feed_of
from .known import served
from .local import Local
from .numbered import NumberedStep
from .progress import Watch
from .saving import TrainingSaver
from .serving import Served
from .signature import Signature
from .validating import Validation
from .validation import MeasureShard, num_shards, validate


def fit(
    strategy: Any,
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_data: Any = None,
    validation_steps: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    shuffle: bool = True,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    checkpoint: str | Path | None = None,
    save_every: int | None = None,
    keep: int | None = 3,
    resume: Resume = "auto",
    sharding: str = "dynamic",
    embeddings: int | Sequence[str] | None = LEAST_BYTES,
    table_optimizer: Any = None,
    local: Local | None = None,
    compression: str | Compression | None = None,
    seed: int = 0,
) -> keras.callbacks.History:
    """Train a compiled Keras model, as it is, on the workers and servers of a strategy.

    ``x`` is a function that makes a dataset of batches on every worker (it is given an
    :class:`InputContext`), a dataset that can be sent to them, or arrays with ``y``,
    ``batch_size``, ``sample_weight`` and ``shuffle`` (by ``seed``). With ``sharding="dynamic"``
    each batch goes to one worker, on demand. ``steps_per_epoch`` are the steps of all workers
    together; it must be given for datasets that do not know their length. ``validation_data`` is
    given like ``x``, or as ``(x, y)``; every element is counted once, also when workers die.

    ``checkpoint`` is a directory that is written to after each epoch, or after ``save_every``
    steps, and that the run goes on from (``resume``). ``embeddings`` says which Embedding layers
    travel by rows: a least number of bytes of their tables, names, or ``None`` for none.
    ``table_optimizer`` is one of Keras' for all of these tables that have none of their own.
    ``local`` is :class:`LocalSGD` or :class:`DiLoCo`, ``compression`` how gradients are made
    smaller on their way.

    Raises :class:`~meshwright.ModelError` for a model, an optimizer or a callback that cannot be
    trained so, and :class:`~meshwright.DataError` where the data ends too soon.
    """
    check_compiled(model)
    check_sharding(sharding)
    how = compression_of(compression)
    feed = feed_of(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps_per_epoch,
        shuffle=shuffle,
        num_workers=strategy.num_workers,
        seed=seed,
    )
    steps = _steps_of(feed)
    validation = Validation.of(
        validation_data, validation_steps, validation_freq, batch_size, strategy.num_workers
    )
    called = callback_list(model, callbacks, epochs, steps, verbose)
    saver = TrainingSaver(checkpoint, save_every, keep, resume)
    of_model = served(
        strategy,
        model,
        [*feed.examples, *validation.examples(feed)],
        embeddings=embeddings,
        table_optimizer=table_optimizer,
        local=local,
        any_rows=not (feed.alike and validation.alike),
    )
    saver.restore(model, of_model.variables)
    run = _Run(strategy, of_model, feed, called, saver, how, local, sharding, epochs, verbose)
    return run.all_epochs(validation, initial_epoch)


def evaluate(
    strategy: Any,
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    sample_weight: Any = None,
    steps: int | None = None,
    embeddings: int | Sequence[str] | None = LEAST_BYTES,
) -> Logs:
    """The loss and the metrics of a model over all batches, each counted once.

    The workers of the strategy measure; data is given as to :func:`fit`.
    """
    check_compiled(model)
    workers = strategy.num_workers
    feed = feed_of(x, y, sample_weight, batch_size=batch_size, steps=steps, num_workers=workers)
    of_model = served(
        strategy, model, feed.examples, embeddings=embeddings, any_rows=not feed.alike
    )
    of_model.put_values()
    step = of_model.step(uuid.uuid4().hex, None, fresh=False)
    measure = MeasureShard(step, feed.made, num_shards(workers, steps), steps)
    counts = validate(ClusterCoordinator(strategy), measure, 0)
    assert counts is not None  # nothing breaks it off
    return of_model.logs_from(counts)


class _Run:
    """One run of ``fit``."""

    def __init__(
        self,
        strategy: Any,
        of_model: Served,
        feed: Feed,
        callbacks: keras.callbacks.CallbackList,
        saver: TrainingSaver,
        compression: Compression | None,
        local: Local | None,
        sharding: str,
        epochs: int,
        verbose: str | int,
    ) -> None:
        self._strategy, self._served, self._feed = strategy, of_model, feed
        self._callbacks, self._saver, self._sharding = callbacks, saver, sharding
        self._model, self._epochs = of_model.model, epochs
        self._coordinator = ClusterCoordinator(strategy)
        # Only then may a worker keep what its last push has brought.
        fresh = not isinstance(strategy.consistency, Async)
        self._step = of_model.step(uuid.uuid4().hex, compression, fresh)
        self._numbered = NumberedStep(self._step, feed.made)
        self._measure: MeasureShard | None = None
        self._every = local.every if local else 1
        self._edition = 0
        shown = verbose not in (0, "0")
        self._watch = Watch(
            self._coordinator.stats,
            epochs,
            steps_per_call=self._every,
            batch_rows=Signature.of(feed.examples[0]).rows,
            shown=shown,
        )

    def all_epochs(self, validation: Validation, initial_epoch: int) -> keras.callbacks.History:
        """Train, and bring everything back into the model; signals are heard meanwhile."""
        with self._saver.stopping:
            return self._all_epochs(validation, initial_epoch)

    def _all_epochs(self, validation: Validation, initial_epoch: int) -> keras.callbacks.History:
        model, callbacks, saver = self._model, self._callbacks, self._saver
        first = saver.position.epoch if saver.start else initial_epoch
        skip = saver.position.batches
        self._served.put()
        saver.restore_tables(self._coordinator, self._served.tables_away)
        model.stop_training = False
        callbacks.on_train_begin()
        self._put_back_history()
        logs: Logs = {}
        try:
            for epoch in range(first, first if saver.was_stopped else self._epochs):
                callbacks.on_epoch_begin(epoch)
                logs = self._epoch(epoch, skip)
                skip = 0
                if validation.is_due(epoch):
                    logs |= self._validated(validation, epoch)
                self._watch.end_epoch(logs)
                callbacks.on_epoch_end(epoch, logs)
                ended = model.stop_training or epoch + 1 == self._epochs
                self._after_epoch(epoch, ended)
                if saver.stopping.is_asked:
                    self._stop(Position(epoch + 1, 0))
                if model.stop_training:
                    break
            if model.stop_training:
                self._served.take_slots()
            self._model.optimizer.finalize_variable_values(model.trainable_weights)
            callbacks.on_train_end(logs=logs)
        except UnreachableError:
            raise
        except Exception:
            with contextlib.suppress(MeshwrightError):
                self._take()  # what was trained until then is kept
            raise
        finally:
            self._watch.stop()
            saver.close()
        return model.history

    def _epoch(self, epoch: int, skip: int) -> Logs:
        if self._served.put_changed():
            self._edition += 1
        self._served.forget_counts(self._saver.take_counts())
        steps = self._steps
        self._watch.begin_epoch(epoch, steps, skip)
        batches, done = self._batches(epoch, skip), skip
        while done < steps:
            count = self._saver.until_due(steps - done)
            trained = self._train(batches, epoch, done, count)
            done += trained
            self._saver.step += trained
            if self._saver.stopping.is_asked:
                self._stop(Position(epoch, done))
            if self._saver.is_due and done < steps:
                self._take()
                self._save(Position(epoch, done))
        self._watch.trained()
        logs = self._served.logs()
        last = epoch + 1 == self._epochs
        if last or self._saver.is_on or others(self._callbacks):
            # Slots are large, and only who saves looks at them.
            self._take(slots=last or self._saver.is_on or saves(self._callbacks))
        feed_batch_end(self._callbacks, steps - 1, logs)
        return logs

    def _stop(self, position: Position) -> NoReturn:
        """A signal has come: keep what there is, and end as it wants."""
        self._take()
        self._save(position)
        raise self._saver.stopping.error()

    def _batches(self, epoch: int, skip: int) -> Any:
        """The workers' iterators over an epoch, where each worker has a share of its own."""
        if self._sharding == "dynamic":
            return None
        made = self._feed.made_for(epoch, skip)
        return iter(self._coordinator.create_per_worker_dataset(made, self._sharding))

    def _train(self, batches: Any, epoch: int, first: int, count: int) -> int:
        """Take ``count`` steps and wait for them; the number of steps done, also after a signal."""
        dataset, begin = (0, epoch * self._steps) if self._feed.whole else (epoch, 0)
        scheduled, stopping = 0, self._saver.stopping
        try:
            for at in range(first, first + count, self._every):
                if stopping.is_asked:
                    break
                scheduled += 1
                size = min(self._every, first + count - at)
                if batches is None:
                    args = (dataset, begin + at, self._edition, size)
                    self._coordinator.schedule(self._numbered, args)
                else:
                    self._coordinator.schedule(self._step, (batches, self._edition, size))
            dropped = self._coordinator.join_unless(lambda: stopping.is_asked)
        except ExhaustedError as error:
            raise ExhaustedError(
                f"the data ended in epoch {epoch + 1}, before its {self._steps} batches "
                f"(steps_per_epoch): {error} Reduce steps_per_epoch, or repeat the dataset."
            ) from error
        return min(count, (scheduled - dropped) * self._every)

    def _validated(self, validation: Validation, epoch: int) -> Logs:
        assert validation.feed is not None  # it is due
        self._edition += 1  # workers have what they read before other workers' last steps
        if self._measure is None:
            shards = num_shards(self._strategy.num_workers, validation.steps)
            made = validation.feed.made
            self._measure = MeasureShard(self._step, made, shards, validation.steps)
        stopping = self._saver.stopping
        counts = validate(
            self._coordinator, self._measure, self._edition, lambda: stopping.is_asked
        )
        if counts is None:
            self._stop(Position(epoch, self._steps))
        logs = self._served.logs_from(counts)
        return {f"val_{name}": value for name, value in logs.items()}

    def _after_epoch(self, epoch: int, ended: bool) -> None:
        if self._saver.by_epoch or self._saver.is_due or ended:
            self._save(Position(epoch + 1, 0), ended=ended)
        if ended:
            self._served.move_on(self._steps * (epoch + 1))

    def _take(self, slots: bool = True) -> None:
        self._served.take(slots)

    def _save(self, position: Position, ended: bool = False) -> None:
        history = {"epoch": self._history.epoch, "logs": as_json(self._history.history)}
        # An epoch that is saved in its midst goes on with what its metrics have counted.
        counts = {"counts": self._served.counts().tolist()} if position.batches else {}
        tables = self._saver.save_tables(self._coordinator, self._served.tables_away)
        self._saver.save(
            self._model,
            self._served.variables,
            position,
            layout=repr(self._strategy),
            notes={
                "history": history,
                "stopped": bool(self._model.stop_training),
                "ended": ended,
                **counts,
                **tables,
            },
        )

    def _put_back_history(self) -> None:
        before = self._saver.history()
        if before:
            self._history.epoch = list(before["epoch"])
            self._history.history = history_from_json(before["logs"])

    @property
    def _steps(self) -> int:
        return _steps_of(self._feed)

    @property
    def _history(self) -> keras.callbacks.History:
        kind = keras.callbacks.History
        return next(each for each in self._callbacks.callbacks if isinstance(each, kind))


def _steps_of(feed: Feed) -> int:
    if feed.steps is None:
        raise DataError(
            "the length of the dataset is unknown: give steps_per_epoch=, the steps of all workers "
            "together in one epoch."
        )
    return feed.steps
