"""What tests of several rooms share: shapes in place of arrays, small models, a made-up machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from keras import layers

import meshwright as mw
from meshwright.targets.hardware import Hardware, Link

# Round numbers, so that what a step takes can be said in the head.
CPU = Hardware(
    "measured",
    peak_flops_per_s=(("float32", 1e11),),
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=1e10,
    links=(Link("shared", "shared", 1e9, 1e-6),),
)


def shapes(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    """An array that has no values."""
    return jax.ShapeDtypeStruct(dims, dtype)


def laid_out(mesh: mw.Mesh, dims: Any, specs: Any, dtype: Any = jnp.float32) -> Any:
    """An array that has no values, in a layout."""
    return jax.ShapeDtypeStruct(dims, dtype, sharding=mw.Layout(specs, mesh).sharding)


class Batches(keras.utils.PyDataset):
    """Sixteen rows at a time of two arrays, the last batch smaller."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // 16)

    def __getitem__(self, index: int) -> Any:
        rows = slice(16 * index, 16 * index + 16)
        return self.x[rows], self.y[rows]


def two_layers(io: int, hidden: int) -> keras.Model:
    """The example of the paper on Mesh-TensorFlow, without biases: y = relu(x w) v."""
    model = keras.Sequential(
        [
            keras.Input([io]),
            layers.Dense(hidden, activation="relu", use_bias=False, name="w"),
            layers.Dense(io, use_bias=False, name="v"),
        ],
        name="two",
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def looped(layers: int, width: int) -> mw.Program:
    """A program with a loop over layers."""

    def loss(params, x):
        def layer(x, kernel):
            return jnp.tanh(x @ kernel), None

        return jnp.mean(jax.lax.scan(layer, x, params["kernels"])[0] ** 2)

    return mw.jax_program(loss, {"kernels": shapes(layers, width, width)}, optax.sgd(0.1))


def mesh_of(axes: Mapping[str, int]) -> mw.Mesh:
    """A mesh of these axes on the first devices, as many as it takes."""
    return mw.create_mesh(dict(axes), devices=jax.devices()[: math.prod(axes.values())])


def conv(x: Any, kernel: Any) -> Any:
    """A convolution of images whose channels come last."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def wait_for(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """What ``condition`` returns once that is true."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {limit_s} s")
