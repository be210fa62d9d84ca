"""relayout: values never change, and every piece lies where its layout says."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placements import DTYPES, PLACES, U, assert_lies, layout_of, mesh, place_id, values

import meshwright as mw
from meshwright import Layout, Mesh
from meshwright.errors import (
    ArrayError,
    DivisibilityError,
    LayoutError,
    TopologyError,
)


def test_the_oracle_notices_a_piece_on_the_wrong_device():
    layout, x = layout_of(("x8", ["x"])), np.arange(8.0, dtype=np.float32)
    swapped = mw.relayout(x, Layout(["x"], mesh("x8").update(devices=jax.devices()[::-1])))
    with pytest.raises(AssertionError):
        assert_lies(swapped, layout, x)


@pytest.mark.parametrize("source", PLACES, ids=place_id)
def test_relayout_from_each_place_to_each_place_keeps_every_value(source):
    expected = values(np.float32)
    x = mw.relayout(expected, layout_of(source))
    assert_lies(x, layout_of(source), expected)
    for target in PLACES:
        y = mw.relayout(x, layout_of(target))
        assert_lies(y, layout_of(target), expected)
        back = mw.relayout(y, layout_of(source))
        assert_lies(back, layout_of(source), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_relayout_keeps_values_of_every_dtype(dtype):
    expected = values(dtype)
    for source, target in zip(PLACES, PLACES[5:] + PLACES[:5], strict=True):
        x = mw.relayout(expected, layout_of(source))
        assert_lies(mw.relayout(x, layout_of(target)), layout_of(target), expected)


def test_relayout_keeps_nan_infinity_and_the_sign_of_zero():
    expected = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 1.0, 2.0], np.float32)
    x = mw.relayout(expected, Layout(["x"], mesh("x8")))
    y = mw.relayout(x, Layout([("b", "a")], mesh("a4b2")))
    assert np.asarray(y).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dims", [(), (8,), (2, 2, 2), (2, 1, 4, 1, 2), (0, 8)])
def test_relayout_takes_arrays_of_any_rank(dims):
    expected = values(np.int32, dims)
    whole = Layout.replicated(mesh("cube"), len(dims))
    assert_lies(mw.relayout(expected, whole), whole, expected)
    if dims:
        cut = Layout.batch_sharded(mesh("cube"), "b", len(dims))
        assert_lies(mw.relayout(mw.relayout(expected, whole), cut), cut, expected)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(8, dtype=np.int32),
        list(range(8)),
        range(8),
        jnp.arange(8),
        jax.device_put(np.arange(8, dtype=np.int32), jax.devices()[6]),
        SimpleNamespace(value=jnp.arange(8)),
        [jnp.asarray(i) for i in range(8)],
    ],
    ids=["numpy", "list", "range", "jax", "committed", "variable", "list of arrays"],
)
def test_relayout_accepts(value):
    layout = Layout(["x"], mesh("x8"))
    assert_lies(mw.relayout(value, layout), layout, np.arange(8, dtype=np.int32))


@pytest.mark.parametrize(("value", "dtype"), [(3, np.int32), (2.5, np.float32), (True, np.bool_)])
def test_relayout_accepts_scalars(value, dtype):
    layout = Layout([], mesh("a4b2"))
    assert_lies(mw.relayout(value, layout), layout, np.asarray(value, dtype))


def test_relayout_and_fetch_layout_accept_keras_variables():
    import keras

    variable = keras.Variable(np.arange(8.0))
    layout = Layout(["x"], mesh("x8"))
    assert mw.fetch_layout(variable).bound_mesh().is_single_device
    assert not mw.is_dtensor(variable)
    variable.assign(mw.relayout(variable, layout))
    assert_lies(mw.relayout(variable, layout), layout, np.arange(8, dtype=np.float32))


def test_relayout_keeps_random_keys():
    keys = jax.random.split(jax.random.key(3), 8)
    moved = mw.relayout(mw.relayout(keys, Layout(["x"], mesh("x8"))), Layout(["x"], mesh("middle")))
    assert mw.fetch_layout(moved) == Layout(["x"], mesh("middle"))
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


@pytest.mark.parametrize("dims", [(8,), (8, 8), (64, 64), (512, 512)])
def test_writing_to_numpy_later_does_not_change_the_array(dims):
    for specs in (["x"], [U]):
        for _ in range(5):
            host = np.zeros(dims, np.float32)
            layout = Layout(specs + [U] * (len(dims) - 1), mesh("x8"))
            x = mw.relayout(host, layout)
            packed = mw.pack([host] * 8, layout)
            identity = mw.call_with_layout(lambda t: t, layout, host)
            host[...] = 1.0
            assert not np.asarray(x).any()
            assert not np.asarray(packed).any()
            assert not np.asarray(identity).any()


def test_relayout_across_dims_of_two_axes_is_checked_inside_jit_where_jax_would_drop_it():
    layout = Layout([("a", "b")], mesh("a4b2"))
    with pytest.raises(
        DivisibilityError, match=r"size 12\) does not divide over axis 'a' \(size 4\) x axis 'b'"
    ):
        jax.jit(lambda t: mw.relayout(t, layout))(np.zeros(12, np.float32))


@pytest.mark.parametrize(
    ("value", "specs", "error", "match"),
    [
        (np.zeros((6, 2)), ["a", U], DivisibilityError, r"dim 0 of the array \(size 6\).*Pad it"),
        (np.zeros(8), ["a", U], LayoutError, r"the array has 1 dims \(8,\).*has 2: write one"),
        (np.zeros(8), ["z"], LayoutError, "axis 'z', which the mesh .* does not have"),
        (np.zeros(8), None, LayoutError, "one entry per dim.*received None"),
        ({"a": 1}, ["a"], ArrayError, "dict of dtype object cannot lie on a mesh"),
        (None, [], ArrayError, "NoneType of dtype object"),
        (["a"] * 8, ["a"], ArrayError, "list of dtype <U1"),
        ([[1], [2, 3]], ["a", U], ArrayError, "list cannot lie on a mesh.*inhomogeneous"),
        ([2**40] * 8, ["a"], ArrayError, r"1099511627776 \(int64\) do not fit int32.*enable_x64"),
        ([2**70] * 8, ["a"], ArrayError, "list of dtype object"),
    ],
)
def test_relayout_refuses(value, specs, error, match):
    with pytest.raises(error, match=match), mw.default_mesh(mesh("a4b2")):
        mw.relayout(value, specs)


def test_integers_that_fit_are_narrowed_as_jax_does():
    layout = Layout(["x"], mesh("x8"))
    values_64 = np.arange(8, dtype=np.int64) - 4
    assert_lies(mw.relayout(values_64, layout), layout, values_64.astype(np.int32))


def test_relayout_refuses_a_mesh_without_devices():
    with pytest.raises(TopologyError, match=r"the mesh .*is abstract.*create_mesh"):
        mw.relayout(np.zeros(8), Layout(["x"], Mesh({"x": 8})))


def test_relayout_like_takes_the_layout_and_not_the_dims():
    like = mw.relayout(np.zeros((4, 2), bool), Layout(["a", "b"], mesh("a4b2")))
    expected = values(np.float32)
    y = mw.relayout_like(mw.relayout(expected, Layout(["x", U], mesh("x8"))), like)
    assert_lies(y, mw.fetch_layout(like), expected)
    with pytest.raises(ArrayError, match="ndarray has no layout"):
        mw.relayout_like(y, expected)
    with pytest.raises(LayoutError, match="has 1 dims"):
        mw.relayout_like(np.zeros(8), like)


def test_copy_to_mesh_takes_a_layout_or_a_mesh():
    expected, on = values(np.int32), mesh("backwards")
    assert_lies(mw.copy_to_mesh(expected, on), Layout([U, U], on), expected)
    assert_lies(
        mw.copy_to_mesh(jnp.asarray(expected), Layout(["a", U], on)), Layout(["a", U], on), expected
    )
    inside = jax.jit(lambda t: mw.copy_to_mesh(t, mesh("x8")))(expected)
    assert_lies(inside, Layout([U, U], mesh("x8")), expected)
