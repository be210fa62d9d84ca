"""barrier waits for the devices of a mesh, or says which processes are late."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placements import mesh

import meshwright as mw
from meshwright import Layout, Mesh
from meshwright.errors import (
    MeshError,
    TopologyError,
    TracingError,
)


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
