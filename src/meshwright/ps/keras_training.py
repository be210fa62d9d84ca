"""What Keras' own methods of a model are on parameter servers: ``fit``, ``evaluate``, ``predict``.

Keras is imported when one of them is called: workers and servers load this room without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import InputOptions, Tables

if TYPE_CHECKING:
    from ..run.saver import Resume, SaveEvery
    from ..step.local import Local
    from .training.compression import Compression

_INPUT_OPTIONS, _TABLES = InputOptions(), Tables()


class KerasTraining:
    """The part of :class:`~meshwright.ParameterServer` that takes compiled Keras models."""

    def fit(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        checkpoint: str | Path | None = None,
        save_every: SaveEvery = None,
        keep: int | None = 3,
        resume: Resume = "auto",
        input_options: InputOptions = _INPUT_OPTIONS,
        tables: Tables = _TABLES,
        local: Local | None = None,
        compression: str | Compression | None = None,
    ) -> Any:
        """Train a compiled Keras model, as it is, on the workers and servers; returns its History.

        ``x`` is a function that makes a dataset of batches on every worker (it is given an
        :class:`~meshwright.ps.InputContext`), a dataset that can be sent to them, or arrays with
        ``y``, ``batch_size``, ``sample_weight`` and ``shuffle``. ``steps_per_epoch`` are the steps
        of all workers together; it must be given for datasets that do not know their length.
        ``validation_data`` is given like ``x``, or as ``(x, y)``; every element is counted once,
        also when workers die. The other arguments up to ``validation_freq`` are those of
        ``keras.Model.fit``.

        ``checkpoint`` is a directory that is written to after each epoch, or after ``save_every``
        steps, and that the run goes on from (``resume``); it keeps the newest ``keep`` checkpoints.
        ``input_options`` says how batches are dealt to workers, ``tables`` which Embedding layers
        travel by rows, and what trains them. ``local`` is :class:`~meshwright.LocalSGD` or
        :class:`~meshwright.DiLoCo`, ``compression`` how gradients are made smaller on their way:
        ``"float16"``, ``"bfloat16"``, ``Half(...)`` or ``TopK(...)`` of :mod:`meshwright.ps`.

        Raises :class:`~meshwright.ModelError` for a model, an optimizer, an argument or a callback
        that cannot be used so, and :class:`~meshwright.DataError` where the data ends too soon.
        """
        from ..run.options import Data, Schedule, Validation
        from ..run.saver import Saver
        from .training.fitting import fit

        return fit(
            self,
            model,
            Data(x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight),
            Validation(
                validation_data,
                validation_split,
                validation_batch_size,
                validation_steps,
                validation_freq,
            ),
            Schedule(epochs, initial_epoch, callbacks, verbose),
            lambda: Saver.of(checkpoint, save_every, keep, resume, repr(self)),
            input_options=input_options,
            tables=tables,
            local=local,
            compression=compression,
        )

    def evaluate(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        tables: Tables = _TABLES,
    ) -> Any:
        """Loss and metrics over all batches, each counted once; the workers measure.

        Data is given as to :meth:`fit`. Returns what ``keras.Model.evaluate`` does: a number, a
        list in the order of ``model.metrics_names``, or with ``return_dict`` a dict. The bar of
        ``verbose`` counts shards of the data. ``callbacks`` are not supported. Raises
        :class:`~meshwright.DataError` where the data holds no batch, and
        :class:`~meshwright.ModelError` for an argument that cannot be used.
        """
        from .. import _compat
        from ..run.options import Data
        from .training.callbacks import refuse_callbacks
        from .training.fitting import evaluate

        refuse_callbacks("evaluate", callbacks)
        logs = evaluate(self, model, Data(x, y, sample_weight, batch_size, steps), verbose, tables)
        return logs if return_dict else _compat.in_metric_order(model, logs)

    def predict(
        self,
        model: Any,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        *,
        tables: Tables = _TABLES,
    ) -> Any:
        """What a model returns for all inputs, in their order, as NumPy arrays.

        The workers compute. ``x`` is given as to :meth:`fit`; of the batches of a dataset only the
        inputs are taken. The model need not be compiled. The bar of ``verbose`` counts shards of
        the data. ``callbacks`` are not supported. Raises :class:`~meshwright.BatchError` where the
        data holds no batch, and :class:`~meshwright.ModelError` for an argument that cannot be
        used.
        """
        from ..run.options import Data
        from .training.callbacks import refuse_callbacks
        from .training.predicting import predict

        refuse_callbacks("predict", callbacks)
        return predict(self, model, Data(x, batch_size=batch_size, steps=steps), verbose, tables)

    def export(self, model: Any) -> Any:
        """A plain Keras model of it: see :func:`meshwright.ps.training.plain_model`."""
        from .training import plain_model

        return plain_model(self, model)
