"""MATCH keeps the layout of a dim."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placements import U, assert_lies, mesh, values

import meshwright as mw
from meshwright import MATCH, Layout
from meshwright.errors import (
    DivisibilityError,
    LayoutError,
)


@pytest.mark.parametrize(
    ("source", "target", "result"),
    [
        (["a", "b"], [MATCH, U], ["a", U]),
        (["a", "b"], [U, MATCH], [U, "b"]),
        (["a", U], [MATCH, "b"], ["a", "b"]),
        ([("a", "b"), U], [MATCH, MATCH], [("a", "b"), U]),
        ([U, U], ["b", MATCH], ["b", U]),
    ],
)
def test_match_keeps_a_dim_as_it_is(source, target, result):
    expected, on = values(np.float32), mesh("a4b2")
    x = mw.relayout(expected, Layout(source, on))
    target, result = Layout(target, on), Layout(result, on)
    assert_lies(mw.relayout(x, target), result, expected)
    assert_lies(jax.jit(lambda t: mw.relayout(t, target))(x), result, expected)
    observations = []
    jax.grad(lambda t: observations.append(mw.fetch_layout(mw.relayout(t, target))) or t.sum())(x)
    assert observations == [result]


def test_match_means_unsharded_for_what_lies_on_no_mesh():
    on = mesh("a4b2")
    for zeros in (np.zeros((8, 8), np.float32), jnp.zeros((8, 8))):
        x = mw.relayout(zeros, Layout([MATCH, "b"], on))
        assert mw.fetch_layout(x) == Layout([U, "b"], on)


def test_match_keeps_the_name_of_the_axis_across_meshes():
    x = mw.relayout(values(np.float32), Layout(["a", "b"], mesh("a4b2")))
    y = mw.relayout(x, Layout([MATCH, U], mesh("cube")))
    assert_lies(y, Layout(["a", U], mesh("cube")), values(np.float32))
    with pytest.raises(LayoutError, match=r"axis 'a', which the mesh .* does not have"):
        mw.relayout(x, Layout([MATCH, U], mesh("x8")))


def test_match_that_would_use_an_axis_twice_or_does_not_divide_is_an_error():
    x = mw.relayout(np.zeros((8, 8)), Layout(["a", U], mesh("a4b2")))
    with pytest.raises(LayoutError, match="axis 'a' is used 2 times"):
        mw.relayout(x, Layout([MATCH, "a"], mesh("a4b2")))
    y = mw.relayout(np.zeros((6, 8)), Layout(["a", U], mesh("a2b4")))
    with pytest.raises(DivisibilityError, match=r"size 6\) does not divide over axis 'a'"):
        mw.relayout(y, Layout([MATCH, "b"], mesh("a4b2")))
