"""Arrays from the parts of this process, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..errors import ArrayError, TracingError
from ..layouts.layout import Layout
from .default import LayoutLike, bound, own_devices
from .layout_of import fetch_layout
from .tracing import is_tracing
from .values import array_in, as_numpy, host_array

_SMALL_PART_BYTES = 1 << 20


def pack(parts: Iterable[Any], layout: LayoutLike, check_replicas: bool | None = None) -> jax.Array:
    """One array from this process's parts: one part per local device of the mesh, in mesh order.

    ``parts`` have equal dims and dtypes and are copied to the devices of the ``layout``.
    ``check_replicas`` compares those parts of this process that are copies of each other; ``None``
    does so for parts of at most 1 MiB. Raises :class:`ArrayError` that lists every part which does
    not fit, and :class:`TracingError` inside ``jit``.

    >>> from meshwright import create_mesh
    >>> mesh = create_mesh({"batch": 4, "model": 2})
    >>> x = pack([[0.0], [0.0], [1.0], [1.0], [2.0], [2.0], [3.0], [3.0]], Layout(["batch"], mesh))
    >>> x.tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    target = bound(layout)
    devices = own_devices(target.bound_mesh(), "pack")
    values = [_part(part) for part in parts]
    if is_tracing() or any(isinstance(value, Tracer) for value in values):
        raise TracingError(
            "pack puts parts on devices, which has no meaning inside jit or grad. Pack outside and "
            "pass the array in; relayout(x, layout) works inside."
        )
    sharding = target.sharding
    faults = _part_faults(values, target, devices)
    if not faults and (check_replicas or (check_replicas is None and _are_small(values))):
        faults = _replica_faults(values, target)
    if faults:
        raise ArrayError("\n".join(faults))
    pieces = [jax.device_put(value, device) for value, device in zip(values, devices, strict=True)]
    dims = target.global_dims(values[0].shape)
    return jax.make_array_from_single_device_arrays(dims, sharding, pieces)


def unpack(x: Any) -> list[jax.Array]:
    """The pieces of ``x`` on this process's devices, in mesh order; :func:`pack` undoes it.

    Raises :class:`ArrayError` unless it is a ``jax.Array``, :class:`TracingError` inside ``jit``.

    >>> from meshwright import create_mesh, relayout
    >>> x = relayout(range(8), Layout(["batch"], create_mesh({"batch": 4, "model": 2})))
    >>> [piece.tolist() for piece in unpack(x)]
    [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    """
    value = array_in(x)
    if isinstance(value, Tracer):
        raise TracingError(
            "unpack looks at the pieces on the devices, which has no meaning inside jit or grad. "
            "Unpack the result outside; jax.shard_map runs a function on each piece."
        )
    devices = fetch_layout(x).bound_mesh().local_devices
    array: Any = value
    pieces = {shard.device: shard.data for shard in array.addressable_shards}
    return [pieces[device] for device in devices]


def _part(part: Any) -> Any:
    value = array_in(part)
    return host_array(part) if value is None else value


def _part_faults(values: Sequence[Any], target: Layout, devices: Sequence[Any]) -> list[str]:
    faults = []
    if len(values) != len(devices):
        faults.append(
            f"pack takes one part for each of this process's {len(devices)} devices of the mesh "
            f"({target.mesh}); received {len(values)}."
        )
    for i, value in enumerate(values):
        if value.ndim != target.rank:
            faults.append(
                f"part {i} has {value.ndim} dims {value.shape}, but layout {target.unbound()} has "
                f"{target.rank}: write one entry per dim."
            )
        if value.shape != values[0].shape:
            faults.append(
                f"part {i} has dims {value.shape} and part 0 {values[0].shape}; "
                "all parts of an array have the same."
            )
        if value.dtype != values[0].dtype:
            faults.append(
                f"part {i} is {value.dtype} and part 0 {values[0].dtype}; convert one with astype."
            )
    return faults


def _are_small(values: Sequence[Any]) -> bool:
    return values[0].nbytes <= _SMALL_PART_BYTES


def _replica_faults(values: Sequence[Any], target: Layout) -> list[str]:
    """Where parts that stand for the same piece of the array differ."""
    mesh = target.bound_mesh()
    offsets = dict(
        zip(
            mesh.bound_devices(),
            target.offsets(target.global_dims(values[0].shape)),
            strict=True,
        )
    )
    firsts: dict[tuple[int, ...], int] = {}
    faults = []
    for i, device in enumerate(mesh.local_devices):
        first = firsts.setdefault(offsets[device], i)
        if values[i] is not values[first]:
            faults += _difference(values, first, i)
    return faults


def _difference(values: Sequence[Any], first: int, second: int) -> list[str]:
    a, b = (as_numpy(values[i]) for i in (first, second))
    differs = (a != b) & ~((a != a) & (b != b))  # NaN agrees with NaN
    if not differs.any():
        return []
    where = tuple(map(int, np.argwhere(differs)[0]))
    return [
        f"parts {first} and {second} are copies of the same piece and differ in "
        f"{int(differs.sum())} of {differs.size} elements, first at {where}: {a[where]} and "
        f"{b[where]}. Give both the same values, or let a dim lie on the axis between them."
    ]
