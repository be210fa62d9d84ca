"""Gradients of pooling by comparison are those of XLA's selection, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.jaxprs.edits import edited, equations
from meshwright.step.pooling import pooled_by_comparison


def pool(window: tuple[int, ...], strides: tuple[int, ...], padding: str = "VALID") -> Any:
    def loss(x: Any) -> Any:
        result = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)
        return (result**2).sum()

    return jax.grad(loss)


def kinds(function: Any, x: Any) -> set[str]:
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(x))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [(1, 2, 2, 1), (1, 3, 2, 1), (1, 6, 6, 1), (2, 2, 3, 4)])
def test_windows_side_by_side_are_compared_ties_included(window: Any, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 3, (4, 6, 6, 4)), dtype)
    by_xla, ours = pool(window, window), edited(pool(window, window), pooled_by_comparison)
    assert "select_and_scatter_add" not in kinds(ours, x)
    np.testing.assert_array_equal(ours(x), by_xla(x))


@pytest.mark.parametrize(
    ("strides", "padding", "size"),
    [((1, 1), "VALID", 6), ((2, 2), "SAME", 5), ((2, 2), "VALID", 7)],
)
def test_other_windows_stay_as_they_are(strides: Any, padding: str, size: int) -> None:
    x = jnp.ones((size, size))
    function = edited(pool((2, 2), strides, padding), pooled_by_comparison)
    assert "select_and_scatter_add" in kinds(function, x)
