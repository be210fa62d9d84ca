"""Whether a batch of a Keras model may be padded, and its loss on the rows that count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import keras

from ... import _compat
from ...jaxprs.rows import RowsMixError, row_dims
from ...step.batches import device_dtype
from ...step.padding import Padded

Kind = Literal["train", "test", "predict"]


class RowWise:
    """Answers whether rows of a batch leave each other alone, in training or elsewhere.

    Nothing is guessed from names: the model is traced for both numbers of rows, see
    :mod:`meshwright.jaxprs.rows`; in training its derivatives too. Answers are kept.
    """

    def __init__(self, model: keras.Model, variables: Any) -> None:
        self._model = model
        self._variables = variables
        self._answers: dict[Any, str | None] = {}

    def why_not(self, kind: Kind, batch: Any, rows: int, padded: int) -> str | None:
        """Why a batch of ``rows`` rows must not be padded; ``None`` if it may be.

        ``batch`` holds host arrays and is looked at for their shapes.
        """
        if kind != "predict":  # the rest is not padded
            batch, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        leaves, tree = jax.tree.flatten(batch)
        tails = tuple((value.shape[1:], str(device_dtype(value))) for value in leaves)
        key = (kind, tree, tails, rows, padded)
        if key not in self._answers:
            self._answers[key] = self._own_part(kind) or self._trace(kind, batch, rows, padded)
        return self._answers[key]

    def _own_part(self, kind: Kind) -> str | None:
        model = self._model
        if model.compiled and model.run_eagerly:
            return "run_eagerly=True"
        own = {"train": ["train_step"], "test": ["test_step"], "predict": []}[kind]
        if kind != "predict":
            own += ["compute_loss_and_updates", "_update_metrics_variables"]
        return next((f"its own {m}" for m in own if _compat.has_own(model, m)), None)

    def _trace(self, kind: Kind, part: Any, rows: int, padded: int) -> str | None:
        function = {"train": self._training, "test": self._testing, "predict": self._predicting}
        abstract = jax.tree.map(_abstract, self._values())
        likes = [jax.tree.map(lambda v, n=n: _abstract(v, n), part) for n in (rows, padded)]
        trace = jax.make_jaxpr(function[kind], return_shape=True)
        with _nowhere():
            (small, shapes), (large, _) = [trace(*abstract, like) for like in likes]
        try:
            return _mixed(row_dims(small, large), shapes, rows)
        except RowsMixError as mixed:
            return str(mixed)

    def _values(self) -> tuple[list[Any], list[Any]]:
        v = self._variables
        return (
            [_compat.raw_value(variable) for variable in v.params.values()],
            [_compat.raw_value(variable) for variable in v.state.values()],
        )

    # What is traced: (what each row has, what all of them share)

    def _predicting(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, _ = self._model.predict_step((params, state), batch)
        return outputs, ()

    def _testing(self, params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        return self._forward(params, state, x, False)

    def _training(self, params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        """The forward pass and its derivative by the parameters: custom rules are followed too."""

        def differentiable(params: Any) -> tuple[Any, Any]:
            results = self._forward(params, state, x, True)
            floats = [v if _is_float(v) else () for part in results for v in jax.tree.leaves(part)]
            return floats, results

        ones = jax.tree.map(jnp.ones_like, params)
        values, tangents, results = jax.jvp(differentiable, (params,), (ones,), has_aux=True)
        count = len(jax.tree.leaves(results[0]))
        per_row = [results[0], values[:count], tangents[:count]]
        return per_row, [results[1], values[count:], tangents[count:]]

    def _forward(self, params: Any, state: Any, x: Any, training: bool) -> tuple[Any, Any]:
        options = {"training": training} if _compat.takes_training(self._model) else {}
        called: Any = self._model.stateless_call(params, state, x, return_losses=True, **options)
        outputs, state, losses = called
        masks = [mask for mask in _compat.masks_of(outputs) if mask is not None]
        return (outputs, masks), (state, losses)


def loss_on_true_rows(model: keras.Model, batch: Padded) -> Callable[..., Any]:
    """``model.compute_loss_and_updates`` with all but the forward pass on the rows that count."""

    def compute(
        trained: Any,
        others: Any,
        metrics: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        training: bool,
        optimizer_variables: Any,
    ) -> Any:
        options = {"training": training} if _compat.takes_training(model) else {}
        called: Any = model.stateless_call(trained, others, x, return_losses=True, **options)
        outputs, others, losses = called
        masks = [mask if mask is None else batch.true(mask) for mask in _compat.masks_of(outputs)]
        outputs = batch.true(outputs)
        _compat.set_masks(outputs, masks)
        return _compat.loss_of_outputs(
            model,
            (trained, others, metrics, optimizer_variables),
            (batch.true(x), y, sample_weight),
            outputs,
            losses,
            training,
        )

    return compute


def _mixed(dims: list[Any], shapes: Any, rows: int) -> str | None:
    """Why these outputs are not, row by row, those of the first rows."""
    per_row, shared = (jax.tree.leaves(part) for part in shapes)
    if not all(value.shape[:1] == (rows,) for value in per_row):
        return "an output whose first dim is not that of the rows"
    if dims != [0] * len(per_row) + [None] * len(shared):
        return "a state or a loss with an entry per row"
    return None


@contextlib.contextmanager
def _nowhere() -> Iterator[None]:
    """Traced as on one device: how arrays lie says nothing of how rows meet."""
    strategy = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(strategy)


def _abstract(value: Any, rows: int | None = None) -> jax.ShapeDtypeStruct:
    shape = value.shape if rows is None else (rows, *value.shape[1:])
    return jax.ShapeDtypeStruct(shape, device_dtype(value))


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)
