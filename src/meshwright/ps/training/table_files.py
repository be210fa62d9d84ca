"""Tables that are on servers alone, in files beside a checkpoint: written and read by a worker.

A table may be larger than the memory of any worker, and none of it comes through the coordinator:
so it goes in pieces of some rows, each array of a piece a NumPy file. A directory of such files
gets its name when it is complete. Any number of servers may read it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...equal_layers import merged
from ...errors import CheckpointError
from ..server.initial_values import Draw, rows_by_key
from ..shared.client import Servers
from ..shared.cutting import split_rows
from ..shared.placing import ShardPlace, VariableSpec
from ..wire.message import Message
from ..worker.updates import Update
from .worker_step import here

PIECE_BYTES = 32 << 20  # of values and slots that a worker holds at once
_INDEX = "tables.json"
_ROWS, _VALUES = "rows", "values"
_REMOVED = "removed.npy"  # keys that a table has no longer, in an export of what changed

Tables = Mapping[str, VariableSpec]  # by the names of their layers


def save_tables_here(directory: str, tables: Tables) -> str:
    """On a worker: write all tables into a new directory; returns its path."""
    target = Path(directory)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        aside.mkdir(parents=True)
        index = {
            name: {**_described(spec), "shards": _write(aside / f"table{number}", spec)}
            for number, (name, spec) in enumerate(tables.items())
        }
        (aside / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        aside.rename(target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not (target / _INDEX).exists():  # else a worker that was lost had written it all
            raise CheckpointError(
                f"cannot write tables {', '.join(tables)} to {target}: "
                f"{error.strerror or error}. Workers write them, so they must see the directory."
            ) from error
    return str(target)


def restore_tables_here(directory: str, tables: Tables) -> None:
    """On a worker: give the servers all rows and slots of all tables, and no others."""
    source, index = Path(directory), read_index(directory)
    for number, name in enumerate(index):
        if name in tables:
            _read(source / f"table{number}", index[name], tables[name])


def restore_rows_here(directory: str, tables: Tables) -> None:
    """On a worker: the same of the rows alone; slots of optimizers stay as they are."""
    source, index = Path(directory), read_index(directory)
    servers = here().servers
    for number, name in enumerate(index):
        if name in tables:
            _empty(servers, tables[name])
            for _, rows, arrays in _pieces(source / f"table{number}", index[name], 0):
                servers.push([Update(tables[name], "rows_assign", (rows, arrays[0]))])


def read_index(directory: str | Path) -> dict[str, Any]:
    """What a directory of tables holds, by their names.

    Raises :class:`~meshwright.CheckpointError` where it is not there.
    """
    path = Path(directory) / _INDEX
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}. It lists the tables of a checkpoint; "
            "all workers and the coordinator must see its directory."
        ) from error


class SavedRows:
    """The rows of saved tables by their ids; only the ids are held in memory.

    ``layers`` are those of the tables: a key that a hash table does not have gets the row that
    servers would begin it with. With ``values="average"`` rows are their averages, where the files
    have them. The files may be removed once this has opened them. Raises
    :class:`~meshwright.CheckpointError` where they are not there.
    """

    def __init__(
        self, directory: str | Path, layers: Mapping[str, Any], values: str = _VALUES
    ) -> None:
        index = read_index(directory)
        if missing := [name for name in layers if name not in index]:
            raise CheckpointError(
                f"{directory} has no table {', '.join(missing)}; it has {', '.join(index)}."
            )
        self._layers, self._about = layers, index
        self._places = {
            name: _Places.of(Path(directory) / f"table{number}", about, values)
            for number, (name, about) in enumerate(index.items())
            if name in layers
        }
        self._removed = {
            name: _loaded(Path(directory) / f"table{number}" / _REMOVED)
            if about.get("removed")
            else np.zeros(0, np.int64)
            for number, (name, about) in enumerate(index.items())
            if name in layers
        }

    def lookup(self, table: str, ids: np.ndarray) -> np.ndarray:
        """The rows of these ids."""
        about = self._about[table]
        rows = np.zeros((len(ids), *about["row"]), about["dtype"])
        is_settled = self.settle(table, ids, rows)
        if not is_settled.all():
            rows[~is_settled] = self.first_rows(table, ids[~is_settled])
        return rows

    def settle(self, table: str, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Put what the files say of these ids into ``rows``; returns of which they say something.

        They may say that a key was removed: then it has its first row.
        """
        present = self._places[table].fill(ids, rows)
        is_gone = np.isin(ids, self._removed[table]) & ~present
        if is_gone.any():
            rows[is_gone] = self.first_rows(table, ids[is_gone])
        return present | is_gone

    def first_rows(self, table: str, ids: np.ndarray) -> np.ndarray:
        """The rows that these ids begin with."""
        about, layer = self._about[table], self._layers[table]
        draw = Draw.of({"kind": layer.initializer}, (1, layer.dim))
        return rows_by_key(draw, layer.seed, ids, tuple(about["row"]), np.dtype(about["dtype"]))


@dataclass(frozen=True, eq=False)
class _Places:
    """Where the row of each id is: in which file, and at which place in it."""

    files: list[np.ndarray]  # mapped, not read
    ids: np.ndarray  # in ascending order
    of_file: np.ndarray
    at: np.ndarray

    @classmethod
    def of(cls, folder: Path, about: Mapping[str, Any], values: str) -> _Places:
        pieces = [
            (shard, piece, kinds)
            for shard, own in enumerate(about["shards"])
            for piece, kinds in enumerate(own["pieces"])
        ]
        ids = [_loaded(_file(folder, shard, piece, _ROWS)) for shard, piece, _ in pieces]
        rows = [
            _file(folder, shard, piece, values if values in kinds else _VALUES)
            for shard, piece, kinds in pieces
        ]
        order = np.argsort(np.concatenate(ids), kind="stable")
        sizes = [len(part) for part in ids]
        return cls(
            [
                _loaded(file, mmap_mode="r" if size else None)
                for file, size in zip(rows, sizes, strict=True)
            ],
            np.concatenate(ids)[order],
            np.repeat(np.arange(len(pieces)), sizes)[order],
            np.concatenate([np.arange(size) for size in sizes])[order],
        )

    def fill(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Put the rows of these ids into ``rows``; returns which of them exist."""
        near = np.searchsorted(self.ids, ids)
        present = near < len(self.ids)
        present[present] = self.ids[near[present]] == ids[present]
        near = np.where(present, near, 0)
        for file in np.unique(self.of_file[near[present]]):
            here = present & (self.of_file[near] == file)
            rows[here] = self.files[file][self.at[near[here]]]
        return present


def _loaded(file: Path, **options: Any) -> np.ndarray:
    try:
        return np.load(file, allow_pickle=False, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read table file {file}: {error}.") from error


def check_tables(index: Mapping[str, Any], tables: Tables, where: object) -> None:
    """Raise :class:`~meshwright.CheckpointError` that lists all tables that differ."""
    faults = [f"{name} is not in the checkpoint" for name in tables if name not in index]
    for name, spec in tables.items():
        there = {key: index.get(name, {}).get(key) for key in _described(spec)}
        if name in index and there != _described(spec):
            faults.append(f"{name}: expected {_described(spec)}, found {there}")
    if faults:
        listed = "\n  ".join(merged(faults))
        raise CheckpointError(
            f"the tables in {where} do not match the model's:\n  {listed}\nNothing was changed. "
            "Use the model that was saved, or another directory."
        )


def _described(spec: VariableSpec) -> dict[str, Any]:
    num_rows = "hash" if spec.is_hash else spec.shape[0]
    return {"num_rows": num_rows, "row": list(spec.shape[1:]), "dtype": spec.dtype}


# Writing


Pieces = Iterator[tuple[np.ndarray, np.ndarray]]  # ids, and their rows


def write_rows(
    directory: Path,
    tables: Tables,
    rows_of: Callable[[str], Pieces],
    removed: Mapping[str, np.ndarray],
) -> None:
    """Write some rows of tables into a directory that is there, for :class:`SavedRows`.

    Slots of optimizers are left out. ``removed`` are keys that a table has no longer.
    """
    index = {}
    for number, (name, spec) in enumerate(tables.items()):
        folder = directory / f"table{number}"
        folder.mkdir()
        pieces = []
        none = np.zeros(0, np.int64), np.zeros((0, *spec.shape[1:]), spec.dtype)
        for ids, values in itertools.chain([none], rows_of(name)):
            for kind, array in ((_ROWS, ids), (_VALUES, values)):
                _save(_file(folder, 0, len(pieces), kind), array)
            pieces.append([_ROWS, _VALUES])
        if gone := len(removed[name]):
            _save(folder / _REMOVED, removed[name])
        index[name] = {**_described(spec), "shards": [{"pieces": pieces}], "removed": gone}
    (directory / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _write(directory: Path, spec: VariableSpec) -> list[dict[str, Any]]:
    directory.mkdir()
    return [_write_shard(directory, number, spec, s) for number, s in enumerate(spec.shards)]


def _write_shard(
    directory: Path, number: int, spec: VariableSpec, shard: ShardPlace
) -> dict[str, Any]:
    start, pieces, step = 0, [], 1
    while True:
        head, arrays = _piece(shard, start, start + step)
        if not start:
            step = _rows_of(arrays)
            head, arrays = _piece(shard, 0, step)
        stop = start + len(arrays[-1])
        rows = arrays.pop(0) if spec.is_hash else np.arange(start, stop) + shard.start
        named = dict(zip((_ROWS, _VALUES, *head["slots"]), (rows, *arrays), strict=True))
        for kind, array in named.items():
            _save(_file(directory, number, len(pieces), kind), array)
        pieces.append(list(named))
        start = stop
        if start >= head["num_rows"] or not len(rows):
            return {"pieces": pieces, "scalars": head["scalars"], "steps": head["steps"]}


def _piece(shard: ShardPlace, start: int, stop: int) -> tuple[Mapping[str, Any], list[np.ndarray]]:
    head = {"name": shard.name, "start": start, "stop": stop}
    answer = here().servers.ask(shard.server, Message("piece", head))
    return answer.head, list(answer.arrays)


def _rows_of(arrays: list[np.ndarray]) -> int:
    """How many rows a piece may have, going by the first one."""
    row_bytes = sum(a.dtype.itemsize * math.prod(a.shape[1:]) for a in arrays)
    return max(1, PIECE_BYTES // max(1, row_bytes))


def _file(directory: Path, shard: int, piece: int, kind: str) -> Path:
    return directory / f"{shard}.{piece}.{kind}.npy"


def _save(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


# Reading


def _read(directory: Path, about: Mapping[str, Any], spec: VariableSpec) -> None:
    servers = here().servers
    _empty(servers, spec)
    for head, rows, arrays in _pieces(directory, about, len(spec.shards)):
        for shard, at, local in split_rows(spec, rows):
            own = (local, *(array[at] for array in arrays))
            servers.ask(shard.server, Message("put", {"name": shard.name, **head}, own))


def _pieces(
    directory: Path, about: Mapping[str, Any], num_shards: int
) -> Iterator[tuple[dict[str, Any], np.ndarray, list[np.ndarray]]]:
    """A head for each piece, its rows, its values and slots."""
    # Cut anew, rows of shards that have made different numbers of steps come together.
    steps = None if num_shards == len(about["shards"]) else max(s["steps"] for s in about["shards"])
    for shard, own in enumerate(about["shards"]):
        for number, kinds in enumerate(own["pieces"]):
            files = [_file(directory, shard, number, kind) for kind in kinds]
            rows, *arrays = map(_loaded, files)
            head = {
                "slots": kinds[2:],
                "scalars": own["scalars"],
                "steps": own["steps"] if steps is None else steps,
            }
            yield head, rows, arrays


def _empty(servers: Servers, spec: VariableSpec) -> None:
    """Take all rows out of a hash table; of a dense table every row is overwritten later."""
    none = np.zeros([0], np.int64), np.zeros([0, *spec.shape[1:]], spec.dtype)
    for shard in spec.shards if spec.is_hash else ():
        servers.ask(shard.server, Message("load", {"tables": [shard.name]}, none))
