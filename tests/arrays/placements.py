"""Meshes, places of arrays on them, and the oracle that looks at every device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np

import meshwright as mw
from meshwright import UNSHARDED, Layout, Mesh

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
    pieces = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    local = layout.local_dims(expected.shape)
    starts = layout.offsets(expected.shape)
    assert set(pieces) == set(layout.bound_mesh().bound_devices())
    for device, start in zip(layout.bound_mesh().bound_devices(), starts, strict=True):
        piece = expected[tuple(slice(s, s + n) for s, n in zip(start, local, strict=True))]
        np.testing.assert_array_equal(pieces[device], piece)
