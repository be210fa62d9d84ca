"""pack and unpack: one part for each device, in the order of the mesh."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import DTYPES, U, assert_lies, mesh, values

import meshwright as mw
from meshwright import MATCH, Layout, Mesh
from meshwright.errors import (
    ArrayError,
    LayoutError,
    TopologyError,
    TracingError,
)


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
