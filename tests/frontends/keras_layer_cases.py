"""Every layer of Keras with weights, in configurations that have each weight."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.frontends.keras import layers

U = mw.UNSHARDED


class Case(NamedTuple):
    """A layer in one configuration: its arguments, and those of its ``build``."""

    layer: str
    arguments: dict[str, Any]
    shapes: tuple[Any, ...]


def case(layer: str, /, *shapes: Any, **arguments: Any) -> Case:
    return Case(layer, arguments, shapes)


ROWS, STEPS = (None, 4), (None, 5, 4)
CONVOLUTION = {"filters": 2, "kernel_size": 2}
LINE, IMAGE, VOLUME = (None, 6, 4), (None, 6, 6, 4), (None, 6, 6, 6, 4)


ZEROS: Any = {"kernel_initializer": "zeros"}  # random initialisers take seconds to compile
ZEROS_RNN: Any = {**ZEROS, "recurrent_initializer": "zeros"}
CELLS = [keras.layers.GRUCell(2, **ZEROS_RNN), keras.layers.LSTMCell(3, **ZEROS_RNN)]


def affine(params: Any, inputs: Any) -> Any:
    return inputs @ params["kernel"] + params["shift"]["bias"]


AFFINE = {"kernel": np.ones((4, 2), "float32"), "shift": {"bias": np.ones((2,), "float32")}}

# Every layer of Keras with weights, in configurations that together have each weight it can have.
CASES = [
    case("Dense", ROWS, units=2),
    case("Dense", ROWS, units=2, use_bias=False),
    case("Dense", ROWS, units=2, lora_rank=1),
    case("Dense", ROWS, units=2, dtype="int8_from_float32"),
    case("EinsumDense", STEPS, equation="abc,cd->abd", output_shape=(None, 2), bias_axes="d"),
    case("EinsumDense", STEPS, equation="abc,cd->abd", output_shape=(None, 2), lora_rank=1),
    case("Embedding", ROWS, input_dim=6, output_dim=2),
    case("Embedding", ROWS, input_dim=6, output_dim=2, lora_rank=1),
    case("ReversibleEmbedding", ROWS, input_dim=6, output_dim=2, tie_weights=False),
    case("ReversibleEmbedding", ROWS, input_dim=6, output_dim=2, lora_rank=1),
    case("Conv1D", LINE, **CONVOLUTION),
    case("Conv1D", LINE, **CONVOLUTION, lora_rank=1),
    case("Conv2D", IMAGE, **CONVOLUTION),
    case("Conv2D", IMAGE, **CONVOLUTION, lora_rank=1),
    case("Conv3D", VOLUME, **CONVOLUTION),
    case("Conv3D", VOLUME, **CONVOLUTION, lora_rank=1),
    case("Conv1DTranspose", LINE, **CONVOLUTION),
    case("Conv2DTranspose", IMAGE, **CONVOLUTION),
    case("Conv3DTranspose", VOLUME, **CONVOLUTION),
    case("DepthwiseConv1D", LINE, kernel_size=2),
    case("DepthwiseConv2D", IMAGE, kernel_size=2),
    case("SeparableConv1D", LINE, **CONVOLUTION),
    case("SeparableConv2D", IMAGE, **CONVOLUTION),
    case("SimpleRNN", STEPS, units=2),
    case("GRU", STEPS, units=2),
    case("LSTM", STEPS, units=2),
    case("SimpleRNNCell", ROWS, units=2),
    case("GRUCell", ROWS, units=2),
    case("LSTMCell", ROWS, units=2),
    case("ConvLSTM1D", (None, 3, 6, 4), **CONVOLUTION),
    case("ConvLSTM2D", (None, 3, 6, 6, 4), **CONVOLUTION),
    case("ConvLSTM3D", (None, 3, 6, 6, 6, 4), **CONVOLUTION),
    case("BatchNormalization", ROWS),
    case("BatchNormalization", ROWS, renorm=True),
    case("LayerNormalization", ROWS),
    case("GroupNormalization", ROWS, groups=2),
    case("RMSNormalization", ROWS),
    case("PReLU", STEPS),
    case("Attention", [STEPS, STEPS], use_scale=True, score_mode="concat"),
    case("AdditiveAttention", [STEPS, STEPS]),
    case("MultiHeadAttention", STEPS, STEPS, num_heads=2, key_dim=3, use_gate=True),
    case(
        "GroupQueryAttention",
        *(STEPS, STEPS),
        **{"head_dim": 3, "num_query_heads": 4, "num_key_value_heads": 2, "use_gate": True},
    ),
    case("Normalization", ROWS),
    case("STFTSpectrogram", (None, 32, 1), frame_length=8, frame_step=4, fft_length=8),
    case("Wrapper", ROWS, layer=keras.layers.Dense(2, **ZEROS)),
    case("Bidirectional", STEPS, layer=keras.layers.LSTM(2, **ZEROS_RNN)),
    case("TimeDistributed", STEPS, layer=keras.layers.Dense(2, **ZEROS)),
    case(
        "TimeDistributed",
        STEPS,
        layer=keras.Sequential(
            [
                keras.layers.Dense(3, name="inner", **ZEROS),
                keras.layers.Dense(2, name="outer", **ZEROS),
            ]
        ),
    ),
    case("SpectralNormalization", ROWS, layer=keras.layers.Dense(2, **ZEROS)),
    case("RNN", STEPS, cell=keras.layers.LSTMCell(2, **ZEROS_RNN)),
    case("RNN", STEPS, cell=keras.layers.StackedRNNCells(CELLS)),
    case("StackedRNNCells", ROWS, cells=CELLS),
    case("JaxLayer", ROWS, call_fn=affine, params=AFFINE),
]
# Not ours to lay out: variables of TensorFlow and Torch, which no JAX program sees.
FOREIGN = {
    *("IntegerLookup", "StringLookup", "TextVectorization"),
    *("TFSMLayer", "TorchModuleWrapper"),
}

WRITABLE = [one for one in CASES if one.layer != "JaxLayer"]  # Keras cannot write its functions


def over(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.layer for case in cases])


def fresh(value: Any) -> Any:
    """The same with layers of its own, since a layer is built once."""
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items()}
    if isinstance(value, list):
        return [fresh(item) for item in value]
    return value.from_config(value.get_config()) if isinstance(value, keras.Layer) else value


def built(case: Case, module: Any = layers, **layouts: Any) -> Any:
    cls = getattr(module, case.layer)
    named = inspect.signature(cls.__init__).parameters
    zeros = {p: "zeros" for p in named if p.endswith("_initializer")}
    layer = cls(**fresh(case.arguments), **zeros, **layouts)
    layer.build(*case.shapes)
    return layer


def some_layout(weight: Any) -> list[str]:
    return ["model", U, U, U, U][: len(weight.shape)]


def asked(layer: Any) -> dict[str, str]:
    """``name -> layout`` for all weights of a layer that some layout was asked for."""
    weights = layers.weights_by_name(layer)
    return {n: str(layers.weight_layout(w)) for n, w in weights.items() if layers.weight_layout(w)}


def layer_classes() -> dict[str, type[keras.Layer]]:
    results = {n: getattr(keras.layers, n) for n in dir(keras.layers)}
    return {n: c for n, c in results.items() if inspect.isclass(c) and issubclass(c, keras.Layer)}
