"""How long collectives take, and over which links: closed forms, and where the axes are laid.

A ring passes each piece on from neighbour to neighbour (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009); for a torus of TPUs, in both directions
and over all its dims at once (Austin et al., "How to Scale Your Model", 2025, part 3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..targets.hardware import Hardware, Link
from ..targets.target import Target
from .collectives import Collective
from .groups import Axes

_RANKS = {"tpu": "ici", "cuda": "nvlink", "cpu": "shared"}  # the link of a platform's devices


@dataclass(frozen=True)
class AxisLink:
    """Which link an axis of the mesh is taken to lie on, and over how many dims of a torus."""

    axis: str
    size: int
    link: Link
    lanes: int = 1
    shares_dims: bool = False  # the mesh has more axes than dims of the torus can hold whole

    def __str__(self) -> str:
        over = f" over {self.lanes} dims" if self.lanes > 1 else ""
        over = ", where axes share dims of the torus" if self.shares_dims else over
        return f"axis {self.axis!r} of {self.size} lies on {self.link.kind}{over}"

    @property
    def bytes_per_s(self) -> float | None:
        return None if self.link.bytes_per_s is None else self.lanes * self.link.bytes_per_s


def links_of(target: Target, hardware: Hardware, axes: Axes) -> tuple[AxisLink, ...]:
    """Which link each axis of a mesh lies on: an assumption, since the runtime decides.

    On a TPU an axis takes whole dims of the torus where sizes allow it, else a part of one, whose
    links count as if no other axis used them; dims are taken to be closed to rings. GPUs fill node
    after node, the last axes within a node.

    >>> from meshwright.targets.hardware import hardware_of
    >>> v5p, mesh = Target.of("v5p:4x4x8"), (("data", 16), ("model", 8))
    >>> [str(each) for each in links_of(v5p, hardware_of(v5p), mesh)]
    ["axis 'data' of 16 lies on ici over 2 dims", "axis 'model' of 8 lies on ici"]
    """
    kind = _RANKS[target.platform]
    link = hardware.link(kind) or Link(kind, "shared" if kind == "shared" else "switch")
    if target.platform == "tpu":
        every = _lanes(target, axes)
        return tuple(
            AxisLink(axis, size, link, lanes=every[place] if every else 1, shares_dims=not every)
            for place, (axis, size) in enumerate(axes)
        )
    network = hardware.link("network") or Link("network")
    node = target.devices_per_node or hardware.devices_per_node or target.num_devices
    reach = [math.prod(size for _, size in axes[place:]) for place in range(len(axes))]
    return tuple(
        AxisLink(axis, size, link if size == 1 or spans <= node else network)
        for (axis, size), spans in zip(axes, reach, strict=True)
    )


def _lanes(target: Target, axes: Axes) -> tuple[int, ...]:
    """How many dims of the torus each axis takes; cores of a chip count as none. Empty where some
    would share one."""
    cores = target.num_devices // math.prod(target.topology)
    dims = [size for size in target.topology if size > 1]
    every = dims + ([cores] if cores > 1 else [])
    sizes = [size for _, size in axes]
    for taken in itertools.product(range(len(axes)), repeat=len(every)):
        products = [1] * len(axes)
        lanes = [0] * len(axes)
        for place, (axis, size) in enumerate(zip(taken, every, strict=True)):
            products[axis] *= size
            lanes[axis] += place < len(dims)
        if products == sizes:
            return tuple(max(1, lane) for lane in lanes)
    return ()


def collective_s(collective: Collective, links: Sequence[AxisLink]) -> float | None:
    """Seconds that one collective takes alone; ``None`` where a bandwidth is not known.

    ``links`` are those of the mesh's axes. A latency that is not known counts as zero.

    >>> from meshwright.hlo.text import Array
    >>> eight = Collective("all-reduce", (Array("float32", (1000,), 32),), (tuple(range(8)),),
    ...                    ("data",), 1, "", 0, 0)
    >>> collective_s(eight, [AxisLink("data", 8, Link("nvlink", "switch", 7000.0))])
    1.0
    """
    across = [link for link in links if link.axis in collective.axes]
    members = collective.group_size
    if members < 2 or not across:
        return 0.0
    speeds = [crossing.bytes_per_s for crossing in across]
    if any(speed is None for speed in speeds):
        return None
    speeds_known = [speed for speed in speeds if speed is not None]
    is_ring = all(crossing.link.pattern == "ring" for crossing in across)
    speed = sum(speeds_known) if is_ring else min(speeds_known)
    moved = _share(collective.kind, members, is_ring) * collective.bytes_per_device
    return moved / speed + _latency_s(collective.kind, members, across)


def _share(kind: str, members: int, is_ring: bool) -> float:
    """Bytes that a device sends, per byte of the whole arrays that it makes or begins with."""
    rest = (members - 1) / members
    if kind == "all-reduce":
        return 2 * rest
    if kind in ("all-to-all", "ragged-all-to-all"):
        return members / 4 if is_ring else rest  # a ring hands pieces on, n/4 hops on average
    if kind in ("collective-permute", "collective-broadcast"):
        return 2.0 if is_ring else 1.0  # one of a ring's two directions
    return rest


def _latency_s(kind: str, members: int, across: Sequence[AxisLink]) -> float:
    each_hop = max(crossing.link.latency_s or 0.0 for crossing in across)
    if kind == "collective-permute" or all(
        crossing.link.pattern == "shared" for crossing in across
    ):
        return each_hop
    hops = members - 1
    if all(crossing.link.pattern == "ring" for crossing in across):
        hops = sum(crossing.size - 1 for crossing in across)
    return (2 if kind == "all-reduce" else 1) * hops * each_hop
