"""Arrays that a plain JAX loss takes, with new values in return: batch statistics of Flax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.errors import ModelError

X = np.random.default_rng(0).normal(size=[3, 16, 8]).astype("float32")
STATE = {"mean": jnp.zeros([8]), "seen": jnp.zeros([], "int32")}
MESHES: dict[str, dict[str, Any]] = {
    "rows": {"axes": {"batch": 8}, "zero": 3},
    "rows and model": {"axes": {"batch": 4, "model": 2}, "layouts": {"w": [None, "model"]}},
}


def loss(params: Any, batch: Any, state: Any) -> Any:
    mean = batch.mean(0)
    new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "seen": state["seen"] + len(batch)}
    output = (batch - mean) @ params["w"] + params["b"]
    return jnp.mean((output - 1) ** 2), {"largest": output.max()}, new


def forward(params: Any, x: Any, state: Any) -> Any:
    return (x - state["mean"]) @ params["w"] + params["b"]


def program(state: Any = STATE, loss: Any = loss) -> mw.Program:
    params = {"w": jnp.ones([8, 8]), "b": jnp.zeros([8])}
    return mw.jax_program(loss, params, optax.sgd(0.1), forward=forward, state=state)


def trainer(axes: Any, layouts: Any = None, zero: int = 0, **how: Any) -> mw.Trainer:
    placement = mw.Placement.of(mw.create_mesh(axes), layouts, zero=zero)
    return mw.Trainer(program(), placement, mw.StepOptions(**how))


def by_hand(batches: Any) -> tuple[Any, Any]:
    """Parameters and state after a step for each batch, in the way of every Flax example."""
    params, state = {"w": jnp.ones([8, 8]), "b": jnp.zeros([8])}, STATE
    of_parts = jax.grad(lambda *args: (lambda made: (made[0], made[2]))(loss(*args)), has_aux=True)
    for batch in batches:
        grads, state = of_parts(params, batch, state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params, state


@pytest.mark.parametrize("mesh", MESHES)
def test_state_goes_from_step_to_step_as_in_a_loop_by_hand(mesh: str) -> None:
    ours = trainer(**MESHES[mesh])
    state, _ = ours.train(ours.init(), X)
    params, kept = by_hand(X)
    for path, value in {**params, **kept}.items():
        found = {**state.params, **state.state}[path]
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)
    outputs = np.asarray(forward(params, X[0], kept))
    np.testing.assert_allclose(ours.forward(state, X[0]), outputs, rtol=1e-5, atol=1e-5)


def test_micro_batches_take_it_in_turn() -> None:
    ours = trainer({"batch": 4, "model": 2}, {"w": [None, "model"]}, accumulate=2)
    state, _ = ours.train(ours.init(), X[:2])
    _, after_first = by_hand(X[:1])  # the parameters are not in it
    mean = 0.9 * after_first["mean"] + 0.1 * X[1].mean(0)
    np.testing.assert_allclose(state.state["mean"], mean, rtol=1e-5, atol=1e-7)
    assert state.state["seen"] == 32


def test_what_a_loss_returns_and_takes_is_checked() -> None:
    with pytest.raises(ModelError, match="has an argument named state, but jax_program got none"):
        program(state=None)
    with pytest.raises(ModelError, match="the loss has no argument named state"):
        program(loss=lambda params, batch: jnp.mean(batch))
    with pytest.raises(ModelError, match="'w' is the path of a parameter and of an array of state"):
        program(state={"w": jnp.zeros([2])})
    with pytest.raises(ModelError, match=r"received 'a' at .'x'., <class .* at .'y'.\. Leave them"):
        program(state={"x": "a", "y": type(None)})
    first = program().initial()
    for returned, words in (
        (lambda value, logs, new: (value, logs), "returns .number, logs, new_state.*2 values"),
        (lambda value, logs, new: (value, logs, {"mean": new["mean"]}), "has nothing at 'seen'"),
        (lambda value, logs, new: (value, logs, {**new, "seen": 1.0}), "float32 of shape .. at"),
    ):
        wrong = program(loss=lambda p, b, state, end=returned: end(*loss(p, b, state)))
        with pytest.raises(ModelError, match=words):
            wrong.loss(first.params, first, X[0], True)


def test_a_flax_module_trains_with_statistics_and_dropout() -> None:
    """The split of NNX's own documents; closed over instead, its counts cannot be changed."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(
        nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(8, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
    )
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def of_module(params: Any, batch: Any, state: Any) -> Any:
        whole = nnx.merge(graph, params, state)
        value = jnp.mean((whole(batch) - 1) ** 2)
        return value, {}, nnx.state(whole, nnx.Not(nnx.Param))

    found = []
    for devices in (8, 1):
        mesh = mw.create_mesh({"batch": devices}, devices=jax.devices()[:devices])
        made = mw.jax_program(of_module, params, optax.sgd(0.1), state=state)
        ours = mw.Trainer(made, mw.Placement.of(mesh))
        found.append(ours.train(ours.init(), X)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)
    with_all = mw.jax_program(lambda m, x: jnp.mean(m(x)), model, optax.sgd(0.1))
    wrong = mw.Trainer(with_all, mw.Placement.of(mesh))
    with pytest.raises(ModelError, match=r"takes the others as jax_program\(\.\.\., state="):
        wrong.train(wrong.init(), X)


def test_it_may_be_shapes_or_a_function_and_is_planned_with() -> None:
    made = program(state=lambda: STATE)
    assert [info.path for info in made.state] == ["mean", "seen"]
    assert made.initial().state["seen"] == 0
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), STATE)
    mesh = mw.Mesh({"batch": 8})
    report = mw.dry_run(
        program(shapes), X[0], strategy=mw.Placement.of(mesh), target="cpu:8", compile=False
    )
    assert report.parameter_bytes == 4 * (64 + 8)


def noisy() -> mw.Program:
    """Its optimizer and its loss keep random keys, as ``optax.add_noise`` and Flax NNX do."""

    def with_noise(params: Any, batch: Any, state: Any) -> Any:
        key, drawn = jax.random.split(state["key"])
        kept = jax.random.bernoulli(drawn, 0.5, batch.shape)
        return jnp.mean(((batch * kept) @ params["w"] - 1) ** 2), {}, {"key": key}

    optimizer = optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(0.1))
    state = {"key": jax.random.key(3)}
    return mw.jax_program(with_noise, {"w": jnp.ones([8, 8])}, optimizer, state=state)


def test_random_keys_are_saved_and_planned_as_their_numbers(tmp_path: Path) -> None:
    found = []
    for axes in ({"batch": 8}, {"batch": 1}):
        mesh = mw.create_mesh(axes, devices=jax.devices()[: axes["batch"]])
        ours = mw.Trainer(noisy(), mw.Placement.of(mesh))
        checkpoints = mw.Checkpoints(tmp_path / str(axes["batch"]))
        state, _ = ours.train(ours.init(), X, checkpoints=checkpoints)
        found.append(state)
        kept = checkpoints.restore(ours.init()).slots["0/rng_key"]
        np.testing.assert_array_equal(kept, state.slots["0/rng_key"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)
    placement = mw.Placement.of(mw.Mesh({"batch": 8}))
    mw.dry_run(noisy(), X[0], strategy=placement, target="cpu:8", compile=False)


def test_meshes_are_compared_by_it() -> None:
    case = mw.testing.Case(program(), X[0], {"w": [None, "model"]}, {"zero": 1})
    mw.testing.assert_equivalent(lambda: case, {"batch": 4, "model": 2}, steps=2)
