"""A server's state in one file: written aside and renamed, so that it is there whole or not.

The file holds a mark, a checksum, a head in msgpack, and then the bytes of every array. Nothing is
pickled.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ...errors import CheckpointError
from ...files import replacing
from ...units import bytes_text
from ..wire.message import pieces_of
from .applied import AppliedSteps, Fences
from .groups import Group
from .optimizers import twin_of
from .rounds import Gradient, restored
from .shards import HashShard, Shard
from .state import SnapshotInfo, State

_MARK = b"meshwright-ps-snapshot/1\n"
_LENGTHS = struct.Struct("<QI")  # of the head, and its check sum
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """What goes into a file: plain values, and arrays.

    The arrays are the server's own memory until :meth:`copied`.
    """

    head: dict[str, Any]
    arrays: tuple[np.ndarray, ...]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def version(self) -> int:
        return self.head["version"]

    @property
    def number(self) -> int:
        return self.head["number"]

    def copied(self) -> Snapshot:
        """The same, in memory of its own."""
        return Snapshot(self.head, tuple(array.copy() for array in self.arrays))


def snapshot_of(state: State, number: int) -> Snapshot:
    """What a snapshot of this state holds."""
    arrays: list[np.ndarray] = []
    shards = [_shard_head(shard, arrays) for shard in state.store]
    heads = [_held_head(one, arrays) for one in state.rounds.held()]
    head = {
        "task": state.task,
        "generation": state.generation,
        "number": number,
        "version": state.version,
        "shards": shards,
        "groups": [_group_head(group) for group in state.groups],
        "below": state.applied.below,
        "applied": [list(pair) for pair in state.applied.versions.items()],
        "fenced": sorted(state.fences.fenced),
        "rounds": {"applied": state.rounds.applied, "sizes": state.rounds.sizes(), "held": heads},
        "clipped": state.rounds.last,
    }
    described = [(array.dtype.str, list(array.shape)) for array in arrays]
    return Snapshot({**head, "arrays": described}, tuple(arrays))


def write(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write a snapshot to a file, in the place of one that is there.

    Raises :class:`~meshwright.errors.CheckpointError` where it cannot be written; the former file
    is then as it was.
    """
    target = Path(path)
    try:
        with replacing(target) as file:
            packed = bytes(msgpack.packb(snapshot.head) or b"")
            file.write(_MARK + _LENGTHS.pack(len(packed), zlib.crc32(packed)) + packed)
            for array in snapshot.arrays:
                check = 0
                for piece in pieces_of(array, _PIECE_BYTES):
                    check = zlib.crc32(piece, check)
                    file.write(piece)
                file.write(struct.pack("<I", check))
    except OSError as error:
        raise CheckpointError(
            f"the snapshot of {snapshot.head['task']} ({bytes_text(snapshot.num_bytes)}) cannot "
            f"be written to {target}: {error.strerror or error}. The one before is still there."
        ) from error


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot; raises :class:`~meshwright.errors.CheckpointError` for what is none."""
    target = Path(path)
    try:
        with target.open("rb") as file:
            if file.read(len(_MARK)) != _MARK:
                raise CheckpointError(f"{target} is not a server snapshot of this version.")
            length, check = _LENGTHS.unpack(file.read(_LENGTHS.size))
            if length > os.fstat(file.fileno()).st_size:
                raise ValueError("it ends too early")
            packed = file.read(length)
            if zlib.crc32(packed) != check:
                raise ValueError("its head is damaged")
            head = msgpack.unpackb(packed, strict_map_key=False)
            arrays = [_array(file, dtype, shape) for dtype, shape in head["arrays"]]
    except OSError as error:
        raise CheckpointError(f"{target} cannot be read: {error.strerror or error}.") from error
    except (ValueError, struct.error, msgpack.UnpackException) as error:
        raise CheckpointError(f"{target} is damaged: {error}. It cannot be used.") from error
    return Snapshot(head, tuple(arrays))


def restore(snapshot: Snapshot, generation: int = 0, memory_bytes: int | None = None) -> State:
    """The state that a snapshot holds, in its arrays."""
    head, arrays = snapshot.head, iter(snapshot.arrays)
    state = State(head["task"], generation, memory_bytes)
    for head_of in head["shards"]:
        state.store.put(_shard(head_of, arrays))
    for head_of in head["groups"]:
        state.groups.put(_group(head_of))
        if head_of["compensated"]:
            state.backups.keep_all(head_of["names"])
    state.version = state.base = head["version"]
    state.applied = AppliedSteps(head["below"], dict(head["applied"]))
    state.fences = Fences(frozenset(head["fenced"]))
    rounds = head["rounds"]
    gradients = [_gradient_of(head_of, arrays) for head_of in rounds["held"]]
    state.rounds = restored(rounds["applied"], rounds["sizes"], gradients, head.get("clipped", {}))
    state.snapshot = SnapshotInfo(head["number"], head["version"])
    return state


def _shard_head(shard: Shard, arrays: list[np.ndarray]) -> dict[str, Any]:
    is_hash = isinstance(shard, HashShard)
    if is_hash:
        arrays.append(shard.keys)
    arrays.append(shard.values)
    arrays.extend(shard.slot(name) for name in shard.slots)
    return {
        "name": shard.name,
        "init": shard.init,
        "hash": is_hash,
        "slots": list(shard.slots),
        "steps": shard.steps,
        "first": shard.first if isinstance(shard, HashShard) else {},
    }


def _shard(head: dict[str, Any], arrays: Iterator[np.ndarray]) -> Shard:
    if head["hash"]:
        keys, values = next(arrays), next(arrays)
        slots = {name: next(arrays) for name in head["slots"]}
        shard = HashShard(head["name"], values.shape[1:], values.dtype, head["init"])
        shard.load(keys, values, slots)
        shard.first = head["first"]
    else:
        shard = Shard(head["name"], next(arrays), head["init"])
        shard.slots = {name: next(arrays) for name in head["slots"]}
    shard.steps = head["steps"]
    return shard


def _group_head(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "config": dict(group.config),
        "names": list(group.names),
        "no_decay": sorted(group.no_decay),
        "compensated": group.compensated,
        "rate": group.rate,
        "wholes": group.wholes,
    }


def _group(head: dict[str, Any]) -> Group:
    return Group(
        head["name"],
        head["config"],
        twin_of(head["config"]),
        tuple(head["names"]),
        frozenset(head["no_decay"]),
        head["compensated"],
        head["rate"],
        head.get("wholes", {}),
    )


def _held_head(
    one: tuple[int, int, int, Gradient], arrays: list[np.ndarray]
) -> tuple[int, int, str, bool, float, str]:
    number, _, step, gradient = one
    if gradient.rows is not None:
        arrays.append(gradient.rows)
    arrays.append(gradient.values)
    by_rows = gradient.rows is not None
    return number, step, gradient.name, by_rows, gradient.scale, gradient.together


def _gradient_of(head: tuple, arrays: Iterator[np.ndarray]) -> tuple[int, int, Gradient]:
    number, step, name, by_rows, scale, *together = head  # an older one does not tell the last
    rows = next(arrays) if by_rows else None
    return number, step, Gradient(name, next(arrays), rows, scale, 0.0, *together)


def _array(file: Any, dtype: str, shape: list[int]) -> np.ndarray:
    array = np.empty(shape, np.dtype(dtype))
    check = 0
    for piece in pieces_of(array, _PIECE_BYTES):
        if file.readinto(piece) != len(piece):
            raise ValueError("it ends too early")
        check = zlib.crc32(piece, check)
    if struct.unpack("<I", file.read(4))[0] != check:
        raise ValueError("an array in it is damaged")
    return array
