"""Complex values where parts of a step are computed again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw

_DRAW = np.random.default_rng(0)
ROWS = _DRAW.normal(size=[8, 8]).astype("float32")
PARAMS = {
    name: _DRAW.normal(size=[8, 8]).astype("float32") / 8 for name in ("phase", "real", "tied")
}


def waves(params: Any, rows: Any) -> Any:
    """Products, a transform and phases of complex values; one weight is read twice."""
    turned = jnp.fft.fft(rows @ params["tied"]) * jnp.exp(1j * params["phase"][0])
    mixed = turned @ (params["real"] + 1j * params["phase"])
    back = jnp.tanh(mixed) @ params["tied"].T.astype(mixed.dtype)
    return jnp.mean(jnp.abs(back * mixed.conj()))


@pytest.mark.parametrize("remat", ["selective", "dots_saveable", "everything_saveable"])
def test_policies_of_what_is_kept_take_complex_values(remat: str) -> None:
    program = mw.jax_program(waves, PARAMS, optax.sgd(1.0))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}), zero=3)
    trainer = mw.Trainer(program, placement, mw.StepOptions(remat=remat))
    state, logs = trainer.step(trainer.init(), trainer.put(ROWS))
    expected, gradients = jax.value_and_grad(waves)(PARAMS, ROWS)
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(state.params[name], PARAMS[name] - gradient, atol=1e-4)


def test_a_loop_at_level_3_of_zero_takes_complex_values() -> None:
    def layers(params: Any, rows: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            return jnp.tanh(x @ (weights + 1j * weights)) + x, None

        x, _ = jax.lax.scan(layer, rows.astype("complex64"), params["layers"])
        return jnp.mean(jnp.abs(x) ** 2)

    params = {"layers": _DRAW.normal(size=[3, 8, 8]).astype("float32") / 4}
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}), zero=3)
    options = mw.StepOptions(remat="everything_saveable")
    trainer = mw.Trainer(mw.jax_program(layers, params, optax.sgd(1.0)), placement, options)
    state, _ = trainer.step(trainer.init(), trainer.put(ROWS))
    gradient = jax.grad(layers)(params, ROWS)["layers"]
    np.testing.assert_allclose(state.params["layers"], params["layers"] - gradient, atol=1e-5)
