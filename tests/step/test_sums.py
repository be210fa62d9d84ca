"""Gradients are summed in the type that is asked for, and are the more exact for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.step.gradient import summed_in

DRAW = np.random.default_rng(1)


def dense(p: Any, x: Any) -> Any:
    y = jnp.tanh(x @ p["kernel"].astype("bfloat16") + p["bias"].astype("bfloat16"))
    return jnp.mean(y.astype("float32") ** 2)


def convolution(p: Any, x: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = p["kernel"].astype("bfloat16")
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return jnp.mean(jnp.tanh(y + p["bias"].astype("bfloat16")).astype("float32") ** 2)


CASES = {
    "dense": (dense, {"kernel": (24, 16), "bias": (16,)}, (64, 24)),
    "convolution": (convolution, {"kernel": (3, 3, 4, 8), "bias": (8,)}, (16, 6, 6, 4)),
}


def drawn(case: str) -> tuple[Any, Any, Any]:
    loss, dims, x_dims = CASES[case]
    params = {name: DRAW.normal(size=size).astype("float32") for name, size in dims.items()}
    return loss, params, DRAW.normal(size=x_dims).astype(jnp.bfloat16)


def types_added(function: Any, params: Any, x: Any) -> set[str]:
    """The types that products, convolutions and sums yield on the way to the results."""
    jaxpr = jax.make_jaxpr(function)(params, x).jaxpr
    makes = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    result = set()
    for var in jaxpr.outvars:
        while makes[var].primitive.name not in (
            "dot_general",
            "conv_general_dilated",
            "reduce_sum",
        ):
            var = makes[var].invars[0]
        result.add(str(var.aval.dtype))
    return result


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_summed_in_float32(case: str) -> None:
    loss, params, x = drawn(case)
    gradient = jax.grad(loss)
    assert types_added(gradient, params, x) == {"bfloat16"}
    assert types_added(summed_in(gradient, "float32"), params, x) == {"float32"}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_they_are_nearer_to_the_truth(case: str) -> None:
    loss, params, x = drawn(case)
    narrow, wide = jax.grad(loss)(params, x), summed_in(jax.grad(loss), "float32")(params, x)
    # The truth is what one device gets from adding the gradients of single rows in float64.
    rows = [jax.grad(loss)(params, x[i : i + 1]) for i in range(len(x))]
    for name in params:
        assert wide[name].dtype == narrow[name].dtype == jnp.float32
        truth = np.mean([np.asarray(row[name], "float64") for row in rows], axis=0)
        errors = [np.abs(np.asarray(g[name]) - truth).max() for g in (wide, narrow)]
        assert errors[0] <= errors[1]


def test_what_is_not_converted_stays() -> None:
    def product(x: Any) -> Any:
        return x @ x

    x = jnp.ones([4, 4], "bfloat16")
    assert str(jax.make_jaxpr(summed_in(product, "float32"))(x)) == str(jax.make_jaxpr(product)(x))
