"""How variables, rows and updates are cut into shards, and put together again: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ArrayError
from ..wire.message import Message
from ..worker.updates import Update
from .placing import ShardPlace, VariableSpec


def split(update: Update) -> Iterable[tuple[int, str, tuple[np.ndarray, ...]]]:
    """Server, name there and arrays of each shard that an update touches."""
    spec = update.spec
    if update.by_rows:
        rows = checked_rows(spec, update.arrays[0])
        for shard, at, local in split_rows(spec, rows):
            yield shard.server, shard.name, (local, *(part[at] for part in update.arrays[1:]))
    elif spec.is_whole:
        yield spec.shards[0].server, spec.shards[0].name, update.arrays
    else:
        for shard in spec.shards:
            parts = tuple(rows_of(spec, shard, array) for array in update.arrays)
            yield shard.server, shard.name, parts


def rows_of(spec: VariableSpec, shard: ShardPlace, array: np.ndarray) -> np.ndarray:
    if spec.is_whole:
        return array
    return np.broadcast_to(array, spec.shape)[shard.start : shard.stop]


def split_rows(
    spec: VariableSpec, rows: np.ndarray
) -> Iterable[tuple[ShardPlace, Any, np.ndarray]]:
    """Of each shard that is touched: which entries of ``rows`` lie there, and their local rows."""
    if spec.is_whole:
        yield spec.shards[0], slice(None), rows
        return
    if spec.is_hash:
        owner = rows % len(spec.shards)
    else:
        stops = np.array([shard.stop for shard in spec.shards])
        owner = np.searchsorted(stops, rows, side="right")
    for index, shard in enumerate(spec.shards):
        at = np.flatnonzero(owner == index)
        if len(at):
            yield shard, at, rows[at] if spec.is_hash else rows[at] - shard.start


def checked_rows(spec: VariableSpec, rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu") or not spec.shape:
        raise ArrayError(
            f"rows of {spec.name!r} (shape {spec.shape}) are one dim of whole numbers; received "
            f"{rows.dtype} of shape {rows.shape}."
        )
    rows = rows.astype(np.int64, copy=False)
    if not spec.is_hash and rows.size and not (rows.min() >= 0 and rows.max() < spec.shape[0]):
        wrong = rows[(rows < 0) | (rows >= spec.shape[0])]
        raise ArrayError(
            f"row {wrong[0]} is out of range for table {spec.name!r}, which has {spec.shape[0]} "
            f"rows, 0 to {spec.shape[0] - 1} ({len(wrong)} of {len(rows)} requested rows are out "
            "of range)."
        )
    return rows


def by_server(specs: Iterable[VariableSpec]) -> dict[int, list[tuple[VariableSpec, ShardPlace]]]:
    """The shards of these variables, for each server that has some."""
    shards: dict[int, list[tuple[VariableSpec, ShardPlace]]] = {}
    for spec in specs:
        for shard in spec.shards:
            shards.setdefault(shard.server, []).append((spec, shard))
    return shards


def assembled(
    specs: Sequence[VariableSpec], names_of: Mapping[int, list[str]], answers: Sequence[Message]
) -> list[np.ndarray]:
    """Variables from the shards that the servers of ``names_of`` sent, in that order."""
    parts = {
        (server, name): array
        for (server, names), answer in zip(names_of.items(), answers, strict=True)
        for name, array in zip(names, answer.arrays, strict=True)
    }
    return [
        _whole(spec, [parts[shard.server, shard.name] for shard in spec.shards]) for spec in specs
    ]


def _whole(spec: VariableSpec, parts: list[np.ndarray]) -> np.ndarray:
    if spec.is_whole:
        return parts[0] if spec.is_hash else parts[0].reshape(spec.shape)  # of keys there are many
    return np.concatenate(parts)
