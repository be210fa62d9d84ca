"""What a step of several micro-batches logs is what one batch of all their rows would log."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers
from oracle import OneDevice

import meshwright as mw
import meshwright.named as mn
from meshwright.data import putter
from meshwright.errors import ModelError
from meshwright.step.accumulate import Way, accumulating_in

MESH = {"batch": 4}
WAYS: tuple[Way, ...] = ("side by side", "written out", "in a loop")


def data(rows: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(rows)
    return {
        "x": draw.normal(size=[rows, 4]).astype("float32"),
        "y": draw.normal(size=[rows, 2]).astype("float32"),
    }


def joined(*batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def plain() -> mw.Program:
    def loss(params: Any, batch: Any) -> Any:
        error = batch["x"] @ params["w"] - batch["y"]
        return jnp.mean(error**2), {"largest": jnp.mean(jnp.max(error, -1))}

    return mw.jax_program(loss, {"w": np.ones([4, 2], "float32")}, optax.sgd(0.1))


def named() -> mw.Program:
    def loss(params: Any, batch: Any) -> Any:
        error = mn.einsum([batch["x"], params["w"]]) - batch["y"]
        largest = mn.reduce_mean(mn.reduce_max(error, "out"))
        return mn.reduce_mean(mn.square(error)), {"largest": largest}

    params = {"w": mn.named(jnp.ones([4, 2]), "io:4 out:2")}
    return mw.named_program(loss, params, optax.sgd(0.1), batch={"x": "batch io", "y": "batch out"})


def logged(program: mw.Program, batches: list[Any], way: Way | None = None) -> dict[str, float]:
    how = mw.StepOptions(accumulate=len(batches))
    mesh = mw.create_mesh(MESH, devices=jax.devices()[:4])
    rules: Any = {"rules": "batch:batch"} if program.inputs else {}
    trainer = mw.Trainer(program, mw.Placement.of(mesh, **rules), how)
    with accumulating_in(way):
        _, logs = trainer.train(trainer.init(), batches)
    return {name: float(value) for name, value in logs.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_logs_the_mean_over_all_rows(way: Way) -> None:
    halves = [data(8), {name: 3 * array for name, array in data(8).items()}]
    expected = logged(plain(), [joined(*halves)])
    assert logged(plain(), halves, way) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("program", [plain, named])
def test_a_smaller_micro_batch_counts_by_its_rows(program: Any) -> None:
    batches = [data(8), {name: 3 * array for name, array in data(4).items()}]
    expected = logged(program(), [joined(*batches)])
    assert logged(program(), batches) == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:a batch of")
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_fit_logs_the_loss_and_metrics_of_all_rows_with_padding(reduction: str) -> None:
    """Micro-batches of 6, 6, 6 and 3 rows over 4 devices; steps of 12 and 9 rows."""
    x, y = data(21).values()

    def history(strategy: Any, batch_size: int) -> dict[str, list[float]]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input([4]), layers.Dense(2)])
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            model.compile(keras.optimizers.SGD(0.01), loss, metrics=["mae"])
        fitted = strategy.fit(model, x, y, batch_size=batch_size, shuffle=False, verbose=0)
        return {name: [*map(float, values)] for name, values in fitted.history.items()}

    sharded = mw.Sharded(
        mw.create_mesh(MESH, devices=jax.devices()[:4]), batch="batch", accumulate=2
    )
    expected = history(OneDevice(), 12)
    for name, values in history(sharded, 6).items():
        assert values == pytest.approx(expected[name], rel=1e-5)


def test_scalars_in_a_batch_have_no_rows() -> None:
    """A scalar may stand before the arrays of rows; a batch of scalars alone is refused."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] * params["w"]) * batch["factor"]

    program = mw.jax_program(loss, {"w": np.ones([], "float32")}, optax.sgd(0.1))
    batches = [{"factor": np.float32(2), "x": np.full([4], v, "float32")} for v in (1, 3)]
    assert logged(program, batches)["loss"] == 4.0
    scalars = mw.jax_program(lambda p, b: p["w"] * b, {"w": np.ones([])}, optax.sgd(0.1))
    with pytest.raises(ModelError, match="received 1 scalar"):
        logged(scalars, [np.float32(1), np.float32(2)])


@pytest.mark.parametrize("count", [1, 2])
def test_a_random_key_in_a_batch_has_no_rows(count: int) -> None:
    """Each micro-batch of a step has its own key, typed or raw, in training, dry runs and plans."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] * params["w"]) * jax.random.uniform(batch["key"])

    program = mw.jax_program(loss, {"w": np.ones([], "float32")}, optax.sgd(0.1))
    batches = [{"key": jax.random.key(v), "x": np.full([4], v, "float32")} for v in range(count)]
    drawn = [float(v * jax.random.uniform(jax.random.key(v))) for v in range(count)]
    assert logged(program, batches)["loss"] == pytest.approx(np.mean(drawn))
    strategy = mw.Sharded(mw.Mesh(MESH), accumulate=count)
    report = mw.dry_run(program, batches[0], strategy=strategy, target="v5e:2x2", compile=False)
    assert report.memory.input_bytes == count * (4 + 8)
    if count == 2:
        mesh = mw.create_mesh(MESH, devices=jax.devices()[:4])
        on = mw.Sharded(mesh, accumulate=count)
        assert mw.measure(program, batches[0], strategy=on, steps=1).step_time_s > 0
        assert mw.plan(program, batches[0], target="h100:4").chosen


def test_a_random_key_is_laid_out_over_processes() -> None:
    keys, mesh = jax.random.split(jax.random.key(0), 4), mw.create_mesh({"batch": 8})
    whole, split = (mw.Layout(spec, mesh).sharding for spec in ([], ["batch"]))
    assert putter._from_whole(keys[0], whole) == keys[0]
    rows = jax.random.split(keys[0], 8)
    for laid_out in putter._from_whole(rows, split), putter._from_own(rows, split, (8,)):
        assert laid_out.sharding == split
        assert jnp.all(laid_out == rows)
