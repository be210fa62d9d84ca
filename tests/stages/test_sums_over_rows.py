"""Where a batch axis lies beside the stages, gradients are summed over it once in a step."""

from __future__ import annotations

import math
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import meshwright as mw

ROWS, STATISTICS_BYTES = 16, 1024  # of the widest layer: a tick may send these, and its loss


def words(rate: float = 0.0) -> tuple[keras.Model, Any]:
    """Equal blocks between an embedding and a head, both larger than what rows need."""
    ids = keras.Input([8], dtype="int32")
    x: Any = layers.Embedding(512, 32, name="tokens")(ids)
    for number in range(4):
        hidden = layers.Dense(64, "gelu", name=f"up_{number}")(x)
        hidden = layers.Dense(32, name=f"down_{number}")(hidden)
        x = layers.Add()([x, layers.Dropout(rate)(hidden) if rate else hidden])
    model = keras.Model(ids, layers.Dense(512, name="head")(x))
    batch = jax.ShapeDtypeStruct((ROWS, 8), "int32")
    return model, (batch, batch)


def drawing() -> tuple[keras.Model, Any]:
    """The same with dropout, which takes all rows of a micro-batch at once."""
    return words(rate=0.1)


def images() -> tuple[keras.Model, Any]:
    """Convolutions that differ, with statistics and masks of their own."""
    image = keras.Input([16, 16, 3])
    x: Any = image
    for number, filters in enumerate((16, 32, 64, 128)):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", name=f"conv_{number}")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    model = keras.Model(image, layers.Dense(8)(layers.Flatten()(x)))
    x_rows = jax.ShapeDtypeStruct((ROWS, 16, 16, 3), "float32")
    return model, (x_rows, jax.ShapeDtypeStruct((ROWS,), "int32"))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.full)])
@pytest.mark.parametrize("build", [words, drawing, images])
def test_a_tick_sends_no_gradient_over_the_axis_of_the_batch(build: Any, schedule: Any) -> None:
    with mw.abstract():
        model, batch = build()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    strategy = mw.Sharded(
        mw.Mesh({"stage": 2, "data": 2}),
        batch="data",
        pipeline=mw.Pipeline("stage", micro_batches=4, schedule=schedule),
        unmatched="replicate",
    )
    report = mw.dry_run(model, batch, strategy=strategy, target="cpu:4")
    over_data = [one for one in report.collectives if "data" in one.axes]
    by_tick = [one.bytes_per_device for one in over_data if one.count != 1]
    once = [one.bytes_per_device for one in over_data if one.kind == "all-reduce"]
    largest = 4 * max(math.prod(weight.shape) for weight in model.trainable_variables)
    assert max(by_tick) <= STATISTICS_BYTES < largest <= max(once)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 2])
def test_dropout_trains_beside_a_batch_axis_as_on_the_stages_alone(zero: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 512, [2, ROWS, 8])

    def weights(axes: dict[str, int], zero: int = 0) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        mesh = mw.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
        strategy = mw.Sharded(
            mesh,
            batch="data" if "data" in axes else None,
            zero=zero,
            pipeline=mw.Pipeline("stage", micro_batches=4),
            unmatched="replicate",
        )
        with strategy.scope():
            model = words(rate=0.3)[0]
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss)
        strategy.fit(model, x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0)
        return model.get_weights()

    actual, expected = weights({"stage": 2, "data": 2}, zero), weights({"stage": 2})
    largest = max(np.abs(value).max() for value in expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * largest)
