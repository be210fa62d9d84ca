"""call_with_layout computes results in their layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from placements import PLACES, U, assert_lies, layout_of, mesh, values

import meshwright as mw
from meshwright import MATCH, Layout
from meshwright.errors import (
    ArrayError,
    DivisibilityError,
    LayoutError,
    TracingError,
)


def test_call_with_layout_makes_the_result_in_its_layout():
    layout = Layout(["a", "b"], mesh("a4b2"))
    assert_lies(mw.call_with_layout(jnp.ones, layout, (8, 4)), layout, np.ones((8, 4), np.float32))
    named = mw.call_with_layout(jnp.full, layout, shape=(8, 4), fill_value=3, dtype=jnp.bfloat16)
    assert_lies(named, layout, np.full((8, 4), 3, ml_dtypes.bfloat16))


def test_call_with_layout_draws_the_same_numbers_as_a_plain_call():
    key = jax.random.key(5)
    plain = np.asarray(jax.random.normal(key, (16, 8)))
    for place in (PLACES[3], PLACES[10], PLACES[12]):
        normal = mw.call_with_layout(jax.random.normal, layout_of(place), key, (16, 8))
        assert_lies(normal, layout_of(place), plain)


def test_call_with_layout_holds_no_whole_result_on_any_device():
    layout = Layout(["x", U], mesh("x8"))
    ones = jax.jit(lambda: mw.call_with_layout(jnp.ones, layout, (64, 32)))
    text = ones.lower().compile().as_text() or ""
    assert "f32[8,32]" in text
    assert "f32[64,32]" not in text


def test_call_with_layout_takes_trees_of_results_and_reports_every_misfit():
    layout = Layout(["x"], mesh("x8"))
    tree = mw.call_with_layout(
        lambda n: {"w": jnp.ones(n), "b": (jnp.zeros(2 * n), None)}, layout, 8
    )
    assert_lies(tree["w"], layout, np.ones(8, np.float32))
    assert_lies(tree["b"][0], layout, np.zeros(16, np.float32))
    with pytest.raises(LayoutError) as caught:
        mw.call_with_layout(lambda: {"w": jnp.ones(7), "b": [jnp.ones((8, 1))]}, layout)
    assert "dim 0 of result['w'] (size 7) does not divide" in str(caught.value)
    assert "result['b'][0] has 2 dims (8, 1)" in str(caught.value)


def test_call_with_layout_inside_jit_and_grad():
    layout, x = Layout([U, "x"], mesh("x8")), values(np.float32)
    inside = jax.jit(lambda t: mw.call_with_layout(jnp.square, layout, t))(x)
    assert_lies(inside, layout, x**2)

    def squared(t: jax.Array) -> jax.Array:
        return mw.call_with_layout(jnp.square, layout, t).sum()

    np.testing.assert_array_equal(jax.grad(squared)(jnp.asarray(x)), 2 * x)
    np.testing.assert_array_equal(jax.jit(jax.grad(squared))(x), 2 * x)
    with pytest.raises(DivisibilityError, match=r"dim 1 of result \(size 3\)"):
        jax.jit(lambda: mw.call_with_layout(jnp.ones, layout, (8, 3)))()


def test_call_with_layout_sees_changes_of_what_its_function_closes_over():
    layout, box = Layout(["x"], mesh("x8")), [1.0]

    def filled() -> jax.Array:
        return jnp.full(8, box[0])

    mw.call_with_layout(filled, layout)
    box[0] = 2.0
    np.testing.assert_array_equal(mw.call_with_layout(filled, layout), np.full(8, 2.0))


def test_call_with_layout_brings_arguments_on_one_device_and_refuses_those_on_another_mesh():
    layout, x = Layout(["x", U], mesh("middle")), values(np.float32)
    one = jax.device_put(x, jax.devices()[0])
    assert_lies(mw.call_with_layout(jnp.negative, layout, one), layout, -x)
    other = mw.relayout(x, Layout(["x", U], mesh("x8")))
    with pytest.raises(ArrayError, match=r"argument with dims \(8, 16\) lies as .*relayout it"):
        mw.call_with_layout(jnp.negative, layout, other)


def test_call_with_layout_of_none_is_a_plain_call():
    assert mw.call_with_layout(lambda a, b: (a, b), None, 1, b="text") == (1, "text")


@pytest.mark.parametrize("fn", [lambda t: np.asarray(t), lambda t: t if t.sum() else -t])
def test_call_with_layout_says_when_a_function_cannot_be_traced(fn):
    with pytest.raises(TracingError, match="call_with_layout traces '<lambda>', which asks for"):
        mw.call_with_layout(fn, Layout(["x"], mesh("x8")), jnp.ones(8))


def test_call_with_layout_cannot_match():
    with pytest.raises(LayoutError, match="holds MATCH"):
        mw.call_with_layout(jnp.ones, Layout([MATCH], mesh("x8")), 8)
