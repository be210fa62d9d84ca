"""The side-car evaluator: a process beside the training that follows its checkpoints."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from ... import _compat
from ...checkpoint import CheckpointInfo
from ...checkpoint.record import newest
from ...errors import CheckpointError, UnreachableError
from ...frontends.keras.options import check_compiled
from ...frontends.keras.program import KerasVariables, keras_program
from ...program import Logs
from ...run.logs import on_host
from ...run.options import Data
from ...warn import warn
from ..shared.placing import VariableSpec
from ..worker.context import Context
from .compiled import Compiled
from .data import InputContext, first_element
from .embeddings import Embedding, KerasLookups, building
from .export import export_step
from .feed import Feed, feed_of
from .metrics import base_of, logs_of
from .restoring import restore_weights
from .saving import tables_of
from .shards import elements_of
from .table_files import SavedRows
from .worker_step import Engine, Specs, TrainStep, as_batch

_WARN_AFTER_S = 60.0


@dataclass(frozen=True)
class Evaluation:
    """What one checkpoint reached: ``step`` is its number of trained batches."""

    step: int
    logs: Logs = field(hash=False)
    ended: bool = False  # the training has ended with this checkpoint


class SidecarEvaluator:
    """Evaluates the newest checkpoint of a directory, again and again, and skips older ones.

    Run it in the task ``evaluator`` of a cluster, or in any process that sees the directory that
    ``fit(checkpoint=)`` writes to. ``data`` is ``(x, y)``, a list of batches, or a function that
    makes a dataset of batches. It ends with the checkpoint that ends the training, or after
    ``max_evaluations``. The name and the way are TensorFlow's. ``on_evaluation`` is called with
    every :class:`Evaluation`.

    Raises :class:`~meshwright.UnreachableError` where nothing new appears for ``timeout_s``.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        checkpoint_dir: str | Path,
        *,
        steps: int | None = None,
        batch_size: int = 32,
        max_evaluations: int | None = None,
        poll_s: float = 1.0,
        timeout_s: float | None = None,
        on_evaluation: Callable[[Evaluation], None] | None = None,
    ) -> None:
        check_compiled(model)
        self.model, self.directory = model, Path(checkpoint_dir)
        self._data, self._steps, self._batch_size = data, steps, batch_size
        self._max, self._poll_s, self._timeout_s = max_evaluations, poll_s, timeout_s
        self._on_evaluation = on_evaluation
        self._variables: KerasVariables | None = None
        self._with_tables: TableEvaluator | None = None  # of a model whose tables are not in it

    def start(self) -> list[Evaluation]:
        """Follow the checkpoints until the training has ended; what each of them reached."""
        evaluations: list[Evaluation] = []
        after = -1
        while not _is_over(evaluations, self._max):
            info = self._next(after)
            after = info.step
            try:
                evaluation = self.evaluate(info)
            except (CheckpointError, OSError):
                if info.directory.exists():
                    raise
                warn(
                    f"checkpoint {info.directory} was removed while it was evaluated, so it is "
                    "skipped. Let the training keep more of them: fit(keep=)."
                )
                continue
            evaluations.append(evaluation)
            if self._on_evaluation is not None:
                self._on_evaluation(evaluation)
        return evaluations

    def evaluate(self, info: CheckpointInfo) -> Evaluation:
        """Evaluate one checkpoint."""
        restore_weights(info, self.model, self._built())
        return Evaluation(info.step, self._logs(info), bool(info.notes.get("ended")))

    def _logs(self, info: CheckpointInfo) -> Logs:
        if self._with_tables is not None:
            return self._with_tables.evaluate(tables_of(info), self._steps)
        x, y, weights = self._arrays()
        size = self._batch_size if y is not None else None
        if size is None and not isinstance(x, keras.utils.PyDataset):
            x = (as_batch(element) for element in x)  # of other iterables, Keras knows generators
        measure: Any = self.model.evaluate
        with warnings.catch_warnings():  # it warns where a generator ends
            warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
            logs = measure(
                x, y, sample_weight=weights, batch_size=size, steps=self._steps, verbose=0,
                return_dict=True,
            )  # fmt: skip
        return on_host(logs)

    def _next(self, after: int) -> CheckpointInfo:
        """The newest checkpoint, once there is one after this step."""
        begun_s, warned = time.monotonic(), False
        while True:
            info = newest(self.directory)
            if info is not None and info.step > after:
                return info
            waited_s = time.monotonic() - begun_s
            if self._timeout_s is not None and waited_s >= self._timeout_s:
                raise UnreachableError(
                    f"no checkpoint after step {max(after, 0)} in {self.directory} for "
                    f"{waited_s:.0f} s. Check that the training runs, and that its checkpoint= is "
                    "this directory."
                )
            if waited_s >= _WARN_AFTER_S and not warned:
                warned = True
                warn(f"no new checkpoint in {self.directory} for {waited_s:.0f} s.")
            time.sleep(self._poll_s)

    def _built(self) -> KerasVariables:
        if self._variables is None:
            x, y, weights = self._arrays()
            if y is None:
                batch = as_batch(first_element(x))
            else:
                parts = (x, y) if weights is None else (x, y, weights)

                batch = jax.tree.map(lambda array: array[: self._batch_size], parts)
            with building():
                _compat.build_for(self.model, batch)
            self._variables = KerasVariables.of(self.model)
            if any(isinstance(layer, Embedding) for layer in _compat.layers_inside(self.model)):
                self._with_tables = TableEvaluator(self.model, self._variables, self._feed())
        return self._variables

    def _feed(self) -> Feed:
        x, y, weights = (self._data, None, None) if callable(self._data) else self._arrays()
        size = None if y is None else self._batch_size
        return feed_of(Data(x, y, weights, size, self._steps))

    def _arrays(self) -> tuple[Any, Any, Any]:
        if callable(self._data):
            return self._data(InputContext()), None, None
        if _is_list_of_batches(self._data):
            return self._data, None, None
        return keras.utils.unpack_x_y_sample_weight(self._data)


def _is_list_of_batches(data: Any) -> bool:
    """Whether it is a list of batches; a list of arrays is ``[x, y]``, as for Keras.

    >>> _is_list_of_batches([(1, 2), (3, 4)]), _is_list_of_batches([np.ones(2), np.ones(2)])
    (True, False)
    """
    return isinstance(data, list) and not (data and hasattr(data[0], "shape"))


def _is_over(evaluations: list[Evaluation], most: int | None) -> bool:
    """Whether the training has ended, or enough was evaluated.

    >>> _is_over([Evaluation(1, {})], 2), _is_over([Evaluation(1, {}, ended=True)], None)
    (False, True)
    """
    return bool(evaluations) and (
        evaluations[-1].ended or (most is not None and len(evaluations) >= most)
    )


class TableEvaluator:
    """Evaluates a built model with tables on one feed; rows come out of a checkpoint's files.

    The step is the one that workers measure with. What it asks of servers is read from the model
    and, row by row, from the saved tables, which may be larger than this memory.
    """

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
        context: Any = Context(_Saved(values, SavedRows(directory, self._layers)))  # type: ignore[arg-type]
        engine = Engine(step, 0, self._compiled)
        counts: Any = np.zeros([])
        for number, batch in enumerate(elements_of(self._feed.maker(), 0, 1, steps)):
            counts = counts + engine.measure(context, batch, 0, engine.seeds_at(seeds, number))
        return logs_of(self._model, v, parts, np.atleast_1d(counts))


class _Saved:
    """What a step asks of servers, answered from saved values."""

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        tables: SavedRows,
    ) -> None:
        self._values, self._tables = values, tables

    def read(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]:
        return [self._values[spec.name] for spec in specs]

    def lookup(self, spec: VariableSpec, ids: np.ndarray, *, make: bool) -> np.ndarray:
        del make  # nothing is
        return self._tables.lookup(spec.name, ids)


def _specs(paths: Sequence[str], values: Mapping[str, np.ndarray]) -> dict[str, VariableSpec]:
    return {
        path: VariableSpec(path, values[path].shape, str(values[path].dtype), ()) for path in paths
    }
