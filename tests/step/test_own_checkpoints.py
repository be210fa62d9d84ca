"""What a model checkpoints itself stays so under ZeRO, which checkpoints what it gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.jaxprs.edits import edited
from meshwright.step.own_checkpoints import with_own_checkpoints

LAYERS, WIDTH, ROWS = 4, 32, 64
KEEPS_ALL = jax.checkpoint_policies.everything_saveable


def layer(weights: Any, x: Any) -> Any:
    return x + jnp.tanh(jnp.tanh(x @ weights[:WIDTH]) @ weights[WIDTH:])


def one_by_one(weights: Any, x: Any) -> Any:
    for one in weights:
        x = jax.checkpoint(layer)(one, x)
    return jnp.sum(x**2)


def in_a_loop(weights: Any, x: Any) -> Any:
    body = jax.checkpoint(lambda x, one: (layer(one, x), None))
    return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)


def by_a_policy(weights: Any, x: Any) -> Any:
    policy = jax.checkpoint_policies.dots_saveable
    for one in weights:
        x = jax.checkpoint(layer, policy=policy)(one, x)
    return jnp.sum(x**2)


def kept_bytes(net: Callable[[Any, Any], Any], weights: Any, x: Any) -> int:
    _, pull = jax.vjp(net, weights, x)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pull))


@pytest.mark.parametrize("net", [one_by_one, in_a_loop, by_a_policy])
def test_a_policy_around_them_does_not_reach_into_checkpoints(net: Any) -> None:
    draw = np.random.default_rng(0)
    weights = jnp.asarray(draw.normal(size=[LAYERS, 2 * WIDTH, WIDTH]) / 4, "float32")
    x = jnp.asarray(draw.normal(size=[ROWS, WIDTH]), "float32")
    around = jax.checkpoint(net, policy=KEEPS_ALL)
    result = jax.checkpoint(edited(net, with_own_checkpoints), policy=KEEPS_ALL)
    own = kept_bytes(net, weights, x)
    assert kept_bytes(around, weights, x) >= own + LAYERS * x.nbytes  # or this were not needed
    assert kept_bytes(result, weights, x) <= own + weights.nbytes + x.nbytes
    for one, other in zip(jax.grad(result)(weights, x), jax.grad(net)(weights, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_level_3_does_not_keep_what_a_loop_computes_again() -> None:
    """If it kept all activations, the peak would be 2.8 times that of level 0."""

    def loss(params: Any, x: Any) -> Any:
        return in_a_loop(params["layers"], x)

    weights = jax.ShapeDtypeStruct((LAYERS, 2 * WIDTH, WIDTH), "float32")
    program = mw.jax_program(loss, {"layers": weights}, optax.adam(0.1))
    batch = jax.ShapeDtypeStruct((8 * 4096, WIDTH), "float32")
    peaks = [
        mw.dry_run(
            program,
            batch,
            strategy=mw.Sharded(mw.Mesh({"data": 8}), {}, batch="data", zero=zero),
            target="cpu:8",
        ).peak_bytes
        for zero in (0, 3)
    ]
    assert peaks[1] < 1.5 * peaks[0]
