"""How long collectives take, and over which links: closed forms, and where the axes are laid.

A ring passes each piece on from neighbour to neighbour (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009); for a torus of TPUs, in both directions
and over all its dims at once (Austin et al., "How to Scale Your Model", 2025, part 3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..indices import unravel
from ..targets.hardware import Hardware, Link
from ..targets.target import Target
from ..topology import across_slices
from .collectives import Collective
from .groups import Axes

_Level = list[tuple[int, "AxisLink"]]  # parts of axes, with the places of these in the mesh

_RANKS = {"tpu": "ici", "cuda": "nvlink", "cpu": "shared"}  # the link of a platform's devices


@dataclass(frozen=True)
class AxisLink:
    """Which link an axis of the mesh is taken to lie on, and over how many dims of a torus.

    An axis that spans several TPU slices, or nodes of GPUs, and several devices of each lies on
    ``link`` between them and ``inside`` each.
    """

    axis: str
    size: int
    link: Link
    lanes: int = 1
    shares_dims: bool = False  # the mesh has more axes than dims of the torus can hold whole
    inside: AxisLink | None = None

    def __str__(self) -> str:
        over = f" over {self.lanes} dims" if self.lanes > 1 else ""
        over = ", where axes share dims of the torus" if self.shares_dims else over
        lies = f"axis {self.axis!r} of {self.size} lies on {self.link.kind}{over}"
        if self.inside is None:
            return lies
        within = f"{self.inside.size} of it on {self.inside.link.kind}"
        return f"{lies} between {self.size // self.inside.size}, with {within} in each"

    @property
    def levels(self) -> tuple[AxisLink, ...]:
        """The part of the axis on each kind of link, the fast one first."""
        if self.inside is None:
            return (self,)
        return self.inside, replace(self, size=self.size // self.inside.size, inside=None)

    @property
    def bytes_per_s(self) -> float | None:
        return None if self.link.bytes_per_s is None else self.lanes * self.link.bytes_per_s


def links_of(target: Target, hardware: Hardware, axes: Axes) -> tuple[AxisLink, ...]:
    """Which link each axis of a mesh lies on: an assumption, since the runtime decides.

    On a TPU an axis takes whole dims of the torus where sizes allow it, else a part of one, whose
    links count as if no other axis used them; dims are taken to be closed to rings. Of several
    slices the first axes span them. GPUs fill node after node, the last axes within a node.

    >>> from meshwright.targets.hardware import hardware_of
    >>> v5p, mesh = Target.of("v5p:4x4x8"), (("data", 16), ("model", 8))
    >>> [str(link) for link in links_of(v5p, hardware_of(v5p), mesh)]
    ["axis 'data' of 16 lies on ici over 2 dims", "axis 'model' of 8 lies on ici"]
    >>> slices = Target.of("v5p:2x(4x4x8)")
    >>> [str(link) for link in links_of(slices, hardware_of(slices), (("dcn", 2), ("data", 128)))]
    ["axis 'dcn' of 2 lies on network", "axis 'data' of 128 lies on ici over 3 dims"]
    """
    kind = _RANKS[target.platform]
    link = hardware.link(kind) or Link(kind, "shared" if kind == "shared" else "switch")
    network = hardware.link("network") or Link("network")
    sizes = [size for _, size in axes]
    if target.platform == "tpu":
        slices = -(-math.prod(sizes) // target.devices_per_slice)
        spans = across_slices(sizes, slices)
        within = [size // span for size, span in zip(sizes, spans, strict=True)]
        lanes = _lanes(target, within)
    else:
        node = target.devices_per_node or hardware.devices_per_node or target.num_devices
        within = [_within(node, sizes[place:]) for place in range(len(sizes))]
        lanes = (1,) * len(sizes)
    return tuple(
        _lies(axis, size, inside, link, network, lanes[place] if lanes else None)
        for place, ((axis, size), inside) in enumerate(zip(axes, within, strict=True))
    )


def _lies(
    axis: str, size: int, within: int, link: Link, network: Link, lanes: int | None
) -> AxisLink:
    """How an axis lies of which ``within`` devices are in one slice or node."""
    inside = AxisLink(axis, within, link, lanes=lanes or 1, shares_dims=lanes is None)
    if within == size:
        return inside
    return AxisLink(axis, size, network, inside=inside if within > 1 else None)


def _within(node: int, sizes: Sequence[int]) -> int:
    """How many devices of the first of these axes are in one node, which the last axes fill."""
    first, step = sizes[0], math.prod(sizes[1:])
    if first * step <= node:
        return first
    inside = node // step
    return inside if inside and node % step == 0 and first % inside == 0 else 1


def _lanes(target: Target, sizes: Sequence[int]) -> tuple[int, ...]:
    """How many dims of the torus axes of these sizes take; cores of a chip count as none. Empty
    where some would share one."""
    cores = target.devices_per_slice // math.prod(target.topology)
    dims = [size for size in target.topology if size > 1]
    every = dims + ([cores] if cores > 1 else [])
    for assignment in itertools.product(range(len(sizes)), repeat=len(every)):
        products = [1] * len(sizes)
        lanes = [0] * len(sizes)
        for place, (axis, size) in enumerate(zip(assignment, every, strict=True)):
            products[axis] *= size
            lanes[axis] += place < len(dims)
        if products == list(sizes):
            return tuple(max(1, lane) for lane in lanes)
    return ()


def collective_s(collective: Collective, links: Sequence[AxisLink]) -> float | None:
    """Seconds that one collective takes alone; ``None`` where a bandwidth is not known.

    ``links`` are those of the mesh's axes. A latency that is not known counts as zero. Where axes
    lie on several kinds of links, it goes by levels: within each slice or node, and between these
    with what one device holds then.

    >>> from meshwright.hlo.text import Array
    >>> eight = Collective("all-reduce", (Array("float32", (1000,), 32),), (tuple(range(8)),),
    ...                    ("data",), 1, "", 0, 0)
    >>> collective_s(eight, [AxisLink("data", 8, Link("nvlink", "switch", 7000.0))])
    1.0
    """
    levels = _levels_of(collective, links)
    if collective.group_size < 2 or not levels:
        return 0.0
    took = [_of_members(collective, members, levels) for members in _members(collective, links)]
    known = [seconds for seconds in took if seconds is not None]
    return max(known) if len(known) == len(took) else None


def _of_members(
    collective: Collective, members: Sequence[int], levels: Sequence[_Level]
) -> float | None:
    """Seconds of a group with these numbers of members per level, one level after another."""
    total, moved = 0.0, float(collective.bytes_per_device)
    for here, level in zip(members, levels, strict=True):
        took = _level_s(collective.kind, here, moved, [part for _, part in level])
        if took is None:
            return None
        total += took
        if collective.kind not in _WHOLE:
            moved /= here
    return total


def _levels_of(collective: Collective, links: Sequence[AxisLink]) -> list[_Level]:
    """The parts of its axes on each kind of link, with the places of the axes; fast ones first."""
    every = [
        (place, part)
        for place, link in enumerate(links)
        if link.axis in collective.axes
        for part in link.levels
    ]
    every.sort(key=lambda at: _is_between(at[1]))
    kinds = dict.fromkeys(part.link for _, part in every)
    return [[(place, part) for place, part in every if part.link == kind] for kind in kinds]


def _members(collective: Collective, links: Sequence[AxisLink]) -> set[tuple[int, ...]]:
    """How many members of a group lie apart on each level, for all groups.

    A group may lie along a part of an axis alone: XLA for TPUs gathers within a slice, and then
    between slices, which are steps of the same axis of ours.
    """
    levels = _levels_of(collective, links)
    whole = tuple(math.prod(part.size for _, part in level) for level in levels)
    if len(levels) == 1:
        return {(collective.group_size,)}
    if collective.group_size == math.prod(whole):
        return {whole}
    sizes = [link.size for link in links]

    def apart(group: Sequence[int], level: _Level) -> int:
        coords = [unravel(position, sizes) for position in group]
        return len({tuple(_step(links[axis], part, at[axis]) for axis, part in level)
                    for at in coords})  # fmt: skip

    return {tuple(apart(group, level) for level in levels) for group in collective.groups}


def _step(link: AxisLink, part: AxisLink, coord: int) -> int:
    """Where on a part of an axis a device is."""
    if link.inside is None:
        return coord
    return coord % link.inside.size if part == link.inside else coord // link.inside.size


_WHOLE = ("all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")


def _is_between(level: AxisLink) -> bool:
    """Whether a level joins slices or nodes."""
    return level.link.kind == "network"


def _level_s(kind: str, members: int, nbytes: float, across: Sequence[AxisLink]) -> float | None:
    """Seconds of a collective among devices that links of one kind join."""
    if members < 2:
        return 0.0
    speeds = [crossing.bytes_per_s for crossing in across]
    if any(speed is None for speed in speeds):
        return None
    speeds_known = [speed for speed in speeds if speed is not None]
    is_ring = all(crossing.link.pattern == "ring" for crossing in across)
    speed = sum(speeds_known) if is_ring else min(speeds_known)
    return _share(kind, members, is_ring) * nbytes / speed + _latency_s(kind, members, across)


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
