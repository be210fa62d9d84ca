"""Initial kernels are drawn along one dim, which compiles faster: the same numbers."""

from __future__ import annotations

import jax
import numpy as np

from meshwright.frontends.keras.pending import _drawn_flat
from meshwright.jaxprs.edits import edited, equations


def test_bits_along_one_dim_are_the_same_bits() -> None:
    def draw() -> tuple[jax.Array, jax.Array]:
        key = jax.random.key(5)
        return jax.random.uniform(key, (3, 2, 4)), jax.random.truncated_normal(key, -2, 2, [4, 3])

    flat = edited(draw, _drawn_flat)
    eqns = equations(jax.make_jaxpr(flat)())
    shapes = [e.params["shape"] for e in eqns if e.primitive.name == "random_bits"]
    assert shapes == [(24,), (4, 3)]
    for actual, expected in zip(jax.jit(flat)(), draw(), strict=True):
        np.testing.assert_array_equal(actual, expected)
