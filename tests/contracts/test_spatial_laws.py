"""Rows that do not divide somewhere inside the net: right gradients all the same.

XLA alone partitions some of these convolutions silently wrongly (relative errors of 1 to 3), so
each case is a trap that only a guard avoids.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
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


# A model's own step calls its parts itself, and what one part splits may be rows of the next.


class TwoParts(keras.Model):
    """A generator of images and a judge of them, trained against each other."""

    def __init__(self, by: str) -> None:
        super().__init__()
        to_image = [layers.Dense(64, name="features"), layers.Reshape([8, 8, 1])]
        self.generator = keras.Sequential([keras.Input([8]), *to_image])
        convolution = layers.Conv2D(4, 3, strides=2, padding="same", name="convolution")
        judging = [convolution, layers.Flatten(), layers.Dense(1, name="verdict")]
        self.judge = keras.Sequential([keras.Input([8, 8, 1]), *judging])
        self.by, self.built = by, True

    def judged(self, trainable: Any, noise: Any) -> Any:
        """The mean verdict on made images."""
        if self.by == "stateless_call":
            images, _ = self.generator.stateless_call(trainable[:2], [], noise)
            return keras.ops.mean(self.judge.stateless_call(trainable[2:], [], images)[0] ** 2)
        pairs = list(zip(self.trainable_variables, trainable, strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            return keras.ops.mean(self.judge(self.generator(noise)) ** 2)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, other, slots, counts = state
        loss, grads = jax.value_and_grad(self.judged)(trainable, data)
        grads = [-gradient for gradient in grads[:2]] + grads[2:]
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        return {"verdict": loss}, (trainable, other, slots, counts)


@pytest.mark.parametrize("by", ["stateless_call", "StatelessScope"])
@pytest.mark.parametrize("mesh", [{"batch": 4, "model": 2}, {"model": 8}], ids=str)
def test_features_of_one_part_that_are_rows_of_the_next(mesh: dict[str, int], by: str) -> None:
    def build() -> keras.Model:
        model = TwoParts(by)
        model.compile(keras.optimizers.SGD(0.5))
        return model

    x = np.random.default_rng(6).normal(size=[32, 8]).astype("float32")
    axis = "batch" if "batch" in mesh else None
    layouts = {"features/kernel": [None, "model"], "features/bias": ["model"]}
    strategy = mw.Sharded(mw.create_mesh(mesh), layouts, batch=axis)
    sharded, one = (train(how, build, x, batch_size=16) for how in (strategy, OneDevice()))
    agree(sharded, one, Tolerance(weights=2e-6, losses=1e-5))


@pytest.mark.parametrize("mesh", [{"batch": 4, "model": 2}, {"model": 8}], ids=str)
def test_the_same_in_a_loop_of_ones_own(mesh: dict[str, int]) -> None:
    axis = "batch" if "batch" in mesh else None
    strategy = mw.Sharded(mw.create_mesh(mesh), {"features/kernel": [None, "model"]}, batch=axis)
    noise = np.random.default_rng(6).normal(size=[16, 8]).astype("float32")
    found = []
    for how in (strategy, OneDevice()):
        model = made(how, functools.partial(TwoParts, "stateless_call"))
        values = [variable.value for variable in model.trainable_variables]
        with how.scope():
            batch = strategy.put((noise,))[0] if how is strategy else noise
            found.append(jax.jit(jax.grad(model.judged))(values, batch))
    for ours, theirs in zip(*found, strict=True):
        assert relative(np.asarray(ours), np.asarray(theirs)) < 1e-5


def test_masks_go_from_one_part_to_the_next() -> None:
    ids = np.random.default_rng(7).integers(0, 3, [16, 5]).astype("int32")
    strategy = mw.Sharded(
        mw.create_mesh({"batch": 4, "model": 2}), {"recurrent.*kernel": [None, "model"]}
    )
    found = []
    for how in (strategy, OneDevice()):
        keras.utils.set_random_seed(1)
        with how.scope():
            embed = keras.Sequential([layers.Embedding(3, 4, mask_zero=True)])
            read = keras.Sequential([layers.LSTM(4, name="recurrent")])
            embed.build([16, 5])
            read.build([16, 5, 4])

            def both(first: Any, second: Any, ids: Any, parts: Any = (embed, read)) -> Any:
                vectors, _ = parts[0].stateless_call(first, [], ids)
                others = [v.value for v in parts[1].non_trainable_variables]
                return parts[1].stateless_call(second, others, vectors)[0]

            values = [[v.value for v in part.trainable_variables] for part in (embed, read)]
            found.append(np.asarray(jax.jit(both)(*values, ids)))
    np.testing.assert_allclose(*found, atol=1e-6)


class CallsTwice(keras.Model):
    """Its loss calls a part of it once more, as that of a variational autoencoder does."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        again = self.layers[-1](x)
        return super().compute_loss(x, y, y_pred, sample_weight) + keras.ops.mean(again**2)


def test_plain_keras_predicts_evaluates_and_trains_right_outside_the_scope() -> None:
    """A laid-out model gets no guard from a scope then, and XLA alone predicts something else."""

    def build() -> keras.Model:
        first = layers.Dense(64, activation="relu", name="features")
        wide = layers.Conv2DTranspose(16, 3, padding="same", name="wide")
        last = layers.Conv2DTranspose(1, 3, padding="same", name="last")
        images = [layers.Reshape([2, 2, 16]), wide, last]
        inner = keras.Sequential([keras.Input([2]), first, *images])
        model = CallsTwice(inner.inputs, inner(inner.inputs[0]))
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    layouts = {"features/kernel": [None, "model"], "(wide|last)/kernel": [None] * 3 + ["model"]}
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), layouts)
    draw = np.random.default_rng(6)
    x, y = draw.normal(size=[16, 2]), draw.normal(size=[16, 2, 2, 1])
    found = []
    for how in (strategy, OneDevice()):
        model = made(how, build)
        loss = model.evaluate(x, y, verbose=0)
        outputs = [model.predict(x, verbose=0), model.predict_on_batch(x)]
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        found.append([loss, *outputs, *model.get_weights()])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
