"""What Keras models have besides layers, in stages and in branches: one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from models import mesh_of

import meshwright as mw

ROWS = 8


class Auxiliary(layers.Layer):
    """Adds a loss of what goes through it, as the balance of a mixture of experts is."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def chain(x: Any, penalty: str | None = None, auxiliary: bool = False) -> Any:
    for number in range(4):
        x = layers.Dense(8, "tanh", kernel_regularizer=penalty, name=f"block{number}")(x)
        if auxiliary:
            x = Auxiliary(name=f"auxiliary{number}")(x)
    return x


def forked(x: Any, penalty: str | None = None, auxiliary: bool = False) -> Any:
    branches = [
        layers.Dense(8, "tanh", kernel_regularizer=penalty, name=f"top{name}")(
            layers.Dense(8, "gelu", name=f"under{name}")(x)
        )
        for name in "ab"
    ]
    if auxiliary:
        branches = [Auxiliary(name=f"auxiliary{n}")(outputs) for n, outputs in enumerate(branches)]
    return layers.Concatenate(name="joined")(branches)


Middle = Callable[..., Any]


def plain(middle: Middle, optimizer: Any = None, **options: Any) -> keras.Model:
    inputs = keras.Input([6], name="a")
    x = middle(layers.Dense(8, "gelu", name="first")(inputs), **options)
    model = keras.Model(inputs, layers.Dense(3, name="left", dtype="float32")(x))
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return model


def two_by_two(middle: Middle) -> keras.Model:
    """Two inputs, two outputs with losses, weights and metrics of their own."""
    inputs = {name: keras.Input([6], name=name) for name in "ab"}
    x = middle(layers.Dense(8, "gelu", name="first")(layers.Add(name="sum")([*inputs.values()])))
    outputs = {name: layers.Dense(3, name=name)(x) for name in ("left", "right")}
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        {"left": "mse", "right": "mae"},
        loss_weights={"left": 1.0, "right": 0.5},
        metrics={"left": ["mae"]},
    )
    return model


def scaled(middle: Middle) -> keras.Model:
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    return plain(
        middle, keras.optimizers.LossScaleOptimizer(inner, initial_scale=64, dynamic_growth_steps=3)
    )


def of_policy(middle: Middle) -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return plain(middle)
    finally:
        keras.config.set_dtype_policy(before)


MODELS: dict[str, tuple[Callable[[Middle], keras.Model], float]] = {
    "two inputs and outputs": (two_by_two, 1e-5),
    "loss scale": (scaled, 1e-5),
    "penalties": (lambda middle: plain(middle, penalty="l2"), 1e-5),
    "auxiliary losses": (lambda middle: plain(middle, auxiliary=True), 1e-5),
    "mixed_bfloat16": (of_policy, 2e-2),  # micro-batches round gradients one by one
}
WAYS = {
    "stages": (chain, {"stage": 2, "data": 2}, mw.Pipeline("stage", 2)),
    "branches": (forked, {"branch": 2, "data": 2}, mw.Branches("branch")),
}


def fitted(strategy: Any, build: Callable[[], keras.Model]) -> tuple[Any, list[np.ndarray]]:
    draw = np.random.default_rng(0)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
    x = {name: draw.normal(size=[4 * ROWS, 6]).astype("float32") for name in ("a", "b")}
    y = {name: draw.normal(size=[4 * ROWS, 3]).astype("float32") for name in ("left", "right")}
    if len(model.inputs) == 1:
        x, y = x["a"], y["left"]
    weight = np.linspace(0.5, 1.5, 4 * ROWS).astype("float32")
    weighted = {} if isinstance(y, dict) else {"sample_weight": weight}
    history = strategy.fit(
        model, x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0, **weighted
    )
    slots = [np.asarray(value) for value in model.optimizer.variables]
    return history.history, [*model.get_weights(), *slots]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_on_one_device(name: str, way: str) -> None:
    (build, within), (middle, axes, pipeline) = MODELS[name], WAYS[way]
    one = mw.DataParallel(mesh_of({"data": 1}), batch="data")
    strategy = mw.Sharded(mesh_of(axes), batch="data", unmatched="replicate", pipeline=pipeline)
    reference, expected = fitted(one, lambda: build(middle))
    result, same = fitted(strategy, lambda: build(middle))
    assert result == {key: pytest.approx(values, rel=within) for key, values in reference.items()}
    for actual, value in zip(same, expected, strict=True):
        np.testing.assert_allclose(actual, value, atol=within)


def trained_once(build: Callable[[], keras.Model], x: Any, pipeline: Any) -> tuple[Any, Any]:
    """The logs and weights after a step, by the stages or on one device."""
    axes = {"stage": 2, "data": 2} if pipeline else {"data": 1}
    strategy = mw.Sharded(mesh_of(axes), batch="data", unmatched="replicate", pipeline=pipeline)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
    y = np.random.default_rng(1).integers(1, 8, x.shape)
    history = strategy.fit(model, x, y, batch_size=ROWS, verbose=0, shuffle=False)
    return history.history, model.get_weights()


def assert_trains_as_on_one_device(build: Callable[[], keras.Model], x: Any, how: Any) -> None:
    (logs, weights), (expected_logs, expected) = (trained_once(build, x, of) for of in (how, None))
    assert logs == {key: pytest.approx(value, rel=1e-5) for key, value in expected_logs.items()}
    for actual, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(actual, value, atol=1e-6)


def partly_frozen(frozen: tuple[int, ...] = (0, 3), width: int = 8) -> keras.Model:
    x = inputs = keras.Input([8])
    x = x if width == 8 else layers.Dense(width)(x)
    for number in range(4):
        x = layers.Dense(width, "tanh", trainable=number not in frozen, name=f"block{number}")(x)
    model = keras.Model(inputs, layers.Dense(8, name="head")(x))
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1), "mse")
    return model


@pytest.mark.parametrize("cuts", [None, ["block3"]])
def test_frozen_blocks_go_with_those_that_are_trained(cuts: list[str] | None) -> None:
    x = np.random.default_rng(0).normal(size=[ROWS, 8]).astype("float32")
    assert_trains_as_on_one_device(partly_frozen, x, mw.Pipeline("stage", 2, cuts=cuts))


def masked() -> keras.Model:
    inputs = keras.Input([4])
    x = layers.Embedding(8, 4, mask_zero=True, name="table")(inputs)
    for number in range(2):
        x = layers.Dense(4, "tanh", name=f"block{number}")(x)
    model = keras.Model(inputs, layers.Dense(8, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ways = {"metrics": ["accuracy"], "weighted_metrics": ["sparse_categorical_crossentropy"]}
    model.compile(keras.optimizers.SGD(0.1), loss, **ways)
    return model


def test_metrics_of_a_masked_model_count_what_keras_counts() -> None:
    """While it trains every token, for Keras' own metrics then see no mask."""
    x = np.random.default_rng(0).integers(1, 8, [ROWS, 4])
    x[:, 3:] = 0
    assert_trains_as_on_one_device(masked, x, mw.Pipeline("stage", 2))


def test_explain_refuses_a_batch_that_does_not_divide_into_micro_batches() -> None:
    pipeline = mw.Pipeline("stage", 4)
    mesh = mesh_of({"stage": 2, "data": 2})
    strategy = mw.Sharded(mesh, batch="data", unmatched="replicate", pipeline=pipeline)
    with strategy.scope():
        model = partly_frozen()
    with pytest.raises(mw.BatchError, match=r"a batch of 12 .* micro_batches=4 over 2 pieces"):
        strategy.explain(model, (np.ones([12, 8], "float32"), np.ones([12, 8], "float32")))


def test_a_dry_run_of_partly_frozen_blocks_is_that_of_trained_ones() -> None:
    """Stages compute all blocks alike; frozen weights lie whole beside them."""
    pipeline, rows = mw.Pipeline("stage", 4), np.ones([16, 8], "float32")
    mesh = mw.Mesh({"stage": 2, "data": 2})
    strategy = mw.Sharded(mesh, batch="data", unmatched="replicate", pipeline=pipeline)
    how = {"strategy": strategy, "target": "v5e:2x2", "compile": False}
    frozen, trained = (mw.dry_run(partly_frozen(of), (rows, rows), **how) for of in ((0, 3), ()))
    assert frozen.step_time_s == pytest.approx(trained.step_time_s, rel=1e-4)
    assert frozen.memory.temporary_bytes == trained.memory.temporary_bytes
    assert frozen.memory.state_bytes == trained.memory.state_bytes + 2 * 4 * (8 * 8 + 8)


@pytest.mark.full
def test_a_stage_writes_the_frozen_weights_of_its_own_blocks_alone() -> None:
    def temporary_bytes(frozen: tuple[int, ...]) -> int:
        mesh, rows = mw.Mesh({"stage": 2, "data": 1}), np.ones([4, 8], "float32")
        pipeline = mw.Pipeline("stage", 2)
        strategy = mw.Sharded(mesh, batch="data", unmatched="replicate", pipeline=pipeline)
        model = partly_frozen(frozen, width=256)
        report = mw.dry_run(model, (rows, rows), strategy=strategy, target="cpu:2")
        return report.memory.temporary_bytes

    a_block = 4 * 256 * 257
    assert temporary_bytes((0, 1, 2)) < temporary_bytes(()) + 1.1 * a_block


class OwnStep(keras.Model):
    """A model with a step of its own."""

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


@pytest.mark.parametrize("way", WAYS)
def test_a_train_step_of_ones_own_is_refused(way: str) -> None:
    middle, axes, pipeline = WAYS[way]
    strategy = mw.Sharded(mesh_of(axes), batch="data", unmatched="replicate", pipeline=pipeline)
    with strategy.scope():
        inputs = keras.Input([6])
        model = OwnStep(inputs, layers.Dense(3)(middle(layers.Dense(8)(inputs))))
        model.compile("sgd", "mse")
    with pytest.raises(mw.PipelineError, match=rf"cannot take the train_step .*\s+taken by {way}"):
        strategy.fit(model, np.ones([8, 6]), np.ones([8, 3]), batch_size=8, verbose=0)


def depthwise() -> keras.Model:
    """Equal blocks, each with a convolution of every channel by itself."""
    x = inputs = keras.Input([4, 4, 4])
    for number in range(2):
        hidden = layers.DepthwiseConv2D(3, padding="same", name=f"block{number}_alone")(x)
        x = x + layers.Dense(4, "gelu", name=f"block{number}_mixed")(hidden)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.full
def test_convolutions_whose_channels_are_split_train_in_stages() -> None:
    """A device computes its channels by hand, within the stage that it is of."""
    images = np.random.default_rng(0).normal(size=[ROWS, 4, 4, 4]).astype("float32")
    results = []
    for axes, pipeline in (
        ({"data": 1}, None),
        ({"stage": 2, "data": 2, "model": 2}, mw.Pipeline("stage", 2)),
    ):
        split = {"alone/kernel": [None, None, "model", None]} if pipeline else None
        mesh = mesh_of(axes)
        strategy = mw.Sharded(mesh, split, batch="data", unmatched="replicate", pipeline=pipeline)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = depthwise()
        strategy.fit(model, images, images[::-1].copy(), batch_size=ROWS, verbose=0)
        results.append(model.get_weights())
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def pointwise() -> keras.Model:
    """Equal blocks with convolutions whose windows are one place, whole, or of a single place."""
    x = inputs = keras.Input([2, 2, 4])
    for number in range(2):
        x = layers.Conv2D(4, 1, activation="tanh", groups=2, name=f"block{number}_mixed")(x)
        hidden = layers.Conv2D(4, 2, activation="tanh", name=f"block{number}_whole")(x)
        x = x + layers.Conv2DTranspose(4, 2, strides=2, name=f"block{number}_spread")(hidden)
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_convolutions_that_are_products_train_in_stages() -> None:
    """XLA's partitioner computes them wrong where the rows of a stage lie on several devices."""
    images = np.random.default_rng(0).normal(size=[ROWS, 2, 2, 4]).astype("float32")
    assert_trains_as_on_one_device(pointwise, images, mw.Pipeline("stage", 2))
