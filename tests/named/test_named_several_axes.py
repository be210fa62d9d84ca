"""Rules that lay one dim along several axes: the values are those without rules."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import meshwright as mw
import meshwright.named as mn

MESH = {"rows": 2, "cols": 2, "planes": 2}


def array(dims, seed):
    sizes = [dim.size for dim in mn.as_dims(dims)]
    return mn.named(jax.random.normal(jax.random.key(seed), sizes), dims)


def feed_forward(x, w):
    hidden = mn.relu(mn.einsum([x, w]))
    return mn.reduce_mean(mn.square(mn.einsum([hidden, w], x.dims) - x))


def mapped(x, w):
    return mn.reduce_mean(mn.vmap(lambda row: mn.einsum([row, w]), "batch")(x))


def normalized(x, w):
    return mn.reduce_sum(mn.softmax(mn.einsum([x, w]), over="hidden") * x)


CASES = {
    "feed forward": (feed_forward, "batch:16 io:8", "io:8 hidden:32"),
    "softmax": (normalized, "batch:16 io:8", "io:8 hidden:32"),
    "vmap": (mapped, "batch:16 io:8", "io:8 hidden:32"),
}
RULES = (
    {"batch": ("rows", "cols")},
    {"hidden": ("rows", "cols", "planes")},
    "batch:rows+planes;hidden:cols",
    {"batch": ("planes",), "hidden": ("cols", "rows")},
)


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_do_not_depend_on_rules_of_several_axes(name, rules):
    function, *dims = CASES[name]
    operands = [array(text, seed) for seed, text in enumerate(dims)]
    both = mn.value_and_grad(function)
    expected, slope = both(*operands)
    mesh = mw.create_mesh(MESH)
    with mn.rules(rules, mesh, strict=False):
        laid = [mn.named(operand.array, operand.dims) for operand in operands]
        actual, slopes = jax.jit(both)(*laid)
    np.testing.assert_allclose(actual.array, expected.array, rtol=1e-5)
    np.testing.assert_allclose(slopes.array, slope.array, rtol=1e-4, atol=1e-6)
    layout = mn.layout_of(dims[0], rules, mesh)
    assert laid[0].array.sharding.is_equivalent_to(layout.sharding, 2)


def test_a_convolution_takes_a_batch_along_several_axes_and_windows_along_one():
    x, kernel = array("batch:8 t:16 io:4", 0), array("taps:3 io:4 out:8", 1)

    def convolved():
        return mn.conv1d(x, kernel, "t:taps")

    expected, mesh = convolved(), mw.create_mesh(MESH)
    with mn.rules("batch:rows+cols;out:planes", mesh):
        actual = convolved()
    np.testing.assert_allclose(actual.array, expected.array, rtol=1e-4, atol=1e-5)
    with (
        mn.rules("t:rows+cols", mesh, strict=False),
        pytest.raises(mw.LayoutError, match=r"dim 't' lies along 2 axes \(rows\+cols\)"),
    ):
        convolved()


RENAMED = {
    "a sum that is scattered": ("batch:8 io:8", "rows:cols;io:cols", {"batch": "rows"}),
    "rows that are gathered": ("rows:8 io:8", "rows:cols;hidden:cols", {"rows": "batch"}),
}


@pytest.mark.parametrize("name", RENAMED)
def test_sums_of_bfloat16_on_a_mesh_with_a_further_axis(name):
    """XLA's CPU compiler ends the process at such sums, in gradients too."""
    dims, rules, names = RENAMED[name]
    operands = [mn.cast(array(text, 0), "bfloat16") for text in (dims, "io:8 hidden:8")]

    def loss(x, w):
        return mn.reduce_sum(mn.cast(mn.einsum([x, w], rename=names), "float32") ** 2)

    slopes = mn.grad(loss, argnums=(0, 1))
    expected = slopes(*operands)
    with mn.rules(rules, mw.create_mesh(MESH), strict=False):
        actual = jax.jit(slopes)(*operands)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x.array, "float32") for x in (one, other)), 0.02, 0.1
        )
