"""``predict`` on parameter servers: the workers look up the rows that each batch names.

A prediction changes nothing but how far the model's seeds are: keys that a hash table does not have
get the row that they would begin with, and none is made.
"""

from __future__ import annotations

import uuid
from typing import Any

import jax
import keras
import numpy as np

from ... import _compat
from ...errors import BatchError
from ...frontends.keras.options import check_options, check_predicts
from ...frontends.keras.preprocessing import refuse_to_preprocess
from ...frontends.keras.program import KerasVariables, keras_program
from ...program import Aux, Batch, Program, TrainState
from ...run.options import Data
from ...step.padding import Padded
from ..coordinator.coordinator import ClusterCoordinator
from ..options import Tables
from .embeddings import KerasLookups, building
from .export import export_step
from .feed import feed_of
from .model_cache import cached_on_model
from .server_variables import OnServers, Subject, layout_on_workers
from .shard_bar import ShardBar
from .shards import PredictShard, inputs_of, num_shards, watching
from .worker_step import TrainStep


def predict(
    strategy: Any, model: keras.Model, data: Data, verbose: str | int, tables: Tables
) -> Any:
    """See :meth:`ParameterServer.predict`."""
    check_predicts(model)
    check_options(batch_size=data.batch_size, verbose=verbose, steps=data.steps)
    refuse_to_preprocess(model, data.x)
    workers = strategy.num_workers
    feed = feed_of(data, num_workers=workers, predicts=True)
    batches = [inputs_of(example) for example in feed.examples]
    subject = Subject(strategy, model, batches, tables)
    purpose = ("predict", tables.embeddings, feed.alike)
    of_model = cached_on_model(subject, purpose, lambda: Predicted(subject, feed.alike))
    of_model.put_values()
    count = num_shards(workers, data.steps)
    shards = PredictShard(of_model.step(), feed.maker, count, data.steps)
    coordinator = ClusterCoordinator(strategy)
    bar = ShardBar(verbose, shards.num_shards)
    with feed.epoch():
        values = [coordinator.schedule(shards, args=(shard,)) for shard in range(shards.num_shards)]
        coordinator.join_unless(watching(values, bar.look))
    by_number = {at: leaves for shard in coordinator.fetch(values) for at, leaves in shard}
    if not by_number:
        raise BatchError("cannot predict: the data holds no batch.")
    of_model.move_on(len(by_number), held_out=True)
    bar.end()
    outputs = zip(*(by_number[at] for at in sorted(by_number)), strict=True)
    return of_model.nested([np.concatenate(parts) for parts in outputs])


class Predicted(OnServers):
    """A model's forward pass, exported for the workers of a strategy, and its variables there.

    They are those that :class:`~.serving.Served` trains. The batches hold the inputs alone.
    """

    def __init__(self, subject: Subject, alike: bool) -> None:
        strategy, model, batches = subject.strategy, subject.model, subject.batches
        self._tree: Any = None  # how outputs are nested, known once the model is traced
        with building():
            if not _compat.is_built(model):
                _compat.build_forward(model, batches[0][0])
        variables = KerasVariables.of(model)
        lookups = KerasLookups(model, variables, subject.tables.embeddings)
        exported = export_step(
            self._program(model, variables),
            batches,
            lookups=lookups,
            any_rows=not alike,
            predicts=True,
            platforms=strategy.worker_platforms,
            layout=layout_on_workers(strategy, model, variables, lookups),
        )
        super().__init__(strategy, model, variables, lookups, exported, counts=False)

    def step(self) -> TrainStep:
        """What workers compute with; a new one each time, for the values may be others."""
        return TrainStep(uuid.uuid4().hex, self.exported, self.specs, self.seeds())

    def nested(self, leaves: list[np.ndarray]) -> Any:
        """The outputs, nested as the model returns them."""
        return jax.tree.unflatten(self._tree, leaves)

    def _program(self, model: keras.Model, v: KerasVariables) -> Program:
        """The model as a program without a loss, which returns its outputs beside 0."""
        compute = keras_program(model, v).predict
        assert compute is not None

        def forward(params: Any, state: Any, inputs: Any, training: bool) -> tuple[Any, Any]:
            del training
            return compute(params, state, (inputs,))

        def loss(params: Any, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
            del training
            inputs = batch.arrays if isinstance(batch, Padded) else batch
            outputs, state = compute(params, whole.state, inputs)
            self._tree = jax.tree.structure(outputs)
            return 0.0, Aux(0.0, outputs, state, {})

        return Program(
            name=model.name,
            params=tuple(v.infos[id(variable)] for variable in v.params.values()),
            state=tuple(v.infos[id(variable)] for variable in v.state.values()),
            slots=(),
            metrics=(),
            initial=_nothing,
            forward=forward,
            loss=loss,
            measure=_nothing,
            update=_nothing,
        )


def _nothing(*_: Any) -> Any:
    raise AssertionError("a prediction neither trains nor measures")
