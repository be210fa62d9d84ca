"""The newest state in the memory of hosts, kept by their agents: what a lost process does not take.

Each host holds every piece of the state that lies on its devices, once, and those that lie on the
``peers`` hosts before it and nowhere else; pieces travel between devices, as gradients do. After
Gemini (Wang et al., SOSP 2023), without a network of its own.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..launch.joining import GENERATION
from ..launch.memory import PIECES, piece_name
from ..program import TrainState
from .record import PARTS, CheckpointInfo, check_same, from_record, to_record
from .snapshot import as_saved, describe, laid_out, snapshot, spread_again

_MARK_BYTES = 16  # step + 1, or 0 while it is written; length of the header
_GATHERED_BYTES = 2**16
Box = tuple[tuple[int, int], ...]  # begin and end in each dim


class Copies:
    """Copies of the run in ``directory`` in ``memory``, a folder of :class:`HostMemory`.

    ``peers`` is in the memory of how many other hosts each piece is held, too. All processes of a
    group make the same calls in the same order.
    """

    def __init__(self, memory: Path, directory: Path, peers: int) -> None:
        self._memory, self._run, self._peers = memory, str(directory.absolute()), peers
        self._generation = int(os.environ.get(GENERATION) or 0)
        self._hosts = _Hosts.of_this_group()
        self._thread = ThreadPoolExecutor(1, "meshwright-copies")
        self._under_way: Future[None] | None = None

    def newest(self, beyond: int) -> MemoryInfo | None:
        """The newest copy that the hosts have whole, of a later step than ``beyond``."""
        held = _held_in(self._memory, self._run) if self._hosts.is_leader else {}
        of_all = [_read_held(text) for text in _gathered(json.dumps(_to_json(held)))]
        for key in sorted({key for held in of_all for key in held}, reverse=True):
            if key[0] <= beyond:
                break
            records = [held[key][0] for held in of_all if key in held]
            info = from_record(Path(f"memory, {self._run}"), json.loads(records[0]))
            pieces = {rank: held[key][1] for rank, held in enumerate(of_all) if key in held}
            if _is_whole(info, pieces.values()):
                return MemoryInfo(info, key, pieces)
        return None

    def restore(self, found: MemoryInfo, like: TrainState) -> TrainState:
        """The state of a copy, laid out as ``like``; see :meth:`Checkpoints.restore`."""
        target, like = like, as_saved(found.info, like)
        check_same(found.info, describe(like))
        here = _Reader(self._memory, self._run, found.key)

        def one(part: str, path: str, value: Any) -> Any:
            key = f"{part}/{path}"
            return laid_out(self._whole(key, value, found, here), value)

        parts = zip(PARTS, like, strict=True)
        state = TrainState(
            *({p: one(part, p, v) for p, v in paths.items()} for part, paths in parts)
        )
        return spread_again(state, target)

    def _whole(self, key: str, like: Any, found: MemoryInfo, here: _Reader) -> Any:
        """An array of the copy on this host, with what only other hosts hold."""
        import numpy as np
        from jax.experimental import multihost_utils

        saved = next(array for array in found.info.arrays if array.key == key)
        whole = np.empty(saved.dims, like.dtype)
        for box in sorted({box for pieces in found.pieces.values() for box in pieces.get(key, ())}):
            at = tuple(slice(begin, end) for begin, end in box)
            holders = [rank for rank in found.pieces if box in found.pieces[rank].get(key, ())]
            value = here.read(key, box)
            if not set(self._hosts.leaders) <= set(holders):
                sent = np.empty(whole[at].shape, whole.dtype) if value is None else value
                is_source = self._hosts.rank == holders[0]
                value = multihost_utils.broadcast_one_to_all(sent, is_source)
            whole[at] = value
        return whole

    def save(
        self,
        info: CheckpointInfo,
        state: TrainState,
        late_notes: Callable[[], Mapping[str, Any]],
        then: Callable[[], None],
    ) -> None:
        """Copy a state in the background, once the copy before is written."""
        self.wait()
        arrays = snapshot(state)
        moved = [self._hosts.moved(arrays, by) for by in range(1, self._peers + 1)]
        self._under_way = self._thread.submit(self._write, info, arrays, moved, late_notes, then)

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """End the thread; what is being written may stay unfinished."""
        self._thread.shutdown(wait=False)

    def _write(
        self,
        info: CheckpointInfo,
        arrays: dict[str, Any],
        moved: list[dict[str, Any]],
        late_notes: Callable[[], Mapping[str, Any]],
        then: Callable[[], None],
    ) -> None:
        import numpy as np

        record = to_record(replace(info, notes={**info.notes, **late_notes()}))
        pieces = [
            (key, box, np.ascontiguousarray(piece))
            for key, array in arrays.items()
            for box, piece in self._hosts.pieces(array)
        ]
        pieces += [
            (key, box, np.ascontiguousarray(piece))
            for by, of_peer in enumerate(moved, 1)
            for key, array in of_peer.items()
            for box, piece in self._hosts.pieces_of_peer(array, by)
        ]
        offset, places = 0, list[tuple[str, Box, int]]()
        for key, box, piece in pieces:
            places.append((key, box, offset))
            offset += piece.nbytes
        header = {
            "run": self._run,
            "key": [info.step, self._generation],
            "record": json.dumps(record),
            "pieces": places,
        }
        values = (piece for *_, piece in pieces)
        to = _oldest(self._memory, self._hosts.place, self._run)
        _write_piece(to, info.step, header, values)
        then()


@dataclass(frozen=True)
class MemoryInfo:
    """A copy that the hosts hold whole: its record, and which boxes each rank can read."""

    info: CheckpointInfo
    key: tuple[int, int]  # step and generation
    pieces: dict[int, dict[str, list[Box]]]  # by rank, of each host the first one


# What lies where


class _Hosts:
    """Which ranks, and so which devices, lie on which host."""

    def __init__(self, rank: int, place: int, first_of: list[int]) -> None:
        self.rank, self.place, self._first_of = rank, place, first_of
        self.leaders = sorted(set(first_of))
        self.is_leader = rank in self.leaders

    @classmethod
    def of_this_group(cls) -> _Hosts:
        import jax

        rank = jax.process_index()
        place = int(os.environ.get("MESHWRIGHT_LOCAL_RANK") or 0)
        return cls(rank, place, [int(text) for text in _gathered(str(rank - place))])

    def _host(self, device: Any) -> int:
        return self.leaders.index(self._first_of[device.process_index])

    def pieces(self, array: Any) -> Iterator[tuple[Box, Any]]:
        """The pieces of an array that this process writes: each on this host once."""
        import jax

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
        import jax

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
        seen = set[Box]()
        for number, device in enumerate(devices):
            if hosts[number] != self._here or number not in comes_from:
                continue
            box = boxes[devices[comes_from[number]]]
            if box in lie_here or box in seen:
                continue
            seen.add(box)
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
    """One compiled function that moves every piece of arrays which lie so to the peer's device."""
    import jax

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


def _is_whole(info: CheckpointInfo, hosts: Iterable[dict[str, list[Box]]]) -> bool:
    """Whether these hosts together have every element; pieces are equal, or lie apart."""
    boxes: dict[str, set[Box]] = {}
    for host in hosts:
        for key, of_key in host.items():
            boxes.setdefault(key, set()).update(of_key)
    return all(
        sum(math.prod(end - begin for begin, end in box) for box in boxes.get(array.key, ()))
        == math.prod(array.dims)
        for array in info.arrays
    )


def _gathered(text: str) -> list[str]:
    """What every process says, by rank."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return [text]
    said = text.encode()
    lengths = multihost_utils.process_allgather(np.int32(len(said)))
    size = -(-int(lengths.max()) // _GATHERED_BYTES) * _GATHERED_BYTES  # one program for most runs
    padded = np.zeros(size, np.uint8)
    padded[: len(said)] = np.frombuffer(said, np.uint8)
    of_all = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row[:n]).decode() for row, n in zip(of_all, lengths.flat, strict=True)]


# The pieces of memory: a mark, the length of the header, the header, the values


def _write_piece(path: Path, step: int, header: dict[str, Any], values: Iterable[Any]) -> None:
    text = json.dumps(header).encode()
    with path.open("r+b") as file:
        file.write(bytes(_MARK_BYTES))
        file.flush()  # from here on it is not complete
        file.write(text)
        for value in values:
            file.write(memoryview(value.reshape(-1).view("uint8")))
        file.truncate()
        file.flush()
        file.seek(0)
        file.write((step + 1).to_bytes(8, "little") + len(text).to_bytes(8, "little"))


def _header(path: Path) -> tuple[dict[str, Any], int] | None:
    """The header of a piece of memory and where its values begin; ``None`` if it is unfinished."""
    with path.open("rb") as file:
        mark = file.read(_MARK_BYTES)
        if not any(mark[:8]):
            return None
        length = int.from_bytes(mark[8:], "little")
        return json.loads(file.read(length)), _MARK_BYTES + length


def _oldest(memory: Path, place: int, run: str) -> Path:
    """The piece of this rank that is needed least."""

    def age(path: Path) -> tuple[int, int]:
        found = _header(path)
        if found is None or found[0]["run"] != run:
            return (-1, -1)
        step, generation = found[0]["key"]
        return (step, generation)

    return min((memory / piece_name(place, piece) for piece in range(PIECES)), key=age)


def _headers(memory: Path, run: str) -> Iterator[tuple[Path, dict[str, Any], int]]:
    for path in sorted(memory.iterdir()):
        found = _header(path)
        if found is not None and found[0]["run"] == run:
            yield path, *found


Held = dict[tuple[int, int], tuple[str, dict[str, list[Box]]]]  # record and boxes, by key


def _held_in(memory: Path, run: str) -> Held:
    held: Held = {}
    for _, header, _ in _headers(memory, run):
        step, generation = header["key"]
        _, boxes = held.setdefault((step, generation), (header["record"], {}))
        for key, box, _ in header["pieces"]:
            boxes.setdefault(key, []).append(_as_box(box))
    return held


def _to_json(held: Held) -> list[Any]:
    return [[*key, record, boxes] for key, (record, boxes) in held.items()]


def _read_held(text: str) -> Held:
    return {
        (step, generation): (record, {k: [_as_box(b) for b in of_k] for k, of_k in boxes.items()})
        for step, generation, record, boxes in json.loads(text)
    }


def _as_box(box: list[list[int]]) -> Box:
    return tuple((begin, end) for begin, end in box)


class _Reader:
    """Reads the pieces of one copy in the memory of this host."""

    def __init__(self, memory: Path, run: str, key: tuple[int, int]) -> None:
        self._at: dict[tuple[str, Box], tuple[Path, int]] = {}
        self._dtypes: dict[str, str] = {}
        for path, header, begin in _headers(memory, run):
            if tuple(header["key"]) != key:
                continue
            for array in json.loads(header["record"])["arrays"]:
                self._dtypes[f"{array[0]}/{array[1]}"] = array[3]
            for name, box, offset in header["pieces"]:
                self._at[name, _as_box(box)] = (path, begin + offset)

    def read(self, key: str, box: Box) -> Any:
        """One piece; ``None`` where this host does not hold it."""
        import jax.numpy as jnp
        import numpy as np

        if (key, box) not in self._at:
            return None
        path, offset = self._at[key, box]
        shape = tuple(end - begin for begin, end in box)
        dtype = jnp.dtype(self._dtypes[key])
        if not math.prod(shape):
            return np.empty(shape, dtype)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            return np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape).copy()
