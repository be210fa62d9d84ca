"""Which pieces of arrays lie on which host, and how they come to others."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_GATHERED_BYTES = 2**16
Box = tuple[tuple[int, int], ...]  # begin and end in each dim


class Hosts:
    """Which ranks, and so which devices, lie on which host."""

    def __init__(self, rank: int, place: int, first_of: list[int]) -> None:
        self.rank, self.place, self._first_of = rank, place, first_of
        self.leaders = sorted(set(first_of))
        self.is_leader = rank in self.leaders

    @classmethod
    def of_this_group(cls) -> Hosts:
        """Those of the processes of JAX; all must ask."""
        rank = jax.process_index()
        place = int(os.environ.get("MESHWRIGHT_LOCAL_RANK") or 0)
        return cls(rank, place, [int(text) for text in gathered(str(rank - place))])

    def _host(self, device: Any) -> int:
        return self.leaders.index(self._first_of[device.process_index])

    def pieces(self, array: Any) -> Iterator[tuple[Box, Any]]:
        """The pieces of an array that this process writes: each on this host once."""
        is_global = isinstance(array, jax.Array) and len(array.sharding.device_set) > 1
        if not is_global:
            if self.is_leader:
                yield tuple((0, size) for size in array.shape), array
            return
        writers: dict[Box, Any] = {}
        for device, box in _boxes(array):
            if self._host(device) == self._here:
                writers.setdefault(box, device)
        for shard in array.addressable_shards:
            box = _box(shard.index, array.shape)
            if writers[box] == shard.device:
                yield box, shard.data

    def moved(self, arrays: dict[str, Any], by: int) -> dict[str, Any]:
        """Arrays of which a host has pieces alone, each piece on a device ``by`` hosts further."""
        if by >= len(self.leaders):
            return {}
        split = {
            key: array
            for key, array in arrays.items()
            if isinstance(array, jax.Array)
            and len(array.sharding.device_set) > 1
            and self._are_alone(array)
        }
        if not split:
            return {}
        lies = tuple((key, array.sharding) for key, array in split.items())
        return _mover(lies, tuple(self._first_of), by)(split)

    def pieces_of_peer(self, array: Any, by: int) -> Iterator[tuple[Box, Any]]:
        """The pieces of an array that :meth:`moved` has brought to this process."""
        devices = list(array.sharding.mesh.devices.flat)
        hosts = [self._host(device) for device in devices]
        comes_from = {there: here for here, there in shifted(hosts, by)}
        boxes = dict(_boxes(array))
        lie_here = {boxes[d] for d, host in zip(devices, hosts, strict=True) if host == self._here}
        done = set[Box]()
        for number, device in enumerate(devices):
            if hosts[number] != self._here or number not in comes_from:
                continue
            box = boxes[devices[comes_from[number]]]
            if box in lie_here or box in done:
                continue
            done.add(box)
            for shard in array.addressable_shards:
                if shard.device == device:
                    yield box, shard.data

    @functools.cached_property
    def _here(self) -> int:
        return self.leaders.index(self._first_of[self.rank])

    def _are_alone(self, array: Any) -> bool:
        hosts: dict[Box, set[int]] = {}
        for device, box in _boxes(array):
            hosts.setdefault(box, set()).add(self._host(device))
        return any(len(of_box) == 1 for of_box in hosts.values())


def shifted(hosts: list[int], by: int) -> list[tuple[int, int]]:
    """From which device to which, so that what each host has lies ``by`` hosts further.

    ``hosts`` has the host of each device.

    >>> shifted([0, 0, 1, 1], 1)
    [(0, 2), (1, 3), (2, 0), (3, 1)]
    """
    of_host: dict[int, list[int]] = {}
    for number, host in enumerate(hosts):
        of_host.setdefault(host, []).append(number)
    ring = sorted(of_host)
    return [
        pair
        for at, host in enumerate(ring)
        for pair in zip(of_host[host], of_host[ring[(at + by) % len(ring)]], strict=False)
    ]


@functools.lru_cache(maxsize=8)
def _mover(lies: tuple[tuple[str, Any], ...], first_of: tuple[int, ...], by: int) -> Any:
    """One compiled function that moves every piece of such arrays to the device of the peer."""
    leaders = sorted(set(first_of))

    def move(value: Any, sharding: Any) -> Any:
        mesh = sharding.mesh
        hosts = [leaders.index(first_of[d.process_index]) for d in mesh.devices.flat]
        pairs = shifted(hosts, by)

        def send(piece: Any) -> Any:
            return jax.lax.ppermute(piece, mesh.axis_names, pairs)

        spec = sharding.spec
        return jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(value)

    return jax.jit(lambda arrays: {key: move(arrays[key], sharding) for key, sharding in lies})


def _boxes(array: Any) -> list[tuple[Any, Box]]:
    places = array.sharding.devices_indices_map(array.shape).items()
    ordered = sorted(places, key=lambda place: place[0].id)
    return [(device, _box(index, array.shape)) for device, index in ordered]


def _box(index: Iterable[slice], shape: tuple[int, ...]) -> Box:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def gathered(text: str) -> list[str]:
    """What every process says, by rank."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()
    lengths = multihost_utils.process_allgather(np.int32(len(data)))
    size = -(-int(lengths.max()) // _GATHERED_BYTES) * _GATHERED_BYTES  # one program for most runs
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    of_all = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row[:n]).decode() for row, n in zip(of_all, lengths.flat, strict=True)]
