"""Blocks that are computed again where loops hand on several arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

ROWS = np.random.default_rng(0).normal(size=[8, 3, 4]).astype("float32")


def recurrent(params: Any, rows: Any) -> Any:
    """A loop over time that hands on two arrays of one shape, as an LSTM does."""

    def turn(carried: Any, x: Any) -> Any:
        cell, hidden = carried
        cell = cell / 2 + jnp.tanh(x @ params["x"] + hidden @ params["hidden"])
        return (cell, jnp.tanh(cell) + x), hidden

    zeros = jnp.zeros_like(rows[:, 0])
    _, hidden = jax.lax.scan(turn, (zeros, zeros), rows.swapaxes(0, 1))
    return jnp.mean(hidden**2)


def test_a_loop_that_hands_on_several_arrays_of_one_shape_keeps_them_apart() -> None:
    params = {name: jnp.eye(4) / 2 for name in ("x", "hidden")}
    program = mw.jax_program(recurrent, params, optax.sgd(1.0))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    trainer = mw.Trainer(program, placement, mw.StepOptions(remat="block"))
    state, logs = trainer.step(trainer.init(), trainer.put(ROWS))
    expected, gradients = jax.value_and_grad(recurrent)(params, ROWS)
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(state.params[name], params[name] - gradient, atol=1e-6)
