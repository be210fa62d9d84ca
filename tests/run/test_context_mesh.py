"""Programs that have set a mesh of their own by ``jax.set_mesh`` use Meshwright as others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import meshwright as mw

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 4)).astype("float32")


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["last"] - y) ** 2)


def program() -> mw.Program:
    weights = {"first": X.T.copy(), "last": Y.copy()}
    return mw.jax_program(loss, lambda: jax.tree.map(jnp.asarray, weights), optax.sgd(0.1))


def strategy() -> mw.Sharded:
    mesh = mw.create_mesh({"data": 4, "model": 2})
    return mw.Sharded(mesh, {"kernel": [None, "model"]}, batch="data")


def train() -> Any:
    mesh = mw.create_mesh({"data": 4, "model": 2})
    placement = mw.Placement.of(mesh, {"first": [None, "model"]}, batch="data")
    trainer = mw.Trainer(program(), placement)
    state, _ = trainer.train(trainer.init(), [trainer.put((X, Y))] * 2)
    return [np.asarray(value) for value in state.params.values()]


def fit() -> Any:
    keras.utils.set_random_seed(1)
    here = strategy()
    with here.scope():
        model = keras.Sequential([keras.Input([8]), layers.Dense(16, "tanh"), layers.Dense(4)])
        model.compile("adam", "mse")
    history = here.fit(model, X, Y, batch_size=8, epochs=2, verbose=0)
    return history.history["loss"], here.predict(model, X, verbose=0)


def plan() -> Any:
    return str(mw.plan(program(), (X, Y), target="v5e:2x2").layouts)


@pytest.mark.parametrize("act", [train, fit, plan])
@pytest.mark.parametrize("sizes", [(4, 2), (8,)])
def test_nothing_changes_where_jax_has_an_explicit_mesh(
    act: Callable[[], Any], sizes: tuple[int, ...]
) -> None:
    """Steps could not be traced: JAX refuses arrays on another mesh than that of the context."""
    expected = act()
    with jax.set_mesh(jax.make_mesh(sizes, ("data", "model")[: len(sizes)])):
        actual = act()
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_mesh_of_another_size_is_refused_in_words_of_ours() -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(mw.MeshError, match=r"has set a mesh of 4 devices"):
        train()
