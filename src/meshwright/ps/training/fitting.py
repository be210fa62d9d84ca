"""``fit`` and ``evaluate`` of a Keras model on parameter servers.

``steps_per_epoch`` counts the steps of all workers together, as TensorFlow does.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras

from ...errors import DataError
from ...frontends.keras.callbacks import KerasCallbacks
from ...frontends.keras.memory import separate
from ...frontends.keras.options import check_compiled, check_fit, check_options
from ...frontends.keras.preprocessing import refuse_to_preprocess
from ...program import Logs
from ...run.epochs import Run
from ...run.options import Data, Schedule, Validation
from ...run.progress import Progress
from ...run.saver import Saver
from ...step.local import Local
from ..coordinator.coordinator import ClusterCoordinator
from ..coordinator.data import check_sharding
from ..options import InputOptions, Tables
from .callbacks import checked_callbacks, warn_of_tables
from .compression import Compression
from .compression import compression as compression_of
from .feed import Feed, feed_of
from .model_cache import served
from .progress import WorkerRates
from .server_variables import Subject
from .shard_bar import ShardBar
from .shards import MeasureShard, num_shards, validate
from .signature import Signature
from .steps import ServerSteps


def fit(
    strategy: Any,
    model: keras.Model,
    data: Data,
    validation: Validation,
    schedule: Schedule,
    saver: Callable[[], Saver],
    *,
    input_options: InputOptions,
    tables: Tables,
    local: Local | None,
    compression: str | Compression | None,
) -> keras.callbacks.History:
    """See :meth:`ParameterServer.fit`; ``saver`` makes one when all else was checked."""
    refuse_to_preprocess(model, data.x)
    data, validation, schedule = check_fit(model, data, validation, schedule)
    check_sharding(input_options.sharding)
    how, workers = compression_of(compression), strategy.num_workers
    feed = feed_of(data, schedule.epochs, num_workers=workers, seed=input_options.seed)
    if feed.steps is None:
        raise DataError(
            "the length of the dataset is unknown: give steps_per_epoch=, the steps of all workers "
            "together in one epoch."
        )
    held_out = None if validation.data is None else _held_out(validation, workers)
    callbacks = checked_callbacks(model, schedule, feed.steps)
    saves = saver()
    examples = [*feed.examples, *_of_other_shapes(held_out, feed)]
    any_rows = not (feed.alike and (held_out is None or held_out.alike))
    of_model = served(Subject(strategy, model, examples, tables), local, any_rows)
    warn_of_tables(callbacks, of_model.lookups.served)
    progress = None
    if schedule.verbose:
        rows, every = Signature.of(feed.examples[0]).rows, local.every if local else 1
        rates = WorkerRates.of(ClusterCoordinator(strategy).stats, every, rows)
        progress = Progress(schedule.epochs, feed.steps, rates)
    steps = ServerSteps(
        strategy,
        of_model,
        feed,
        callbacks,
        saves,
        compression=how,
        local=local,
        sharding=input_options.sharding,
        held_out=held_out,
        progress=progress,
    )
    due = () if held_out is None else validation.freq
    with saves.claimed():
        Run(steps, saves, KerasCallbacks(model, callbacks), schedule, due, progress).train()
    separate(model)
    return model.history


def evaluate(
    strategy: Any, model: keras.Model, data: Data, verbose: str | int, tables: Tables
) -> Logs:
    """See :meth:`ParameterServer.evaluate`; what it measures, by name."""
    check_compiled(model)
    check_options(batch_size=data.batch_size, verbose=verbose, steps=data.steps)
    refuse_to_preprocess(model, data.x)
    workers = strategy.num_workers
    feed = feed_of(data, num_workers=workers)
    of_model = served(Subject(strategy, model, feed.examples, tables), any_rows=not feed.alike)
    of_model.put_values()
    step = of_model.step(uuid.uuid4().hex, None, fresh=False)
    measure = MeasureShard(step, feed.maker, num_shards(workers, data.steps), data.steps)
    bar = ShardBar(verbose, measure.num_shards)
    coordinator = ClusterCoordinator(strategy)
    with feed.epoch():
        measured = validate(coordinator, measure, 0, of_model.seeds(), after=bar.look)
    assert measured is not None  # nothing breaks it off
    of_model.move_on(measured.elements, held_out=True)
    logs = of_model.logs_from(measured.counts)
    bar.end(logs)
    return logs


def _held_out(validation: Validation, num_workers: int) -> Feed:
    arrays = validation.data if isinstance(validation.data, tuple) else (validation.data,)
    size = validation.batch_size if isinstance(validation.data, tuple) else None
    feed = feed_of(Data(*arrays, batch_size=size), num_workers=num_workers)
    return replace(feed, steps=validation.steps)


def _of_other_shapes(held_out: Feed | None, feed: Feed) -> list[Any]:
    """One batch to validate on of each shape that the training data does not have."""
    if held_out is None:
        return []
    trained = {Signature.of(batch) for batch in feed.examples}
    return [batch for batch in held_out.examples if Signature.of(batch) not in trained]
