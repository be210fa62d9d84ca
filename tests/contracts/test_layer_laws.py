"""Every kind of layer × layouts over batch, model and space: one device's outputs and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from oracle import OneDevice, gradients, made, relative

import meshwright as mw

# One process: each oracle is computed once.
pytestmark = pytest.mark.xdist_group("layer_laws")

BATCH = 16


@dataclass(frozen=True)
class Case:
    """A layer with the dims of its input, and how its weights and its input may be split.

    ``model`` are rules for a mesh of batch=4, model=2; ``space`` are axes, of size 2 each, for the
    dims of the input after the first.
    """

    layer: Callable[[], keras.Layer]
    dims: tuple[int, ...]
    model: dict[str, Any] = field(default_factory=dict)
    space: Sequence[str | None] = ()
    ints: bool = False
    noise: tuple[str, ...] = ()

    def build(self) -> keras.Model:
        x = keras.Input(self.dims, dtype="int32" if self.ints else "float32")
        h = x
        if not self.ints:  # the layer works on an intermediate, as most do
            h = layers.Dense(self.dims[-1], name="before", activation="tanh")(x)
        h = layers.Flatten()(self.layer()(h))
        model = keras.Model(x, layers.Dense(3, name="after")(h))
        model.compile("sgd", "mse")
        return model

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(2)
        y = draw.normal(size=[BATCH, 3]).astype("float32")
        if self.ints:
            return draw.integers(0, 16, [BATCH, *self.dims], "int32"), y
        return draw.normal(size=[BATCH, *self.dims]).astype("float32"), y


class SelfAttention(layers.Layer):
    """Attention of a sequence to itself, as a layer of one input."""

    def __init__(self) -> None:
        super().__init__(name="attending")
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")

    def build(self, dims: Any) -> None:
        self.attention.build(dims, dims)

    def call(self, x: Any) -> Any:
        return self.attention(x, x)


LAST, FIRST = [None, "model"], ["model", None]
SEQUENCE, IMAGE, VOLUME = (6, 4), (8, 8, 4), (4, 4, 4, 2)
ROWS, SQUARE, CUBE = ("rows", None), ("rows", "cols", None), ("rows", "cols", None, None)
_same = {"padding": "same", "name": "it"}

CASES = {
    "Embedding": Case(lambda: layers.Embedding(16, 8, name="it"), (6,), {"it": FIRST}, ints=True),
    "LSTM": Case(
        lambda: layers.LSTM(8, name="it"), SEQUENCE, {"it.*kernel": LAST, "it.*bias": ["model"]},
        ROWS,
    ),
    "GRU": Case(
        lambda: layers.GRU(8, name="it", return_sequences=True), SEQUENCE,
        {"it.*kernel": LAST, "it.*bias": [None, "model"]}, ROWS,
    ),
    "SimpleRNN": Case(
        lambda: layers.Bidirectional(layers.SimpleRNN(8), name="it"), SEQUENCE,
        {"it.*kernel": FIRST}, ROWS,
    ),
    "Conv1D": Case(
        lambda: layers.Conv1D(8, 3, **_same), (8, 4), {"it.*kernel": [None, None, "model"]}, ROWS
    ),
    "Conv2D": Case(
        lambda: layers.Conv2D(8, 3, **_same), IMAGE, {"it.*kernel": [None, None, "model", None]},
        SQUARE,
    ),
    "Conv2D strided": Case(
        lambda: layers.Conv2D(8, 3, strides=2, **_same), IMAGE,
        {"it.*kernel": [None, None, None, "model"]}, SQUARE,
    ),
    "Conv2D dilated": Case(
        lambda: layers.Conv2D(8, 3, dilation_rate=2, **_same), IMAGE,
        {"it.*kernel": [None, None, None, "model"]}, SQUARE,
    ),
    "Conv2D grouped": Case(
        lambda: layers.Conv2D(8, 3, groups=2, **_same), IMAGE,
        {"it.*kernel": [None, None, None, "model"]}, SQUARE,
    ),
    "Conv3D": Case(
        lambda: layers.Conv3D(4, 3, **_same), VOLUME, {"it.*kernel": [None] * 4 + ["model"]}, CUBE
    ),
    "DepthwiseConv1D": Case(
        lambda: layers.DepthwiseConv1D(3, **_same), (8, 4), {"it.*kernel": [None, "model", None]},
        ROWS,
    ),
    "DepthwiseConv2D": Case(
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, **_same), IMAGE,
        {"it.*kernel": [None, None, "model", None]}, SQUARE,
    ),
    "SeparableConv2D": Case(
        lambda: layers.SeparableConv2D(8, 3, **_same), IMAGE,
        {"it.*pointwise_kernel": [None, None, None, "model"]}, SQUARE,
    ),
    "Conv1DTranspose": Case(
        lambda: layers.Conv1DTranspose(8, 3, strides=2, **_same), (8, 4),
        {"it.*kernel": [None, "model", None]}, ROWS,
    ),
    "Conv2DTranspose": Case(
        lambda: layers.Conv2DTranspose(8, 3, strides=2, **_same), IMAGE,
        {"it.*kernel": [None, None, "model", None]}, SQUARE,
    ),
    "MaxPooling2D": Case(lambda: layers.MaxPooling2D(2), IMAGE, {}, SQUARE),
    "MaxPooling2D overlapping": Case(
        lambda: layers.MaxPooling2D(3, strides=2, padding="same"), IMAGE, {}, SQUARE
    ),
    "AveragePooling2D": Case(
        lambda: layers.AveragePooling2D(3, strides=2, padding="same"), IMAGE, {}, SQUARE
    ),
    "GlobalAveragePooling2D": Case(lambda: layers.GlobalAveragePooling2D(), IMAGE, {}, SQUARE),
    "AveragePooling3D": Case(lambda: layers.AveragePooling3D(2), VOLUME, {}, CUBE),
    "UpSampling2D": Case(lambda: layers.UpSampling2D(2), IMAGE, {}, SQUARE),
    "LayerNormalization": Case(
        lambda: layers.LayerNormalization(name="it"), IMAGE, {"it.*": ["model"]}, SQUARE
    ),
    "BatchNormalization": Case(
        lambda: layers.BatchNormalization(name="it"), IMAGE, {"it.*": ["model"]}, SQUARE
    ),
    "GroupNormalization": Case(
        lambda: layers.GroupNormalization(2, name="it"), IMAGE, {"it.*": ["model"]}, SQUARE
    ),
    "MultiHeadAttention": Case(
        SelfAttention, SEQUENCE,
        {
            "attention/(query|key|value)/kernel": [None, "model", None],
            "attention/(query|key|value)/bias": ["model", None],
            "attention_output/kernel": ["model", None, None],
        },
        ROWS, noise=("key_dense/bias",),  # softmax does not see what is added to every key
    ),
    "EinsumDense": Case(
        lambda: layers.EinsumDense("abc,cd->abd", (6, 8), name="it"), SEQUENCE,
        {"it.*kernel": LAST}, ROWS,
    ),
}  # fmt: skip


def _strategy(case: Case, layout: str) -> mw.Sharded:
    if layout == "batch":
        return mw.DataParallel(mw.create_mesh({"batch": 8}))
    if layout == "model":
        return mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), case.model)
    axes = [axis for axis in case.space if axis]
    mesh = mw.create_mesh({"batch": 8 // 2 ** len(axes), **dict.fromkeys(axes, 2)})
    return mw.Sharded(mesh, inputs=["batch", *case.space])


def _observed(strategy: Any, case: Case) -> tuple[dict[str, np.ndarray], np.ndarray]:
    model = made(strategy, case.build)
    x, y = case.batch()
    result = gradients(strategy, model, (x, y))
    return result, strategy.predict(model, x, batch_size=BATCH, verbose=0)


@functools.cache
def one_device(name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    return _observed(OneDevice(), CASES[name])


ALWAYS = {
    ("Embedding", "model"), ("LSTM", "model"), ("Conv2D", "spatial"), ("Conv2DTranspose", "model"),
    ("DepthwiseConv2D", "spatial"), ("MultiHeadAttention", "model"),
    ("BatchNormalization", "spatial"), ("MaxPooling2D overlapping", "spatial"),
}  # fmt: skip


# The other two layouts split the batch as well, of every layer but these.
BY_BATCH = ("Embedding", "LSTM", "Conv2D", "BatchNormalization")


def _cases() -> list[Any]:
    cases = []
    for name, case in CASES.items():
        asked = {
            "batch": name in BY_BATCH,
            "model": bool(case.model),
            "spatial": bool(case.space),
        }
        for layout in [layout for layout, is_asked in asked.items() if is_asked]:
            marks = () if (name, layout) in ALWAYS else pytest.mark.full
            cases.append(pytest.param(name, layout, id=f"{name}-{layout}", marks=marks))
    return cases


@pytest.mark.full_for(
    "BatchNormalization-spatial",
    "Conv2D-spatial",
    "Conv2DTranspose-model",
    "DepthwiseConv2D-spatial",
    "Embedding-model",
    "LSTM-model",
    "MaxPooling2D overlapping-spatial",
    "MultiHeadAttention-model",
)
@pytest.mark.parametrize(("name", "layout"), _cases())
def test_outputs_and_gradients_are_one_devices(name: str, layout: str) -> None:
    case = CASES[name]
    strategy = _strategy(case, layout)
    result, outputs = _observed(strategy, case)
    expected, outputs_there = one_device(name)
    if layout == "model":
        _every_rule_has_split_something(strategy, case)
    np.testing.assert_allclose(outputs, outputs_there, atol=2e-6)
    for path, gradient in expected.items():
        if not path.endswith(case.noise or ("nothing is noise",)):
            assert relative(result[path], gradient) <= 1e-5, path


def _every_rule_has_split_something(strategy: mw.Sharded, case: Case) -> None:
    explained = strategy.explain(made(strategy, case.build)).placed
    split = {placed.reason for placed in explained if placed.layout.axes}
    assert split == {f"layout {pattern!r}" for pattern in case.model}


def test_batch_normalization_sees_the_whole_batch() -> None:
    """Every device's rows have another mean; the statistics are NumPy's over all of them."""
    rows = np.arange(16, dtype="float32")[:, None] * np.ones([1, 3], "float32")
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))

    def build() -> keras.Model:
        model = keras.Sequential(
            [keras.Input([3]), layers.BatchNormalization(momentum=0.0, name="norm")]
        )
        model.compile("sgd", "mse")
        return model

    model = made(strategy, build)
    strategy.fit(model, rows, rows, batch_size=16, verbose=0)
    np.testing.assert_allclose(np.asarray(model.layers[0].moving_mean), rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(model.layers[0].moving_variance), rows.var(0), rtol=1e-5)


@pytest.mark.full
def test_a_dropout_mask_does_not_depend_on_the_mesh() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input([6, 4]), layers.Dropout(0.5), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def mask(strategy: Any) -> np.ndarray:
        model = made(strategy, build)
        kernel = np.zeros([4, 1], "float32")
        kernel[0] = 1  # the output is the first feature, dropped or doubled
        model.layers[-1].set_weights([kernel, np.zeros([1], "float32")])
        x = np.ones([16, 6, 4], "float32")
        batch = (x, np.zeros([16, 6, 1], "float32"))
        program = strategy.program(model, batch)
        state = strategy.state(model)
        with strategy.in_force(model):
            outputs, _ = program.forward(state.params, state.state, strategy.put(batch)[0], True)
        return np.asarray(outputs)

    results = [
        mask(strategy)
        for strategy in (
            mw.DataParallel(
                mw.create_mesh({"batch": 1}, devices=mw.create_mesh().bound_devices()[:1])
            ),
            mw.DataParallel(mw.create_mesh({"batch": 8})),
            mw.Sharded(mw.create_mesh({"batch": 4, "rows": 2}), inputs=["batch", "rows", None]),
        )
    ]
    assert set(np.unique(results[0])) == {0.0, 2.0}
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
