"""Micro-batches side by side: only where no state changes between them and no memory is saved."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import meshwright as mw
from meshwright.step.accumulate import accumulating_in, saves_nothing_in_turn

WIDTH = 32


def net(*inner: Callable[[], layers.Layer]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        middle = [make() for make in inner]
        return keras.Sequential([keras.Input([WIDTH]), layers.Dense(64), *middle, layers.Dense(4)])

    return build


def saves_nothing(build: Callable[[], keras.Model], rows: int, times: int = 4) -> bool:
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with strategy.scope():
        model = build()
        model.compile("sgd", "mse")
    batch = np.zeros([rows, WIDTH], "float32"), np.zeros([rows, 4], "float32")
    strategy.train_step(model, batch)
    return saves_nothing_in_turn(strategy.program(model), strategy.state(model), [batch] * times, 8)


def test_few_rows_are_taken_side_by_side_and_many_in_turn() -> None:
    assert saves_nothing(net(), 8)
    assert not saves_nothing(net(), 1024)
    assert not saves_nothing(net(), 8, times=1024)


@pytest.mark.parametrize(
    "layer",
    [lambda: layers.Dropout(0.5), layers.BatchNormalization],
    ids=["a seed", "batch statistics"],
)
def test_what_one_micro_batch_leaves_to_the_next_is_taken_in_turn(
    layer: Callable[[], layers.Layer],
) -> None:
    assert not saves_nothing(net(layer), 8)


def test_statistics_within_a_micro_batch_stay_its_own() -> None:
    """Of a loss whose rows meet, side by side is not one batch of all rows, but four."""
    program = mw.jax_program(
        lambda p, batch: jnp.square(jnp.mean(p["w"] * batch)), {"w": jnp.ones([])}, optax.sgd(0.1)
    )
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    batches = [np.full([8], value, "float32") for value in (1.0, 2.0, 3.0, 4.0)]
    results = {}
    for way in ("side by side", "written out", "in a loop"):
        trainer = mw.Trainer(program, placement, mw.StepOptions(accumulate=4))
        with accumulating_in(way):
            state, logs = trainer.step(trainer.init(), tuple(map(trainer.put, batches)))
        results[way] = float(state.params["w"]), float(logs["loss"])
    gradient = np.mean([2 * value**2 for value in (1, 2, 3, 4)])
    for numbers in results.values():
        np.testing.assert_allclose(numbers, (1 - 0.1 * gradient, 7.5), rtol=1e-6)


def test_gradients_come_out_of_one_product() -> None:
    """Rows of all micro-batches in one operation: no gradient per micro-batch is ever made."""
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}), accumulate=4)
    with strategy.scope():
        model = net()()
        model.compile("sgd", "mse")
    batch = strategy.put((np.zeros([8, WIDTH], "float32"), np.zeros([8, 4], "float32")))
    step = strategy.train_step(model, batch)
    text = str(jax.make_jaxpr(step)(strategy.state(model), (batch,) * 4))
    assert f"f32[4,{WIDTH},64]" not in text
    assert text.count("dot_general") == 5  # two forward, three backward


@pytest.mark.parametrize(
    ("batches", "received"),
    [
        (
            (np.zeros([8, 2], "float32"), np.zeros([8], "int32")),
            r"\('float32\[8, 2\]', 'int32\[8\]'\)",
        ),
        ({"x": np.zeros([8], "float32")}, r"\{'x': 'float32\[8\]'\}"),
        ((), r"\(\)"),
    ],
    ids=["rows of one", "a dict", "none"],
)
def test_one_batch_in_place_of_micro_batches_is_refused(batches: object, received: str) -> None:
    program = mw.jax_program(
        lambda p, batch: jnp.mean(batch[0] @ p["w"]), {"w": jnp.ones([2])}, optax.sgd(0.1)
    )
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}), batch="batch")
    trainer = mw.Trainer(program, placement, mw.StepOptions(accumulate=2))
    with pytest.raises(mw.BatchError, match=f"takes a tuple of micro-batches.*received {received}"):
        trainer.step(trainer.init(), batches)
