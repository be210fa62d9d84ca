"""Layouts of arrays that exist: fetch_layout, check_layout, is_dtensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placements import U, mesh, values

import meshwright as mw
from meshwright import Layout, Mesh
from meshwright.errors import (
    ArrayError,
    LayoutError,
    TracingError,
)


def test_fetch_layout_of_what_a_computation_made():
    x = mw.relayout(values(np.float32), Layout(["a", "b"], mesh("a4b2")))
    assert mw.fetch_layout(x * 2 + 1) == Layout(["a", "b"], mesh("a4b2"))
    assert mw.fetch_layout(x.sum(1)) == Layout(["a"], mesh("a4b2"))
    alone = mw.fetch_layout(jnp.ones((2, 3)))
    assert (alone.rank, alone.bound_mesh().size) == (2, 1)


@pytest.mark.parametrize("value", [np.zeros(3), [1, 2], 3.0, None, "x"])
def test_fetch_layout_refuses_what_is_no_jax_array(value):
    with pytest.raises(ArrayError, match=f"{type(value).__name__} has no layout.*relayout"):
        mw.fetch_layout(value)


def test_fetch_layout_while_tracing():
    x = mw.relayout(values(np.float32), Layout(["a", "b"], mesh("a4b2")))
    with pytest.raises(TracingError, match=r"not known inside jit or vmap.*Ask outside"):
        jax.jit(mw.fetch_layout)(x)
    observations = []
    jax.grad(lambda t: observations.append(mw.fetch_layout(t)) or t.sum())(x)
    assert observations == [Layout(["a", "b"], mesh("a4b2"))]


def test_fetch_layout_inside_jit_knows_explicit_axes():
    explicit = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(np.zeros(8), jax.NamedSharding(explicit, jax.P("x")))
    observations = []
    jax.jit(lambda t: observations.append((mw.fetch_layout(t), mw.is_dtensor(t))))(x)
    assert observations == [(Layout(["x"], Mesh({"x": 8})), True)]


def test_check_layout_compares_axes_and_devices_and_names_both():
    on = mesh("a4b2")
    x = mw.relayout(np.zeros((8, 8)), Layout(["a", U], on))
    mw.check_layout(x, Layout(["a", U], on))
    mw.check_layout(x, Layout(["a", U], on.update(name="named")))
    mw.check_layout(x, Layout(["a", U], on.abstract()))
    for wrong in (
        Layout([U, "a"], on),
        Layout(["b", U], on),
        Layout(["a"], on),
        Layout(["a", U], mesh("a4b2 backwards")),
        Layout(["a", U], mesh("backwards")),
        Layout(["a", U], Mesh({"a": 4})),
    ):
        with pytest.raises(LayoutError) as caught:
            mw.check_layout(x, wrong)
        present = mw.fetch_layout(x)
        assert f"expected layout {wrong}; received an array with layout {present}" in str(
            caught.value
        )


def test_check_layout_does_not_tell_an_axis_of_size_one_from_unsharded():
    thin = mw.create_mesh({"x": 8, "y": 1})
    x = mw.relayout(np.zeros((8, 8)), Layout(["x", U], thin))
    mw.check_layout(x, Layout(["x", "y"], thin))
    mw.check_layout(x, Layout([("x", "y"), U], thin))


class Awkward:
    @property
    def value(self) -> Any:
        raise RuntimeError("not now")


def test_is_dtensor_answers_for_everything():
    x = mw.relayout(np.zeros(8), Layout(["x"], mesh("x8")))
    assert mw.is_dtensor(x)
    assert mw.is_dtensor(SimpleNamespace(value=x))
    assert mw.is_dtensor(mw.relayout(3, Layout([], mesh("x8"))))
    for other in (jnp.zeros(8), np.zeros(8), 3, None, "x", [x], Awkward(), x.sharding, mw):
        assert mw.is_dtensor(other) is False
    answers = []
    jax.jit(lambda t: answers.append(mw.is_dtensor(t)))(x)
    jax.grad(lambda t: answers.append(mw.is_dtensor(t)) or t.sum())(x)
    assert answers == [False, True]
