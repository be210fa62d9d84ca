"""Laws of the operations on arrays: values never change, and every piece lies where it is told."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright import MATCH, UNSHARDED, Layout, Mesh
from meshwright.errors import (
    ArrayError,
    DivisibilityError,
    LayoutError,
    MeshError,
    TopologyError,
    TracingError,
)

U = UNSHARDED


@functools.cache
def mesh(name: str) -> Mesh:
    return {
        "x8": lambda: mw.create_mesh({"x": 8}),
        "a4b2": lambda: mw.create_mesh({"a": 4, "b": 2}),
        "a2b4": lambda: mw.create_mesh({"a": 2, "b": 4}),
        "cube": lambda: mw.create_mesh({"a": 2, "b": 2, "c": 2}),
        "middle": lambda: mw.create_mesh({"x": 2}, devices=["cpu:3", "cpu:5"]),
        "backwards": lambda: mw.create_mesh(
            {"a": 2, "b": 2}, devices=["cpu:7", "cpu:6", "cpu:1", "cpu:0"]
        ),
        "a4b2 backwards": lambda: mw.create_mesh(
            {"a": 4, "b": 2}, devices=[f"cpu:{i}" for i in reversed(range(8))]
        ),
        "one": lambda: mw.create_mesh({"x": 1}, devices=["cpu:4"]),
    }[name]()


PLACES = [
    ("x8", ["x", U]),
    ("x8", [U, "x"]),
    ("x8", [U, U]),
    ("a4b2", ["a", "b"]),
    ("a4b2", ["b", "a"]),
    ("a4b2", [("a", "b"), U]),
    ("a4b2", [U, ("b", "a")]),
    ("a2b4", ["a", "b"]),
    ("cube", [("c", "a"), "b"]),
    ("cube", [U, "c"]),
    ("middle", ["x", U]),
    ("middle", [U, U]),
    ("backwards", ["a", "b"]),
    ("backwards", [U, "b"]),
    ("a4b2 backwards", ["a", "b"]),
    ("one", ["x", U]),
]
DTYPES = [
    np.bool_,
    np.int8,
    np.uint8,
    np.int16,
    np.int32,
    np.uint32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    np.float32,
    np.complex64,
]


def place_id(place: Any) -> str:
    name, specs = place
    return f"{name}:{','.join(s if isinstance(s, str) else '+'.join(s) for s in specs)}"


def layout_of(place: Any) -> Layout:
    name, specs = place
    return Layout(specs, mesh(name))


def values(dtype: Any, dims: tuple[int, ...] = (8, 16)) -> np.ndarray:
    rng = np.random.default_rng(7)
    x = rng.integers(0, 100, dims)
    return (x + 1j * x[::-1]).astype(dtype) if dtype is np.complex64 else (x % 60).astype(dtype)


def assert_lies(x: jax.Array, layout: Layout, expected: np.ndarray) -> None:
    """The oracle: the pieces on the devices are the slices of the NumPy array, one by one."""
    assert mw.fetch_layout(x) == layout
    assert x.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(x), expected)
    held = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    local = layout.local_dims(expected.shape)
    starts = layout.offsets(expected.shape)
    assert set(held) == set(layout.bound_mesh().bound_devices())
    for device, start in zip(layout.bound_mesh().bound_devices(), starts, strict=True):
        piece = expected[tuple(slice(s, s + n) for s, n in zip(start, local, strict=True))]
        np.testing.assert_array_equal(held[device], piece)


def test_the_oracle_notices_a_piece_on_the_wrong_device():
    layout, x = layout_of(("x8", ["x"])), np.arange(8.0, dtype=np.float32)
    swapped = mw.relayout(x, Layout(["x"], mesh("x8").update(devices=jax.devices()[::-1])))
    with pytest.raises(AssertionError):
        assert_lies(swapped, layout, x)


# relayout


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
    "given",
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
def test_relayout_accepts(given):
    layout = Layout(["x"], mesh("x8"))
    assert_lies(mw.relayout(given, layout), layout, np.arange(8, dtype=np.int32))


@pytest.mark.parametrize(("given", "dtype"), [(3, np.int32), (2.5, np.float32), (True, np.bool_)])
def test_relayout_accepts_scalars(given, dtype):
    layout = Layout([], mesh("a4b2"))
    assert_lies(mw.relayout(given, layout), layout, np.asarray(given, dtype))


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
            given = np.zeros(dims, np.float32)
            layout = Layout(specs + [U] * (len(dims) - 1), mesh("x8"))
            x = mw.relayout(given, layout)
            packed = mw.pack([given] * 8, layout)
            made = mw.call_with_layout(lambda t: t, layout, given)
            given[...] = 1.0
            assert not np.asarray(x).any()
            assert not np.asarray(packed).any()
            assert not np.asarray(made).any()


def test_relayout_across_dims_of_two_axes_is_checked_inside_jit_where_jax_would_drop_it():
    layout = Layout([("a", "b")], mesh("a4b2"))
    with pytest.raises(
        DivisibilityError, match=r"size 12\) does not divide over axis 'a' \(size 4\) x axis 'b'"
    ):
        jax.jit(lambda t: mw.relayout(t, layout))(np.zeros(12, np.float32))


@pytest.mark.parametrize(
    ("given", "specs", "error", "match"),
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
def test_relayout_refuses(given, specs, error, match):
    with pytest.raises(error, match=match), mw.default_mesh(mesh("a4b2")):
        mw.relayout(given, specs)


def test_integers_that_fit_are_narrowed_as_jax_does():
    layout = Layout(["x"], mesh("x8"))
    given = np.arange(8, dtype=np.int64) - 4
    assert_lies(mw.relayout(given, layout), layout, given.astype(np.int32))


def test_relayout_refuses_a_mesh_without_devices():
    with pytest.raises(TopologyError, match=r"the mesh .*is abstract.*create_mesh"):
        mw.relayout(np.zeros(8), Layout(["x"], Mesh({"x": 8})))


# relayout while tracing


@pytest.mark.parametrize("source", PLACES[3:7], ids=place_id)
@pytest.mark.parametrize("target", PLACES[3:7], ids=place_id)
def test_relayout_inside_jit_lays_the_result_out(source, target):
    expected = values(np.float32)
    x = mw.relayout(expected, layout_of(source))
    assert_lies(
        jax.jit(lambda t: mw.relayout(t, layout_of(target)))(x), layout_of(target), expected
    )


@pytest.mark.parametrize("constant", [np.arange(8.0), list(range(8)), jnp.arange(8.0)])
def test_relayout_inside_jit_lays_constants_out(constant):
    layout = Layout([("b", "a")], mesh("a4b2"))
    out = jax.jit(lambda t: mw.relayout(constant, layout) * 1 + t)(np.float32(0))
    np.testing.assert_array_equal(out, np.arange(8))
    alone = jax.jit(lambda: mw.relayout(constant, layout))()
    assert_lies(alone, layout, np.arange(8).astype(alone.dtype))


def test_relayout_inside_jit_takes_lists_of_traced_values():
    layout = Layout([U, "a"], mesh("a4b2"))
    row = np.arange(4.0, dtype=np.float32)
    out = jax.jit(lambda t: mw.relayout([t, 2 * t], layout))(row)
    assert_lies(out, layout, np.stack([row, 2 * row]))


def test_relayout_inside_jit_takes_an_abstract_mesh_with_the_same_axes():
    x = mw.relayout(values(np.float32), Layout(["a", "b"], mesh("a4b2")))
    abstract = Layout(["b", U], mesh("a4b2").abstract())
    out = jax.jit(lambda t: mw.relayout(t, abstract))(x)
    assert_lies(out, abstract.on(mesh("a4b2")), values(np.float32))


@pytest.mark.parametrize(("name", "specs"), [("a2b4", ["b"]), ("middle", ["x"]), ("x8", ["x"])])
def test_relayout_to_another_mesh_inside_jit_is_refused(name, specs):
    x = mw.relayout(np.zeros(8), Layout(["a"], mesh("a4b2")))
    layout = Layout(specs, mesh(name))
    with pytest.raises(
        TracingError, match=r"names another mesh than the array's \(a=4, b=2\).*outside"
    ):
        jax.jit(lambda t: mw.relayout(t + 1, layout))(x)


def test_relayout_inside_shard_map_is_refused():
    layout = Layout(["a"], mesh("a4b2"))
    spec = layout.partition_spec
    mapped = jax.shard_map(
        lambda t: mw.relayout(t, layout),
        mesh=mesh("a4b2").jax_mesh,
        in_specs=spec,
        out_specs=spec,
    )
    with pytest.raises(TracingError, match=r"inside shard_map \(over 'a', 'b'\).*before or after"):
        mapped(mw.relayout(np.zeros(32), layout))


def test_relayout_under_vmap_means_the_dims_of_one_example():
    expected = values(np.float32)
    x = mw.relayout(expected, Layout(["a", U], mesh("a4b2")))
    inner = Layout(["b"], mesh("a4b2"))
    out = jax.vmap(lambda t: mw.relayout(t, inner))(x)
    np.testing.assert_array_equal(out, expected)
    assert mw.fetch_layout(out).dim_axes(1) == ("b",)
    with pytest.raises(TracingError, match="devices that the array does not lie on"):
        jax.vmap(lambda t: mw.relayout(t, inner.on(mesh("a4b2 backwards"))))(x)


@pytest.mark.parametrize("target", PLACES, ids=place_id)
def test_the_gradient_through_relayout_is_that_of_the_identity(target):
    expected, source = values(np.float32), Layout(["a", "b"], mesh("a4b2"))
    x = mw.relayout(expected, source)

    def cubed(t: jax.Array) -> jax.Array:
        return (mw.relayout(t, layout_of(target)) ** 3).sum()

    assert_lies(jax.grad(cubed)(x), source, 3 * expected**2)
    if target[0] == "a4b2":
        np.testing.assert_array_equal(jax.jit(jax.grad(cubed))(x), 3 * expected**2)


@pytest.mark.parametrize("name", ["a4b2", "backwards", "a2b4"])
def test_second_derivatives_go_through_relayout(name):
    expected = values(np.float32)
    x = mw.relayout(expected, Layout(["a", "b"], mesh("a4b2")))
    layout = Layout(["b", "a"], mesh(name))
    slope = jax.grad(lambda t: (mw.relayout(t, layout) ** 3).sum())
    tangent = jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]
    assert_lies(tangent, Layout(["a", "b"], mesh("a4b2")), 6 * expected)


def test_gradients_of_single_examples_go_through_relayout():
    expected = values(np.float32)
    x = mw.relayout(expected, Layout(["a", "b"], mesh("a4b2")))
    layout = Layout(["b"], mesh("a4b2"))
    by_row = jax.vmap(jax.grad(lambda t: (mw.relayout(t, layout) ** 3).sum()))
    np.testing.assert_array_equal(by_row(x), 3 * expected**2)


def test_the_gradient_of_an_array_on_one_device_comes_back_to_it():
    x = jax.device_put(np.arange(8.0, dtype=np.float32), jax.devices()[2])
    layout = Layout(["x"], mesh("x8"))
    slope = jax.grad(lambda t: (mw.relayout(t, layout) ** 2).sum())(x)
    assert slope.devices() == {jax.devices()[2]}
    np.testing.assert_array_equal(slope, 2 * np.arange(8.0))


# MATCH


@pytest.mark.parametrize(
    ("source", "asked", "result"),
    [
        (["a", "b"], [MATCH, U], ["a", U]),
        (["a", "b"], [U, MATCH], [U, "b"]),
        (["a", U], [MATCH, "b"], ["a", "b"]),
        ([("a", "b"), U], [MATCH, MATCH], [("a", "b"), U]),
        ([U, U], ["b", MATCH], ["b", U]),
    ],
)
def test_match_keeps_a_dim_as_it_is(source, asked, result):
    expected, on = values(np.float32), mesh("a4b2")
    x = mw.relayout(expected, Layout(source, on))
    asked, result = Layout(asked, on), Layout(result, on)
    assert_lies(mw.relayout(x, asked), result, expected)
    assert_lies(jax.jit(lambda t: mw.relayout(t, asked))(x), result, expected)
    seen = []
    jax.grad(lambda t: seen.append(mw.fetch_layout(mw.relayout(t, asked))) or t.sum())(x)
    assert seen == [result]


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


# relayout_like, copy_to_mesh


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


# call_with_layout


def test_call_with_layout_makes_the_result_in_its_layout():
    layout = Layout(["a", "b"], mesh("a4b2"))
    assert_lies(mw.call_with_layout(jnp.ones, layout, (8, 4)), layout, np.ones((8, 4), np.float32))
    named = mw.call_with_layout(jnp.full, layout, shape=(8, 4), fill_value=3, dtype=jnp.bfloat16)
    assert_lies(named, layout, np.full((8, 4), 3, ml_dtypes.bfloat16))


def test_call_with_layout_draws_the_same_numbers_as_a_plain_call():
    key = jax.random.key(5)
    plain = np.asarray(jax.random.normal(key, (16, 8)))
    for place in (PLACES[3], PLACES[10], PLACES[12]):
        made = mw.call_with_layout(jax.random.normal, layout_of(place), key, (16, 8))
        assert_lies(made, layout_of(place), plain)


def test_call_with_layout_holds_no_whole_result_on_any_device():
    layout = Layout(["x", U], mesh("x8"))
    made = jax.jit(lambda: mw.call_with_layout(jnp.ones, layout, (64, 32)))
    text = made.lower().compile().as_text() or ""
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

    def made() -> jax.Array:
        return jnp.full(8, box[0])

    mw.call_with_layout(made, layout)
    box[0] = 2.0
    np.testing.assert_array_equal(mw.call_with_layout(made, layout), np.full(8, 2.0))


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


# fetch_layout, check_layout, is_dtensor


def test_fetch_layout_of_what_a_computation_made():
    x = mw.relayout(values(np.float32), Layout(["a", "b"], mesh("a4b2")))
    assert mw.fetch_layout(x * 2 + 1) == Layout(["a", "b"], mesh("a4b2"))
    assert mw.fetch_layout(x.sum(1)) == Layout(["a"], mesh("a4b2"))
    alone = mw.fetch_layout(jnp.ones((2, 3)))
    assert (alone.rank, alone.bound_mesh().size) == (2, 1)


@pytest.mark.parametrize("given", [np.zeros(3), [1, 2], 3.0, None, "x"])
def test_fetch_layout_refuses_what_is_no_jax_array(given):
    with pytest.raises(ArrayError, match=f"{type(given).__name__} has no layout.*relayout"):
        mw.fetch_layout(given)


def test_fetch_layout_while_tracing():
    x = mw.relayout(values(np.float32), Layout(["a", "b"], mesh("a4b2")))
    with pytest.raises(TracingError, match=r"not known inside jit or vmap.*Ask outside"):
        jax.jit(mw.fetch_layout)(x)
    seen = []
    jax.grad(lambda t: seen.append(mw.fetch_layout(t)) or t.sum())(x)
    assert seen == [Layout(["a", "b"], mesh("a4b2"))]


def test_fetch_layout_inside_jit_knows_explicit_axes():
    explicit = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(np.zeros(8), jax.NamedSharding(explicit, jax.P("x")))
    seen = []
    jax.jit(lambda t: seen.append((mw.fetch_layout(t), mw.is_dtensor(t))))(x)
    assert seen == [(Layout(["x"], Mesh({"x": 8})), True)]


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


# pack and unpack


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[np.ndarray, Layout]:
    on = mesh(draw(st.sampled_from(["x8", "a4b2", "cube", "middle", "backwards", "one"])))
    axes = draw(st.permutations(on.axis_names))
    rank = draw(st.integers(0, 3))
    specs: list[list[str]] = [[] for _ in range(rank)]
    for axis in axes:
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            specs[dim].append(axis)
    layout = Layout(specs, on)
    local = draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    dtype = draw(st.sampled_from(DTYPES))
    return values(dtype, layout.global_dims(local)), layout


@settings(max_examples=60, deadline=None, derandomize=True)
@given(laid_out())
def test_pack_undoes_unpack_and_unpack_undoes_pack(case):
    expected, layout = case
    parts = mw.unpack(mw.relayout(expected, layout))
    again = mw.pack(parts, layout, check_replicas=True)
    assert_lies(again, layout, expected)
    host = [np.asarray(part) for part in parts]
    for part, before, device in zip(
        mw.unpack(mw.pack(host, layout)), host, layout.bound_mesh().bound_devices(), strict=True
    ):
        np.testing.assert_array_equal(part, before)
        assert part.dtype == before.dtype
        assert part.devices() == {device}


def test_pack_takes_variables_lists_and_arrays_from_anywhere():
    layout = Layout(["x", U], mesh("middle"))
    far = jax.device_put(np.array([[1.0, 2.0]], np.float32), jax.devices()[0])
    for part in ([[3.0, 4.0]], np.array([[3.0, 4.0]]), SimpleNamespace(value=far + 2)):
        x = mw.pack((p for p in (far, part)), layout)
        assert_lies(x, layout, np.array([[1, 2], [3, 4]], np.float32))


def test_pack_keeps_random_keys_and_compares_their_copies():
    keys = jax.random.split(jax.random.key(0), 2)
    x = mw.pack([keys[:1], keys[1:]], Layout(["x"], mesh("middle")))
    np.testing.assert_array_equal(jax.random.key_data(x), jax.random.key_data(keys))
    with pytest.raises(ArrayError, match="parts 0 and 1 are copies"):
        mw.pack([keys[0], keys[1]], Layout([], mesh("middle")))


def test_pack_reports_every_fault_at_once():
    parts = [np.zeros(2, np.float32)] * 5 + [np.zeros((2, 1), np.int32), np.zeros(3, np.float32)]
    with pytest.raises(ArrayError) as caught:
        mw.pack(parts, Layout(["a"], mesh("a4b2")))
    assert str(caught.value).splitlines() == [
        "pack takes one part for each of this process's 8 devices of the mesh "
        "(a=4, b=2 @ cpu:0-7); received 7.",
        "part 5 has 2 dims (2, 1), but layout [a] has 1: write one entry per dim.",
        "part 5 has dims (2, 1) and part 0 (2,); all parts of an array have the same.",
        "part 5 is int32 and part 0 float32; convert one with astype.",
        "part 6 has dims (3,) and part 0 (2,); all parts of an array have the same.",
    ]
    with pytest.raises(ArrayError, match=r"8 devices .*received 0"):
        mw.pack([], Layout(["a"], mesh("a4b2")))


def test_pack_finds_copies_that_disagree():
    layout = Layout(["a"], mesh("a4b2"))
    parts = [np.full(3, i // 2, np.float32) for i in range(8)]
    parts[5][1] = 9.0
    with pytest.raises(
        ArrayError,
        match=r"parts 4 and 5 are copies of the same piece and differ in 1 of 3 elements, "
        r"first at \(1,\): 2.0 and 9.0\. Give both the same values",
    ):
        mw.pack(parts, layout)
    unchecked = mw.pack(parts, layout, check_replicas=False)
    np.testing.assert_array_equal(mw.unpack(unchecked)[5], parts[5])


def test_pack_takes_nan_for_a_copy_of_nan():
    for dtype in (np.float32, np.complex64, ml_dtypes.bfloat16):
        x = mw.pack([np.array([np.nan, 1], dtype) for _ in range(8)], Layout([U], mesh("x8")))
        assert x.shape == (2,)


def test_pack_compares_large_copies_only_when_asked():
    layout = Layout([U], mesh("middle"))
    parts = [np.zeros((1 << 18) + 1, np.float32), np.ones((1 << 18) + 1, np.float32)]
    mw.pack(parts, layout)
    with pytest.raises(ArrayError, match="differ in 262145 of 262145"):
        mw.pack(parts, layout, check_replicas=True)
    with pytest.raises(ArrayError, match="differ in 262144 of 262144"):
        mw.pack([part[1:] for part in parts], layout)


def test_pack_and_unpack_have_no_meaning_while_tracing():
    layout = Layout(["x"], mesh("x8"))
    x = mw.relayout(np.zeros(8), layout)
    with pytest.raises(TracingError, match=r"pack puts parts on devices.*Pack outside"):
        jax.jit(lambda t: mw.pack([t] * 8, layout))(np.zeros(1))
    with pytest.raises(TracingError, match="pack puts parts on devices"):
        jax.jit(lambda: mw.pack([np.zeros(1)] * 8, layout))()
    with pytest.raises(TracingError, match="pack puts parts on devices"):
        jax.grad(lambda t: mw.pack([t] * 8, layout).sum())(jnp.zeros(1))
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TracingError, match=r"unpack looks at the pieces.*shard_map"):
            transform(lambda t: mw.unpack(t)[0])(x)


def test_pack_needs_a_layout_that_says_everything():
    with pytest.raises(LayoutError, match="holds MATCH"):
        mw.pack([np.zeros(1)] * 8, Layout([MATCH], mesh("x8")))
    with pytest.raises(TopologyError, match="is abstract"):
        mw.pack([np.zeros(1)] * 8, Layout(["x"], Mesh({"x": 8})))
    with pytest.raises(LayoutError, match="is unbound and there is no default mesh"):
        mw.pack([np.zeros(1)] * 8, ["x"])


def test_unpack_follows_the_order_of_the_mesh():
    x = mw.relayout(range(4), Layout([("a", "b")], mesh("backwards")))
    assert [int(p[0]) for p in mw.unpack(x)] == [0, 1, 2, 3]
    assert [p.devices().pop().id for p in mw.unpack(x)] == [7, 6, 1, 0]
    (whole,) = mw.unpack(jnp.arange(3))
    assert whole.tolist() == [0, 1, 2]
    with pytest.raises(ArrayError, match="ndarray has no layout"):
        mw.unpack(np.zeros(3))


# default_mesh


def test_default_mesh_binds_unbound_layouts_everywhere():
    x = np.arange(8, dtype=np.float32)
    bound = Layout(["x"], mesh("x8"))
    with mw.default_mesh(mesh("x8")) as opened:
        assert opened is mesh("x8") is mw.get_default_mesh()
        assert_lies(mw.relayout(x, ["x"]), bound, x)
        assert_lies(mw.copy_to_mesh(x, Layout(["x"])), bound, x)
        assert_lies(mw.call_with_layout(jnp.arange, ["x"], 8.0), bound, x)
        assert_lies(mw.pack(np.split(x, 8), ["x"]), bound, x)
        assert_lies(jax.jit(lambda t: mw.relayout(t, ["x"]))(x), bound, x)
        mw.check_layout(mw.relayout(x, bound), ["x"])
        elsewhere = Layout(["x"], mesh("middle"))
        assert_lies(mw.relayout(x, elsewhere), elsewhere, x)
    with pytest.raises(LayoutError, match=r"\[x\] is unbound.*layout.on\(mesh\).*default_mesh"):
        mw.relayout(x, ["x"])


def test_default_mesh_leaves_plain_arrays_where_they_are_and_free_to_join_any_mesh():
    other = mw.relayout(np.ones(8, np.float32), Layout(["x"], mesh("middle")))
    with mw.default_mesh(mesh("x8")):
        plain = jnp.ones(8)
        assert mw.fetch_layout(plain).bound_mesh().is_single_device
        np.testing.assert_array_equal(plain + other, np.full(8, 2.0))
        np.testing.assert_array_equal(plain + mw.relayout(plain, ["x"]), np.full(8, 2.0))


def fail_inside(opened: Mesh) -> None:
    assert mw.get_default_mesh() is opened
    raise ZeroDivisionError


def test_default_mesh_nests_and_survives_exceptions():
    again = mw.default_mesh(mesh("x8"))
    with again, mw.default_mesh(mesh("a4b2")):
        assert mw.get_default_mesh() is mesh("a4b2")
        with pytest.raises(ZeroDivisionError), again, again:
            fail_inside(mesh("x8"))
        assert mw.get_default_mesh() is mesh("a4b2")
    assert mw.get_default_mesh() is None


def test_default_mesh_decorates():
    @mw.default_mesh(mesh("x8"))
    def inner(depth: int) -> Mesh | None:
        if depth:
            inner(depth - 1)
        return mw.get_default_mesh()

    assert inner(2) is mesh("x8")
    assert mw.get_default_mesh() is None

    @mw.default_mesh(mesh("x8"))
    def failing() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert mw.get_default_mesh() is None


def test_each_thread_has_its_own_default_mesh():
    shared, both = mw.default_mesh(mesh("x8")), threading.Barrier(2, timeout=30)
    seen: dict[str, list[Any]] = {"first": [], "second": []}

    def work(name: str, own: Any) -> None:
        seen[name].append(mw.get_default_mesh())
        with own:
            both.wait()
            seen[name].append(mw.get_default_mesh())
            both.wait()
        seen[name].append(mw.get_default_mesh())

    with mw.default_mesh(mesh("cube")):
        threads = [
            threading.Thread(target=work, args=("first", shared)),
            threading.Thread(target=work, args=("second", mw.default_mesh(mesh("a4b2")))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert mw.get_default_mesh() is mesh("cube")
    assert seen == {"first": [None, mesh("x8"), None], "second": [None, mesh("a4b2"), None]}


def test_default_mesh_takes_a_mesh_and_nothing_else():
    with pytest.raises(MeshError, match=r"default_mesh takes a meshwright Mesh.*Mesh\.from_jax"):
        mw.default_mesh(mesh("x8").jax_mesh)


# barrier


@functools.cache
def slow_program() -> Any:
    """About a second of work on device 2, compiled beforehand so that it starts at once."""
    x = jax.device_put(np.eye(200, dtype=np.float32), jax.devices()[2])

    def work(t: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 4000, lambda _, a: jnp.tanh(a @ a), t)

    return functools.partial(jax.jit(work).lower(x).compile(), x)


def test_barrier_waits_for_the_work_on_its_devices():
    mw.barrier(mesh("middle"))  # compiled now, so that the next is quicker than the work
    running = slow_program()()
    assert not running.is_ready()
    mw.barrier(mesh("middle"))
    assert not running.is_ready(), "device 2 is not in that mesh"
    mw.barrier(mesh("x8"), timeout_s=None)
    assert running.is_ready()


def test_barrier_gives_up_when_its_time_is_over():
    running = slow_program()()
    began_s = time.monotonic()
    with pytest.raises(
        TopologyError,
        match=r"barrier 'soon' on the mesh \(x=8 .*after 0.02 s process 0 still waits for work on",
    ):
        mw.barrier(mesh("x8"), "soon", timeout_s=0.02)
    assert not running.is_ready()
    assert time.monotonic() - began_s < 5
    mw.barrier(mesh("x8"), "later", timeout_s=60)


def test_barrier_passes_over_donated_arrays():
    x = mw.relayout(np.zeros(8), Layout(["x"], mesh("x8")))
    y = jax.jit(jnp.negative, donate_argnums=0)(x)
    mw.barrier(mesh("x8"), timeout_s=60)
    assert y.is_ready()


def test_barrier_refuses():
    with pytest.raises(TracingError, match=r"barrier waits for devices.*between the steps"):
        jax.jit(lambda: mw.barrier(mesh("x8")))()
    with pytest.raises(MeshError, match="barrier takes a meshwright Mesh"):
        mw.barrier(mesh("x8").jax_mesh)
    with pytest.raises(TopologyError, match="is abstract"):
        mw.barrier(Mesh({"x": 8}))


def test_barrier_checks_the_sum_of_ones_and_the_names(monkeypatch):
    from meshwright.arrays import barriers as waiting

    monkeypatch.setattr(waiting, "_roll_call", lambda _: lambda ones, _: [ones[:7].sum()] * 3)
    with pytest.raises(TopologyError, match=r"sum of ones over the mesh .* is 7 and not 8"):
        mw.barrier(mesh("x8"))


# Several processes

TWO_PROCESSES = """
import sys, time
import jax, numpy as np
import meshwright as mw
from meshwright import Layout, TopologyError, UNSHARDED as U

me, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, me)

def lies(x, layout, expected):
    assert mw.fetch_layout(x) == layout, (mw.fetch_layout(x), layout)
    starts = dict(zip(layout.mesh.devices, layout.offsets(expected.shape)))
    local = layout.local_dims(expected.shape)
    for device, piece in zip(layout.mesh.local_devices, mw.unpack(x)):
        cut = tuple(slice(s, s + n) for s, n in zip(starts[device], local))
        assert piece.devices() == {device}
        np.testing.assert_array_equal(piece, expected[cut])

mesh = mw.create_mesh({"a": 4, "b": 2})
half = mw.create_mesh({"c": 4}, devices=jax.devices()[2:6])
mine = mw.create_mesh({"c": 4}, devices=jax.local_devices())
mw.barrier(mesh, "start", timeout_s=120)
expected = np.arange(64, dtype=np.float32).reshape(8, 8)
places = [Layout(["a", "b"], mesh), Layout([U, ("b", "a")], mesh), Layout([U, U], mesh),
          Layout(["c", U], half), Layout([U, "c"], mine)]
for source in places:
    x = mw.relayout(expected, source)
    lies(x, source, expected)
    lies(mw.pack(mw.unpack(x), source), source, expected)
    for target in places:
        lies(mw.relayout(x, target), target, expected)
for given in (jax.numpy.asarray(expected), jax.device_put(expected, jax.local_devices()[1])):
    lies(mw.relayout(given, places[0]), places[0], expected)
lies(mw.relayout(np.float32(3), Layout([], mesh)), Layout([], mesh), np.float32(3))
x = mw.relayout(expected, places[0])
lies(jax.grad(lambda t: (mw.relayout(t, places[1]) ** 2).sum())(x), places[0], 2 * expected)
lies(jax.jit(lambda t: mw.relayout(t, places[1]))(x), places[1], expected)
lies(jax.jit(lambda t: t + mw.relayout(expected, places[0]))(x), places[0], 2 * expected)
lies(mw.call_with_layout(jax.numpy.negative, places[1], x), places[1], -expected)
keys = jax.random.split(jax.random.key(0), 8)
moved = mw.relayout(keys, Layout(["a"], mesh))
lies(jax.random.key_data(moved), Layout(["a", U], mesh), np.asarray(jax.random.key_data(keys)))

first = mw.create_mesh({"c": 2}, devices=jax.devices()[:2])
lone = mw.relayout(expected, Layout(["c", U], first))
if me == 1:
    for ask in (lambda: mw.relayout(lone, places[2]), lambda: mw.pack([], ["c"]),
                lambda: mw.barrier(first)):
        try:
            with mw.default_mesh(first):
                ask()
        except TopologyError as error:
            print("refused:", error)
mw.barrier(mesh, "together", timeout_s=60)
try:
    mw.barrier(mesh, f"name {me}", timeout_s=60)
except TopologyError as error:
    print("names:", error)
if me == 0:
    try:
        mw.barrier(mesh, "alone", timeout_s=1)
    except TopologyError as error:
        print("late:", error)
else:
    time.sleep(3)
    mw.barrier(mesh, "alone", timeout_s=60)
mw.barrier(mesh, "end", timeout_s=60)
print("done")
"""


@pytest.mark.full
def test_everything_holds_across_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(me), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for me in range(2)
    ]
    until_s = time.monotonic() + 180
    while time.monotonic() < until_s and {p.poll() for p in processes} >= {None}:
        if any(p.poll() for p in processes):  # the others would wait for the one that failed
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    answers = [process.communicate() for process in processes]
    for out, err in answers:
        assert out.endswith("done\n"), err[-3000:]
        assert "another process is at a barrier of another name" in out
    assert "'alone' on the mesh" in answers[0][0]
    assert "process 0 still waits for the other processes of the mesh" in answers[0][0]
    assert "process 1 holds no piece of the array" in answers[1][0]
    assert "pack: process 1 has no device of the mesh" in answers[1][0]
    assert "barrier: process 1 has no device of the mesh" in answers[1][0]
