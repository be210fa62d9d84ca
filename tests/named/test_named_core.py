"""The core of the language: dims, and the named array among JAX's functions."""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from named_arrays import counting

import meshwright as mw
import meshwright.named as mn

# Dims


def test_dims_from_texts_values_and_pairs():
    expected = (mn.Dim("batch", 64), mn.Dim("io", 16))
    for between in (" ", ";", ", ", ".", "\n", " ;, "):
        assert mn.as_dims(f" batch:64{between}io:16{between}") == expected
    assert mn.as_dims([("batch", 64), mn.Dim("io", 16)]) == expected
    assert mn.as_dims(expected[0]) == expected[:1]
    assert mn.as_dims("") == mn.as_dims([]) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x;4", "'x' in 'x;4' is not of the form 'batch:64'"),
        ("x", "'x' in 'x' is not of the form 'batch:64'"),
        ("x:4:5", "'x:4:5' in 'x:4:5' is not of the form 'batch:64'"),
        (":4", "':4' in ':4' is not of the form 'batch:64'"),
        ("x:foo", "size 'foo' in 'x:foo' is not a whole number"),
        ("x:-4", "size '-4' in 'x:-4' is not a whole number"),
        ("x:4 y:2 x:4", "dim 'x' appears twice in [x:4 y:2 x:4]"),
        ("x:4 x:5", "dim 'x' appears twice in [x:4 x:5]"),
        ("4:x", "size 'x' in '4:x' is not a whole number"),
        ("4:4", "a dim name must be a word such as 'batch'; received '4'"),
    ],
)
def test_a_text_that_names_no_dims_is_refused(text, says):
    with pytest.raises(mw.DimError, match=re.escape(says)):
        mn.as_dims(text)


@pytest.mark.parametrize("dims", [5, [("a", 1, 2)], ["a"], [None]])
def test_what_is_no_text_of_dims_is_refused(dims):
    with pytest.raises(mw.DimError):
        mn.as_dims(dims)


@pytest.mark.parametrize("size", [-1, 2.0, True, "4", None])
def test_a_size_is_a_whole_number(size):
    with pytest.raises(mw.DimError, match="the size of dim 'x' must be a whole number"):
        mn.Dim("x", size)
    with pytest.raises(mw.DimError, match="a dim name must be a word"):
        mn.Dim(size, 4)


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
BETWEEN = st.text(" \t\n,.;", min_size=1, max_size=3)


@pytest.mark.full
@hypothesis.given(st.dictionaries(NAMES, st.integers(0, 10**9)), st.data())
def test_texts_of_dims_round_trip(sizes, data):
    dims = tuple(mn.Dim(name, size) for name, size in sizes.items())
    text = "".join(f"{dim}{data.draw(BETWEEN)}" for dim in dims)
    assert mn.as_dims(text) == dims
    assert mn.as_dims(" ".join(map(str, dims))) == dims


# The named array among JAX's functions


def test_a_named_array_says_what_it_is():
    x = mn.named(counting(2, 3), "a:2 b:3")
    assert (x.shape, x.size, x.dtype) == ({"a": 2, "b": 3}, 6, jnp.float32)
    assert (x.dim("b"), x.dim(mn.Dim("a", 2))) == (mn.Dim("b", 3), mn.Dim("a", 2))
    assert repr(x).startswith("NamedArray([a:2 b:3], float32)\n")
    np.testing.assert_array_equal(np.asarray(x), counting(2, 3))
    assert np.asarray(x, "int32").dtype == np.int32
    with pytest.raises(mw.DimError, match=r"there is no dim 'c' in \[a:2 b:3\]"):
        x.dim("c")
    with pytest.raises(mw.DimError, match=r"dim 'a' has size 2 in \[a:2 b:3\], not 5"):
        x.dim(mn.Dim("a", 5))
    with pytest.raises(mw.ArrayError, match=r"shape \(2, 3\), which is not \[a:2\]"):
        mn.named(x, "a:2")
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


def test_numbers_and_truth_values():
    scalar = mn.named(2.5, "")
    assert (float(scalar), int(scalar), bool(scalar), bool(scalar < 2)) == (2.5, 2, True, False)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(mn.named(counting(2), "a:2") > 1)
    with pytest.raises(TypeError):
        float(mn.named(counting(2), "a:2"))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x: x if x > 1 else -x)(scalar)


def test_jit_and_trees():
    x = mn.named(counting(2, 3), "a:2 b:3")
    same = jax.jit(lambda tree: tree)({"x": x})["x"]
    assert same.dims == x.dims
    np.testing.assert_array_equal(same, x)
    [(path, leaf)] = jax.tree.leaves_with_path({"x": x})
    assert (jax.tree_util.keystr(path), leaf is x.array) == ("['x'].array", True)
    assert jax.tree.map(lambda a: a * 2, x).array[0, 1] == 4
    assert jax.tree.structure(x) == jax.tree.structure(mn.named(counting(2, 3), "a:2 b:3"))
    assert jax.tree.structure(x) != jax.tree.structure(mn.named(counting(2, 3), "b:2 a:3"))
    abstract = jax.eval_shape(mn.exp, x)
    assert (abstract.dims, abstract.array.shape) == (x.dims, (2, 3))


def test_grad_value_and_grad_and_checkpoint():
    x, w = mn.named(counting(2, 3), "a:2 b:3"), mn.named(counting(3), "b:3")
    loss = lambda w: mn.reduce_sum(mn.square(x * w)).array  # noqa: E731
    expected = 2 * np.sum(np.asarray(x) ** 2, 0) * np.asarray(w)
    for function in (loss, jax.checkpoint(loss), jax.jit(loss)):
        gradient = jax.grad(function)(w)
        assert gradient.dims == w.dims
        np.testing.assert_allclose(gradient, expected)
        value, gradient = jax.value_and_grad(function)(w)
        np.testing.assert_allclose(value, np.sum((np.asarray(x) * np.asarray(w)) ** 2))
        np.testing.assert_allclose(gradient, expected)


def test_vmap_and_scan_of_jax_take_the_leading_dim():
    x, w = mn.named(counting(2, 3), "a:2 b:3"), mn.named(counting(3), "b:3")
    observations = []

    def product(x: mn.NamedArray) -> Any:
        observations.append(x.dims)
        return mn.einsum([x, w], "").array

    np.testing.assert_allclose(jax.vmap(product)(x), np.asarray(x) @ np.asarray(w))
    _, result = jax.lax.scan(lambda carry, x: (carry, product(x)), None, x)
    np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(w))
    assert set(observations) == {mn.as_dims("b:3")}


def test_names_that_do_not_fit_any_more_are_found_out():
    x = mn.named(counting(2, 3), "a:2 b:3")
    out = jax.vmap(lambda x: x * 2)(x)  # it knows no name for what it mapped over
    with pytest.raises(mw.DimError, match=r"has shape \(2, 3\) and is named \[b:3\]"):
        _ = out.dims
    assert mn.named(out, "a:2 b:3").dims == x.dims
    with pytest.raises(mw.DimError, match=r"has shape \(1, 3\) and is named \[a:2 b:3\]"):
        mn.exp(jax.tree.map(lambda a: a[:1], x))
    with pytest.raises(mw.DimError, match=r"has shape \(2,\) and is named \[a:2 b:3\]"):
        jax.vmap(mn.exp, in_axes=1)(x)
