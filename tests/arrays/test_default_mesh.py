"""default_mesh binds layouts without a mesh, in one thread and inside one context."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placements import assert_lies, mesh

import meshwright as mw
from meshwright import Layout, Mesh
from meshwright.errors import (
    LayoutError,
    MeshError,
)


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
    actual: dict[str, list[Any]] = {"first": [], "second": []}

    def work(name: str, own: Any) -> None:
        actual[name].append(mw.get_default_mesh())
        with own:
            both.wait()
            actual[name].append(mw.get_default_mesh())
            both.wait()
        actual[name].append(mw.get_default_mesh())

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
    assert actual == {"first": [None, mesh("x8"), None], "second": [None, mesh("a4b2"), None]}


def test_default_mesh_takes_a_mesh_and_nothing_else():
    with pytest.raises(MeshError, match=r"default_mesh takes a meshwright Mesh.*Mesh\.from_jax"):
        mw.default_mesh(mesh("x8").jax_mesh)
