"""A model with tables, evaluated beside its training: rows come out of a checkpoint's files.

The step is the one that workers measure with. It needs no servers: what it asks of them is read
from the model and, row by row, from the saved tables, which may be larger than this memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ...errors import CheckpointError
from ...frontends.keras.program import KerasVariables, keras_program
from ...program import Logs
from ..server.drawing import Draw, rows_by_key
from ..shared.placing import VariableSpec
from ..worker.context import Context
from .compiled import Compiled
from .embeddings import Embedding, KerasLookups
from .export import export_step
from .feed import Feed
from .metrics import base_of, logs_of
from .specs import Specs
from .table_files import TablesOnDisk
from .validation import elements_of
from .worker_step import Engine, TrainStep


class Beside:
    """Evaluates a built model on one feed, again and again."""

    def __init__(self, model: keras.Model, variables: KerasVariables, feed: Feed) -> None:
        self._model, self._variables, self._feed = model, variables, feed
        self._layers = KerasLookups(model, variables, None).served
        self._exported = export_step(
            keras_program(model, variables),
            feed.examples,
            lookups=KerasLookups(model, variables, None),
            base=base_of(model, variables),
            any_rows=not feed.alike,
        )
        self._compiled = Compiled(self._exported)

    @property
    def tables(self) -> list[str]:
        """The tables that are not in the model."""
        return list(self._layers)

    def evaluate(self, directory: Path | None, steps: int | None) -> Logs:
        """The metrics of the model's values, with tables from this directory.

        Raises :class:`~meshwright.CheckpointError` where the tables are not there.
        """
        if directory is None:
            raise CheckpointError(
                f"the checkpoint was saved without tables, and model {self._model.name!r} has "
                f"{', '.join(self.tables)}. Train it with strategy.fit(checkpoint=)."
            )
        parts, v = self._exported.parts, self._variables
        values = {path: np.asarray(v.params[path].value) for path in parts.params}
        values |= {path: np.asarray(v.state[path].value) for path in (*parts.moving, *parts.frozen)}
        specs = Specs(
            _specs(parts.params, values),
            _specs(parts.moving, values),
            _specs(parts.frozen, values),
            {t.name: VariableSpec(t.name, (t.rows or 0, t.dim), t.dtype, ()) for t in parts.tables},
        )
        seeds = {path: np.asarray(v.state[path].value) for path in parts.seeds}
        step = TrainStep(uuid.uuid4().hex, self._exported, specs, seeds)
        context: Any = Context(_Saved(values, TablesOnDisk(directory), self._layers))  # type: ignore[arg-type]
        engine = Engine(step, 0, self._compiled)
        counts: Any = np.zeros([])
        for batch in elements_of(self._feed.made(), 0, 1, steps):
            counts = counts + engine.measure(context, batch, 0)
        return logs_of(self._model, v, parts, np.atleast_1d(counts))


class _Saved:
    """What a step asks of servers, answered from saved values."""

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        tables: TablesOnDisk,
        layers: Mapping[str, Embedding],
    ) -> None:
        self._values, self._tables, self._layers = values, tables, layers

    def read(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]:
        return [self._values[spec.name] for spec in specs]

    def lookup(self, spec: VariableSpec, ids: np.ndarray, *, make: bool) -> np.ndarray:
        del make  # nothing is
        rows, known = self._tables.lookup(spec.name, ids)
        if not known.all():
            rows[~known] = _first_rows(self._layers[spec.name], ids[~known])
        return rows


def _first_rows(layer: Embedding, keys: np.ndarray) -> np.ndarray:
    """What servers would begin the rows of these keys with."""
    draw = Draw.of({"kind": layer.initializer}, (1, layer.dim))
    return rows_by_key(draw, layer.seed, keys, (layer.dim,), np.dtype("float32"))


def _specs(paths: Sequence[str], values: Mapping[str, np.ndarray]) -> dict[str, VariableSpec]:
    return {
        path: VariableSpec(path, values[path].shape, str(values[path].dtype), ()) for path in paths
    }
