"""Products are computed the way round in which they are wanted; the numbers are the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.step.gradient import in_order


def normal(*dims: int) -> np.ndarray:
    return np.random.default_rng(sum(dims)).normal(size=dims).astype("float32")


def names(function: Any, *args: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jax.make_jaxpr(function)(*args).eqns]


def batched(x: Any, y: Any) -> Any:
    return jnp.swapaxes(jnp.matmul(x, y), 1, 2)


CASES = {
    "a kernel's gradient": (
        jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))),
        (normal(5, 3), normal(4, 5)),
    ),
    "of rows in two dims": (
        jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))),
        (normal(5, 3), normal(2, 4, 5)),
    ),
    "batched": (batched, (normal(2, 3, 4), normal(2, 4, 5))),
}


@pytest.mark.full_for("of rows in two dims")
@pytest.mark.parametrize("case", CASES)
def test_no_transposition_is_left_and_the_values_are_the_same(case: str) -> None:
    function, args = CASES[case]
    assert "transpose" in names(function, *args)
    assert "transpose" not in names(in_order(function), *args)
    np.testing.assert_allclose(in_order(function)(*args), function(*args), rtol=1e-5, atol=1e-6)


def test_other_transpositions_stay() -> None:
    def shared(x: Any, y: Any) -> Any:  # the product is used itself as well
        product = x @ y
        return product, product.T

    def other(x: Any, y: Any) -> Any:  # no product of the swapped operands lies so
        return jnp.transpose(jnp.einsum("bij,bjk->bik", x, y), (1, 0, 2))

    for function, args in (
        (shared, (normal(2, 3), normal(3, 4))),
        (other, (normal(2, 3, 4), normal(2, 4, 5))),
    ):
        assert "transpose" in names(in_order(function), *args)
        for ordered, plain in zip(in_order(function)(*args), function(*args), strict=True):
            np.testing.assert_allclose(ordered, plain, rtol=1e-5, atol=1e-6)


def test_a_step_on_split_rows_sums_gradients_as_they_are_used() -> None:
    mesh = mw.create_mesh({"batch": 8})
    rows = mw.Layout.batch_sharded(mesh, "batch", rank=2).sharding
    whole = mw.Layout.replicated(mesh, rank=2).sharding

    def compiled(wrap: Any) -> str:
        gradient = wrap(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))))
        shapes = (
            jax.ShapeDtypeStruct((24, 16), "float32", sharding=whole),
            jax.ShapeDtypeStruct((64, 24), "float32", sharding=rows),
        )
        return jax.jit(gradient, out_shardings=whole).lower(*shapes).compile().as_text()

    assert "f32[16,24]{1,0} all-reduce" in compiled(lambda f: f)
    assert "f32[24,16]{1,0} all-reduce" in compiled(in_order)
