"""Waiting for devices and for the other processes of a mesh."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ..errors import TopologyError, TracingError
from ..launch.join import naming_failures
from ..launch.progress import inside
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from .default import as_mesh, own_devices
from .tracing import is_tracing

_BUSY = "still waits for work on its own devices. Raise timeout_s to allow more time."
_ALONE = (
    "still waits for the other processes of the mesh. See that each is alive and comes to this "
    "barrier, or allow more time with timeout_s."
)


def barrier(mesh: Mesh, name: str = "", timeout_s: float | None = 600.0) -> None:
    """Wait until this process's devices of the mesh are idle and all its processes are here.

    First all that is in flight on the devices of ``mesh``, then an all-reduce of ones over it,
    whose sum is checked; ``name`` must be the same in every process. ``timeout_s=None`` waits for
    ever. An error of the work that was in flight is raised here; the time-out cannot cut short a
    host callback of JAX. Raises :class:`TopologyError` when time is up or processes disagree,
    :class:`TracingError` inside ``jit``.

    >>> from meshwright import create_mesh
    >>> barrier(create_mesh({"batch": 8}), "after setup", timeout_s=60)
    """
    own_devices(as_mesh(mesh, "barrier"), "barrier")
    if is_tracing():
        raise TracingError(
            "barrier waits for devices, which has no meaning inside jit: it would wait once, while "
            "tracing. Call it between the steps."
        )
    with naming_failures(), inside("barrier"):  # agents name those that do not come
        _wait_here(mesh, name, timeout_s)


def _wait_here(mesh: Mesh, name: str, timeout_s: float | None) -> None:
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    late = f"barrier {name!r} on the mesh ({mesh}): after {timeout_s} s process"
    _wait_for(_in_flight(mesh), deadline_s, f"{late} {jax.process_index()} {_BUSY}")
    jax.effects_barrier()
    answers = _roll_call(mesh)(*_ballots(mesh, name))
    _wait_for(answers, deadline_s, f"{late} {jax.process_index()} {_ALONE}")
    _check_roll_call(mesh, name, [int(answer.addressable_data(0)) for answer in answers])


def _in_flight(mesh: Mesh) -> list[jax.Array]:
    devices = set(mesh.local_devices)
    return [a for a in jax.live_arrays(mesh.platform) if devices & _addressable(a)]


def _addressable(x: jax.Array) -> set[Any]:
    return set() if x.is_deleted() else set(x.sharding.addressable_devices)


def _wait_for(arrays: Iterable[Any], deadline_s: float | None, late: str) -> None:
    for array in arrays:
        pause_s = 1e-5
        while deadline_s is not None and not (array.is_deleted() or array.is_ready()):
            if time.monotonic() > deadline_s:
                raise TopologyError(late)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-2)
        if not array.is_deleted():
            array.block_until_ready()


def _ballots(mesh: Mesh, name: str) -> tuple[jax.Array, jax.Array]:
    """Per device a one and the number of the barrier's name. shape=(mesh.size,), dtype=int32"""
    sharding = Layout([mesh.axis_names], mesh).sharding
    number = zlib.crc32(name.encode()) & 0x7FFFFFFF

    def filled(entry: int) -> jax.Array:
        return jax.make_array_from_callback(
            (mesh.size,), sharding, lambda _: np.full(1, entry, np.int32)
        )

    return filled(1), filled(number)


@functools.lru_cache(maxsize=64)
def _roll_call(mesh: Mesh) -> Callable[..., list[jax.Array]]:
    def count(ones: jax.Array, numbers: jax.Array) -> list[jax.Array]:
        return [ones.sum(), numbers.min(), numbers.max()]

    return jax.jit(count, out_shardings=Layout.replicated(mesh, 0).sharding)


def _check_roll_call(mesh: Mesh, name: str, answers: Sequence[int]) -> None:
    count, least, most = answers
    if count != mesh.size:
        raise TopologyError(
            f"barrier {name!r}: the sum of ones over the mesh ({mesh}) is {count} and not "
            f"{mesh.size}. Collectives do not work between these devices."
        )
    if least != most:
        raise TopologyError(
            f"barrier {name!r}: another process is at a barrier of another name. Every process "
            "must come to the same barriers in the same order."
        )
