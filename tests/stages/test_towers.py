"""Towers side by side beside a data axis: with weights of their own, and with shared ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from models import mesh_of
from small_transformer import KEEPS_GRADIENTS

import meshwright as mw

TOLERANCE = 5e-6  # of the largest gradient
ROWS = 12  # as many as nothing else
DIMS = {"a/up": (6, 8), "a/down": (8, 4), "b/up": (5, 8), "b/down": (8, 4), "temperature": ()}


def pairs() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "a": draw.normal(size=[ROWS, 6]).astype("float32"),
        "b": draw.normal(size=[ROWS, 5]).astype("float32"),
        "y": draw.normal(size=[ROWS]).astype("float32"),
    }


def tower(params: Any, name: str, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ params[f"{name}/up"]) @ params[f"{name}/down"])


def two_towers(params: Any, batch: Any) -> Any:
    """Both begin at the batch, and with a number that is made of a weight of both."""
    warmth = jnp.exp(params["temperature"])
    left, right = (tower(params, name, batch[name] * warmth) for name in "ab")
    return jnp.square((left * right).sum(-1) - batch["y"]).mean()


def siamese(params: Any, batch: Any) -> Any:
    """No weight belongs to one tower alone."""
    left, right = (tower(params, "b", x) for x in (batch["a"][:, :5], batch["b"]))
    return jnp.square((left - right).sum(-1) - batch["y"]).mean()


def program_of(loss: Any, names: set[str]) -> mw.Program:
    draw = np.random.default_rng(1)
    params = {name: (0.3 * draw.normal(size=of)).astype("float32") for name, of in DIMS.items()}
    own = {name: params[name] for name in params if name in names}
    return mw.jax_program(loss, own, KEEPS_GRADIENTS, batch=pairs())


CASES = pytest.mark.parametrize(
    ("loss", "names"), [(two_towers, {*DIMS}), (siamese, {"b/up", "b/down"})]
)


@CASES
def test_towers_beside_a_data_axis_have_the_gradients_of_one_device(
    loss: Any, names: set[str]
) -> None:
    def stepped(mesh: dict[str, int], branches: mw.Branches | None = None) -> tuple[Any, float]:
        placement = mw.Placement.of(mesh_of(mesh), batch="data")
        options = mw.StepOptions(pipeline=branches)
        trainer = mw.Trainer(program_of(loss, names), placement, options)
        state, logs = trainer.step(trainer.init(), trainer.put(pairs()))
        return jax.tree.map(np.asarray, trainer.unpadded(state)), float(logs["loss"])

    expected, expected_loss = stepped({"data": 1})
    actual, found_loss = stepped({"branch": 2, "data": 2}, mw.Branches("branch"))
    assert found_loss == pytest.approx(expected_loss, rel=1e-5)
    for part, values in zip(actual, expected, strict=True):
        largest = max((np.abs(value).max() for value in values.values()), default=0.0)
        for path, value in values.items():
            assert np.abs(part[path] - value).max() <= TOLERANCE * largest, path


@CASES
def test_what_towers_keep_for_their_gradients_stays_split_over_the_data_axis(
    loss: Any, names: set[str]
) -> None:
    strategy = mw.Sharded(
        mesh_of({"branch": 2, "data": 2}),
        batch="data",
        unmatched="replicate",
        pipeline=mw.Branches("branch"),
    )
    report = mw.dry_run(program_of(loss, names), pairs(), strategy=strategy, target="cpu:4")
    gathered = [c for c in report.collectives if c.kind == "all-gather" and "data" in c.axes]
    assert not gathered


def keras_towers(shares: bool) -> keras.Model:
    """A retrieval model as anybody writes it; with ``shares``, a siamese one."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    inputs = {name: keras.Input([6], name=name) for name in "ab"}
    towers = {
        name: [dense(8, "tanh", name=f"{name}_up"), dense(4, "tanh", name=f"{name}_down")]
        for name in ("a" if shares else "ab")
    }
    made = []
    for name, x in inputs.items():
        for layer in towers["a" if shares else name]:
            x = layer(x)
        made.append(x)
    model = keras.Model(inputs, keras.layers.Dot(axes=-1, name="score")(made))
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("shares", [False, True], ids=["two towers", "siamese"])
def test_towers_of_layers_train_as_on_one_device(shares: bool) -> None:
    batch = pairs()
    x = {"a": batch["a"], "b": np.pad(batch["b"], [(0, 0), (0, 1)])}

    def fitted(strategy: Any) -> tuple[list[np.ndarray], dict[str, list[float]]]:
        with strategy.scope():
            model = keras_towers(shares)
        history = strategy.fit(
            model, x, batch["y"], batch_size=6, epochs=2, shuffle=False, verbose=0
        )
        return model.get_weights(), history.history

    expected, logs = fitted(mw.DataParallel(mesh_of({"data": 1}), batch="data"))
    actual, found_logs = fitted(
        mw.Sharded(
            mesh_of({"branch": 2, "data": 2}),
            batch="data",
            unmatched="replicate",
            pipeline=mw.Branches("branch"),
        )
    )
    assert found_logs == {name: pytest.approx(values, rel=1e-5) for name, values in logs.items()}
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
