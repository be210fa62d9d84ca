"""Layers that no compiled step can contain; most of them look values up on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import keras

from ... import _compat
from ...errors import ModelError


def check_traceable(model: keras.Model) -> None:
    """Raise :class:`ModelError` for a model that takes strings, or ids that tables translate.

    Keras computes these layers with TensorFlow, one call at a time. A layer that a model of a class
    of its own holds may belong to its data alone, so only those of a graph count.
    """
    faults = [
        f"layer {layer.name!r} ({type(layer).__name__}) looks values up on the host"
        for layer in _called(model)
        if isinstance(layer, _looking_up())
    ]
    faults += [f"input {name!r} takes strings" for name in _strings(model)]
    if faults:
        raise ModelError(
            f"model {model.name!r} cannot be compiled: {'; '.join(faults)}. Apply such layers to "
            "the data before, and begin the model with the numbers that they make: "
            "keras.Input([1], dtype='int32')."
        )


def check_trainable(model: keras.Model) -> None:
    """Raise :class:`ModelError` for a graph with a ``RandomCrop`` that draws where it cuts.

    It slices by numbers that are drawn in the step, which JAX cannot compile; Keras runs the whole
    model piece by piece for it.
    """
    for layer in _called(model):
        if isinstance(layer, keras.layers.RandomCrop) and _draws(layer):
            raise ModelError(
                f"model {model.name!r} cannot be compiled for training: layer {layer.name!r} "
                "(RandomCrop) cuts at places that are drawn in the step. Apply it to the data "
                "before, or begin the model with a layer of your own that cuts by "
                "jax.lax.dynamic_slice."
            )


def _draws(layer: Any) -> bool:
    """Whether pictures are larger than what is cut out; others are only resized."""
    height, width = layer.input.shape[layer.height_axis], layer.input.shape[layer.width_axis]
    return None in (height, width) or (height > layer.height and width > layer.width)


def _looking_up() -> tuple[type, ...]:
    layers = keras.layers
    return (
        layers.Hashing,
        layers.HashedCrossing,
        layers.IntegerLookup,
        layers.StringLookup,
        layers.TextVectorization,
    )


def _called(model: Any) -> Iterator[Any]:
    """The layers that a model calls for certain: those of its graph and of graphs in it."""
    if not isinstance(model, keras.Sequential) and _compat.input_tensors(model) is None:
        return
    for layer in model.layers:
        yield layer
        if isinstance(layer, keras.Model):
            yield from _called(layer)


def _strings(model: keras.Model) -> list[str]:
    tensors = jax.tree.leaves(_compat.input_tensors(model))
    return [tensor.name for tensor in tensors if getattr(tensor, "dtype", "") == "string"]
