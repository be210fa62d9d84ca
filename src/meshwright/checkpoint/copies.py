"""The newest state in the memory of hosts, kept by their agents: what a lost process does not take.

Each host holds every piece of the state that lies on its devices, once, and those that lie on the
``peers`` hosts before it and nowhere else; pieces travel between devices, as gradients do. After
Gemini (Wang et al., SOSP 2023), without a network of its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from ..launch.joining import GENERATION
from ..program import TrainState
from .holders import Box, Hosts, gathered
from .pieces import PieceReader, held_as_json, held_in, oldest, read_held, write_piece
from .record import PARTS, CheckpointInfo, check_same, from_record, to_record
from .snapshot import as_saved, describe, laid_out, snapshot, spread_again


class Copies:
    """Copies of the run in ``directory`` in ``memory``, a folder of :class:`HostMemory`.

    ``peers`` is in the memory of how many other hosts each piece is held, too. All processes of a
    group make the same calls in the same order.
    """

    def __init__(self, memory: Path, directory: Path, peers: int) -> None:
        self._memory, self._run, self._peers = memory, str(directory.absolute()), peers
        self._generation = int(os.environ.get(GENERATION) or 0)
        self._hosts = Hosts.of_this_group()
        self._thread = ThreadPoolExecutor(1, "meshwright-copies")
        self._under_way: Future[None] | None = None

    def newest(self, beyond: int) -> MemoryInfo | None:
        """The newest copy that the hosts have whole, of a later step than ``beyond``.

        What this start of the group has written itself is of a run that has ended.
        """
        held = held_in(self._memory, self._run) if self._hosts.is_leader else {}
        of_all = [read_held(text) for text in gathered(json.dumps(held_as_json(held)))]
        keys = {key for held in of_all for key in held if key[1] < self._generation}
        for key in sorted(keys, reverse=True):
            if key[0] <= beyond:
                break
            records = [held[key][0] for held in of_all if key in held]
            info = from_record(Path(f"memory, {self._run}"), json.loads(records[0]))
            pieces = {rank: held[key][1] for rank, held in enumerate(of_all) if key in held}
            if _is_whole(info, pieces.values()):
                return MemoryInfo(info, key, pieces)
        return None

    def restore(self, copy: MemoryInfo, like: TrainState) -> TrainState:
        """The state of a copy, laid out as ``like``; see :meth:`Checkpoints.restore`."""
        target, like = like, as_saved(copy.info, like)
        check_same(copy.info, describe(like))
        here = PieceReader(self._memory, self._run, copy.key)

        def one(part: str, path: str, value: Any) -> Any:
            key = f"{part}/{path}"
            return laid_out(self._whole(key, value, copy, here), value)

        parts = zip(PARTS, like, strict=True)
        state = TrainState(
            *({p: one(part, p, v) for p, v in paths.items()} for part, paths in parts)
        )
        return spread_again(state, target)

    def _whole(self, key: str, like: Any, copy: MemoryInfo, here: PieceReader) -> Any:
        """An array of the copy on this host, with what only other hosts hold."""
        saved = next(array for array in copy.info.arrays if array.key == key)
        whole = np.empty(saved.dims, like.dtype)
        for box in sorted({box for pieces in copy.pieces.values() for box in pieces.get(key, ())}):
            at = tuple(slice(begin, end) for begin, end in box)
            holders = [rank for rank in copy.pieces if box in copy.pieces[rank].get(key, ())]
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
        to = oldest(self._memory, self._hosts.place, self._run)
        write_piece(to, info.step, header, values)
        then()


@dataclass(frozen=True)
class MemoryInfo:
    """A copy that the hosts hold whole: its record, and which boxes each rank can read."""

    info: CheckpointInfo
    key: tuple[int, int]  # step and generation
    pieces: dict[int, dict[str, list[Box]]]  # by rank, of each host the first one


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
