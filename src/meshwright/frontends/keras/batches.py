"""Batches of a Keras model: which array is which, and what Keras' own loops can say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras

from ...data import Putter
from ...errors import BatchError, LayoutError
from ...layouts.layout import Layout
from ...layouts.placement import Placement
from ...program import Batch, Label, named_leaves
from ...step.batches import device_dtype


def putter(
    placement: Placement,
    model: keras.Model | None = None,
    copy: bool = True,
) -> Putter:
    """Lays out batches ``(x, y, sample_weight)`` of a model, whose inputs may have names."""
    return Putter(placement, labeller_of(model), copy)


def labeller_of(model: keras.Model | None) -> Callable[[Batch], list[Label]]:
    """Labels the arrays of batches of a model, whose inputs and outputs may have names."""
    return labeller(_input_names(model), _output_names(model))


def labeller(
    inputs: tuple[str, ...], outputs: tuple[str, ...] = ()
) -> Callable[[Batch], list[Label]]:
    """Labels the arrays of ``(x, y, sample_weight)``; those without a key have these names."""

    def label(batch: Batch) -> list[Label]:
        if isinstance(batch, tuple) and not batch:
            raise BatchError("the batch is empty: expected (x, y) or (x, y, sample_weight).")
        x, *others = batch if isinstance(batch, tuple) else (batch,)
        labels = [Label("input", name, i) for i, name in enumerate(_names(x, inputs))]
        for part in others:
            labels += [Label("target", name, i) for i, name in enumerate(_names(part, outputs))]
        return labels

    return label


def _names(part: Any, names: tuple[str, ...]) -> list[str | None]:
    """The key of each array of a part of a batch, or else its known name."""
    keys = [key for key, _ in named_leaves(part)]
    if len(keys) != len(names):
        return keys
    return [key or name for key, name in zip(keys, names, strict=True)]


def abstract(batch: Batch, without: int = 0) -> Batch:
    """Shapes and dtypes of a batch as it is on devices, without the first ``without`` dims."""

    def one(value: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape[without:], device_dtype(value))

    return jax.tree.map(one, batch)


def by_shape(placement: Placement, dims: tuple[int, ...]) -> Layout:
    """The layout of a batch of which only the dims are known; whole where it does not divide."""
    try:
        return placement.input_layout(None, 0, dims)
    except BatchError:
        return Layout.replicated(placement.mesh, len(dims))


def refuse_named_inputs(placement: Placement) -> None:
    """Keras' own loops know a batch by its shape only, not which input it is."""
    if placement.inputs or placement.targets:
        raise LayoutError(
            "this strategy lays inputs or targets out one by one (inputs=, targets=), and Keras' "
            "own fit, evaluate, predict and train_on_batch cannot say which input is which. Use "
            "strategy.fit(model, ...), strategy.evaluate and strategy.predict, or, one batch at a "
            "time, strategy.train_step(model)."
        )


def _input_names(model: keras.Model | None) -> tuple[str, ...]:
    """Names of the inputs of a Functional or Sequential model, in order; else none."""
    inputs = getattr(model, "inputs", None) if model is not None else None
    return tuple(tensor.name for tensor in jax.tree.leaves(inputs)) if inputs else ()


def _output_names(model: keras.Model | None) -> tuple[str, ...]:
    """Names of the outputs of a Functional or Sequential model, in order; else none."""
    return tuple(getattr(model, "output_names", None) or ())
