"""A block in halves: what is kept of it, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from meshwright.stages.halves import Halves

ROWS, WIDTH, HIDDEN = 4, 8, 16
DRAW = np.random.default_rng(0)
PARAMS = [
    jnp.asarray(DRAW.normal(size=dims), "float32") / 4
    for dims in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
]
X = jnp.asarray(DRAW.normal(size=[ROWS, WIDTH]), "float32")


def gated(params: list[Any], x: Any) -> Any:
    return jax.nn.gelu(x @ params[0]) * (x @ params[1])


def attended(params: list[Any], x: Any) -> Any:
    """Scores are larger than what comes of them."""
    keys, values = x @ params[0], x @ params[1]
    return jax.nn.softmax(jnp.repeat(keys @ keys.T, 16, 1)) @ jnp.repeat(values, 16, 0)


def named(params: list[Any], x: Any) -> Any:
    kept = checkpoint_name(jnp.tanh(x @ params[0]), "kept")
    return kept * jnp.tanh(kept @ params[0].T @ params[1])


POLICIES = jax.checkpoint_policies
ALL, DOTS = POLICIES.nothing_saveable, POLICIES.dots_saveable
NAMED = POLICIES.save_only_these_names("kept")


def halves_of(inner: Callable[[list[Any], Any], Any]) -> tuple[Halves, Callable[..., Any]]:
    def block(params: list[Any], rest: Any, x: list[Any]) -> list[Any]:
        return [x[0] + inner(params, x[0]) @ params[2]]

    return Halves(block, PARAMS, (), [X]), block


def nbytes(shapes: Any) -> int:
    return sum(math.prod(of.shape) * of.dtype.itemsize for of in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    ("inner", "policy", "less"),
    [
        (gated, ALL, True), (gated, DOTS, False), (attended, ALL, True), (attended, DOTS, False),
        (named, ALL, True), (named, NAMED, True),
    ],
)  # fmt: skip
def test_no_more_is_kept_than_the_models_own_checkpoint_does(
    inner: Any, policy: Any, less: bool
) -> None:
    plain, checkpointed = inner, jax.checkpoint(inner, policy=policy)
    kept = {}
    expected = jax.vjp(lambda p, x: halves_of(plain)[1](p, (), [x])[0], PARAMS, X)
    gradient = jnp.cos(expected[0])
    for name, function in (("plain", plain), ("checkpointed", checkpointed)):
        halves, block = halves_of(function)
        results, residuals = halves.forward(PARAMS, (), [X])
        kept[name] = nbytes(residuals)
        by_jax = jax.eval_shape(
            lambda p, x, block=block: jax.vjp(lambda p, x: block(p, (), [x])[0], p, x)[1],
            PARAMS, X,
        )  # fmt: skip
        assert kept[name] + nbytes([*PARAMS, X]) <= nbytes(by_jax)
        of_x, cut = halves.backward(PARAMS, (), [X], residuals, [gradient])
        of_params = halves.weights(PARAMS, (), [X], residuals, cut)
        np.testing.assert_allclose(results[0], expected[0], rtol=1e-5)
        for own, other in zip(
            (*of_params, *of_x), jax.tree.leaves(expected[1](gradient)), strict=True
        ):
            np.testing.assert_allclose(own, other, rtol=2e-4, atol=1e-6)
    assert (kept["checkpointed"] < kept["plain"]) == less


def test_of_what_is_dropped_out_the_mask_is_kept_and_not_what_was_drawn_for_it() -> None:
    def dropped(params: list[Any], x: Any) -> Any:
        keeps = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return jnp.tanh(jnp.where(keeps, x, 0) @ params[0])

    halves, _ = halves_of(dropped)
    kept = halves.forward(PARAMS, (), [X])[1]
    assert sorted(str(value.dtype) for value in kept) == ["bool", "float32"]
