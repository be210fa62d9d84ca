"""Rows that do not divide somewhere inside the net: right gradients all the same.

XLA alone partitions some of these convolutions silently wrongly (relative errors of 1 to 3), so
each case is a trap that only a guard avoids.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from oracle import OneDevice, Tolerance, agree, gradients, made, relative, train

import meshwright as mw

# The mesh splits rows over an axis of 4 or 8; the input divides, and a valid convolution over it
# leaves so many rows.
SIZES = [3, 5, 6, 7, 11, 15]
BATCH = 8
CONVOLUTIONS = {
    "full": lambda name, stride: layers.Conv2D(4, 3, stride, "same", name=name),
    "grouped": lambda name, stride: layers.Conv2D(4, 3, stride, "same", groups=2, name=name),
    "depthwise": lambda name, stride: layers.DepthwiseConv2D(3, stride, "same", name=name),
}


def build(rows: int, inputs: int, names: tuple[str, ...]) -> keras.Model:
    """All kinds of convolutions with both strides beside each other on an odd intermediate."""
    x = keras.Input([inputs, 6, 2], name="image")
    h = layers.Conv2D(4, [inputs - rows + 1, 1], name="cut", activation="tanh")(x)
    ends = []
    for name in names:
        for stride in (1, 2):
            convolved = CONVOLUTIONS[name](f"{name}_{stride}", stride)(h)
            ends.append(layers.Flatten()(keras.ops.tanh(convolved)))
    model = keras.Model(x, layers.Dense(3, name="output")(layers.Concatenate()(ends)))
    model.compile("sgd", "mse")
    return model


def _gradients(strategy: Any, rows: int, inputs: int, names: tuple[str, ...]) -> dict[str, Any]:
    draw = np.random.default_rng(rows)
    x = draw.normal(size=[BATCH, inputs, 6, 2]).astype("float32")
    y = draw.normal(size=[BATCH, 3]).astype("float32")
    model = made(strategy, functools.partial(build, rows, inputs, names))
    return gradients(strategy, model, (x, y))


def _check(mesh: dict[str, int], rows: int, inputs: int) -> None:
    names = tuple(CONVOLUTIONS)
    strategy = mw.Sharded(mw.create_mesh(mesh), inputs=["batch", "rows", None, None])
    actual = _gradients(strategy, rows, inputs, names)
    expected = _gradients(OneDevice(), rows, inputs, names)
    wrong = {
        path: f"{relative(actual[path], gradient):.1e}"
        for path, gradient in expected.items()
        if relative(actual[path], gradient) > 1e-5
    }
    assert not wrong


@pytest.mark.full_for("6", "7")
@pytest.mark.parametrize(
    "rows", [r if r in (7, 6) else pytest.param(r, marks=pytest.mark.full) for r in SIZES]
)
def test_convolutions_over_odd_rows_have_one_devices_gradients(rows: int) -> None:
    _check({"batch": 2, "rows": 4}, rows, 16)


@pytest.mark.full
@pytest.mark.parametrize("rows", [7, 8])
def test_rows_over_eight_that_a_stride_leaves_odd(rows: int) -> None:
    """Eight rows divide over eight devices, the four that a stride of two leaves do not."""
    _check({"batch": 1, "rows": 8}, rows, 16)


@pytest.mark.full
def test_a_deep_net_over_odd_rows_trains_as_on_one_device() -> None:
    """13 x 9 after the first convolution, then 7 x 5, 4 x 3 and 2 x 2, over 2 x 2."""

    def deep() -> keras.Model:
        same = {"padding": "same", "activation": "relu"}
        model = keras.Sequential(
            [
                keras.Input([16, 12, 2]),
                layers.Conv2D(4, 4, name="valid"),
                layers.DepthwiseConv2D(3, strides=2, name="depthwise", **same),
                layers.BatchNormalization(name="norm"),
                layers.SeparableConv2D(8, 3, name="separable", **same),
                layers.MaxPooling2D(2, padding="same"),
                layers.Conv2D(8, 3, strides=2, name="strided", **same),
                layers.Conv2DTranspose(4, 3, strides=2, name="transposed", **same),
                layers.GlobalAveragePooling2D(),
                layers.Dense(4, name="output"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
        return model

    draw = np.random.default_rng(4)
    x, y = draw.normal(size=[48, 16, 12, 2]).astype("float32"), draw.integers(0, 4, 48)
    mesh = mw.create_mesh({"batch": 2, "rows": 2, "cols": 2})
    strategy = mw.Sharded(mesh, inputs=["batch", "rows", "cols", None])
    sharded, one = (train(how, deep, x, y, epochs=2) for how in (strategy, OneDevice()))
    agree(sharded, one, Tolerance(weights=2e-6, losses=1e-6))
