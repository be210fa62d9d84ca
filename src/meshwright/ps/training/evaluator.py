"""The side-car evaluator: a process beside the training that follows its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

from ... import _compat
from ...checkpoint import CheckpointInfo
from ...checkpoint.record import newest
from ...errors import CheckpointError, UnreachableError
from ...frontends.keras.options import check_compiled
from ...frontends.keras.program import KerasVariables
from ...program import Logs
from ...run.logs import on_host
from ...run.options import Data
from ...warn import warn
from .beside import Beside
from .data import InputContext, first_element
from .embeddings import Embedding, building
from .feed import Feed, feed_of
from .restoring import restore_weights
from .saving import tables_of
from .worker_step import as_batch

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
    ``fit(checkpoint=)`` writes to. ``data`` is ``(x, y)``, or a function that makes a dataset of
    batches. It ends with the checkpoint that ends the training, or after ``max_evaluations``. The
    name and the way are TensorFlow's. ``on_evaluation`` is called with every :class:`Evaluation`.

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
        self._beside: Beside | None = None  # of a model whose tables are not in it

    def start(self) -> list[Evaluation]:
        """Follow the checkpoints until the training has ended; what each of them reached."""
        done: list[Evaluation] = []
        after = -1
        while not _is_over(done, self._max):
            info = self._next(after)
            after = info.step
            try:
                found = self.evaluate(info)
            except (CheckpointError, OSError):
                if info.directory.exists():
                    raise
                warn(
                    f"checkpoint {info.directory} was removed while it was evaluated, so it is "
                    "skipped. Let the training keep more of them: fit(keep=)."
                )
                continue
            done.append(found)
            if self._on_evaluation is not None:
                self._on_evaluation(found)
        return done

    def evaluate(self, info: CheckpointInfo) -> Evaluation:
        """Evaluate one checkpoint."""
        restore_weights(info, self.model, self._built())
        return Evaluation(info.step, self._logs(info), bool(info.notes.get("ended")))

    def _logs(self, info: CheckpointInfo) -> Logs:
        if self._beside is not None:
            return self._beside.evaluate(tables_of(info), self._steps)
        x, y, weights = self._arrays()
        size = self._batch_size if y is not None else None
        measure: Any = self.model.evaluate
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
                import jax

                batch = jax.tree.map(lambda array: array[: self._batch_size], parts)
            with building():
                _compat.build_for(self.model, batch)
            self._variables = KerasVariables.of(self.model)
            if any(isinstance(layer, Embedding) for layer in _compat.layers_inside(self.model)):
                self._beside = Beside(self.model, self._variables, self._feed())
        return self._variables

    def _feed(self) -> Feed:
        x, y, weights = (self._data, None, None) if callable(self._data) else self._arrays()
        size = None if y is None else self._batch_size
        return feed_of(Data(x, y, weights, size, self._steps))

    def _arrays(self) -> tuple[Any, Any, Any]:
        if callable(self._data):
            return self._data(InputContext()), None, None
        return keras.utils.unpack_x_y_sample_weight(self._data)


def _is_over(done: list[Evaluation], most: int | None) -> bool:
    """Whether the training has ended, or enough was evaluated.

    >>> _is_over([Evaluation(1, {})], 2), _is_over([Evaluation(1, {}, ended=True)], None)
    (False, True)
    """
    return bool(done) and (done[-1].ended or (most is not None and len(done) >= most))
