"""Branches that lay their results out differently: XLA's verifier refuses them as they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import meshwright as mw

MESH = mw.create_mesh({"batch": 4, "model": 2})
ROWS, FEATURES = mw.Layout(["batch", None], MESH), mw.Layout([None, "model"], MESH)
X = np.random.default_rng(0).normal(size=[8, 8]).astype("float32")


def branched(x: Any, lay: Any = mw.relayout) -> Any:
    """The first and the last word of each branch is a layout; a switch lies within a branch."""

    def inner(x: Any) -> Any:
        ways = [lambda x: lay(jnp.sin(x), FEATURES), lambda x: lay(x, ROWS)]
        return jax.lax.switch((x.sum() > 0).astype(int), ways, lay(x, FEATURES))

    return jax.lax.cond(x[0, 0] > 0, lambda x: lay(jnp.cos(lay(x, ROWS)), ROWS), inner, x)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_takes_branches_of_different_layouts(sign: float) -> None:
    def step(lay: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            return jnp.mean(branched(batch @ params["w"], lay) ** 2)

        return mw.jax_program(loss, {"w": sign * np.eye(8, dtype="float32")}, optax.sgd(0.1))

    trainer = mw.Trainer(step(mw.relayout), mw.Placement.of(MESH, {"w": [None, "model"]}))
    state, logs = trainer.train(trainer.init(), [X] * 2)
    plain = mw.Trainer(step(lambda x, layout: x), mw.Placement.of(MESH, {"w": [None, "model"]}))
    expected, plain_logs = plain.train(plain.init(), [X] * 2)
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logs["loss"], plain_logs["loss"], rtol=1e-5)


class Branched(layers.Layer):
    def call(self, x: Any) -> Any:
        return branched(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def test_fit_and_evaluate_take_them() -> None:
    strategy = mw.Sharded(MESH, {"kernel": [None, "model"]}, unmatched="replicate")
    with strategy.scope():
        model = keras.Sequential([keras.Input([8]), layers.Dense(8), Branched()])
        model.compile("sgd", "mse")
    strategy.fit(model, X, X, batch_size=8, verbose=0)
    assert np.isfinite(strategy.evaluate(model, X, X, batch_size=8, verbose=0))
