"""Some rows of a table with their slots, read and written: how a large table is saved in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ArrayError
from .shards import HashShard, Shard


def piece_of(shard: Shard, start: int, stop: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Rows ``start`` to ``stop`` as a head and arrays, which are the shard's own memory.

    The arrays are the keys (of a hash table alone), the values, and the slots that the head names.
    """
    names = [name for name, slot in shard.slots.items() if slot.ndim]
    arrays = [shard.values, *(shard.slot(name) for name in names)]
    head = {
        "num_rows": shard.shape[0],
        "slots": names,
        "scalars": {n: s.item() for n, s in shard.slots.items() if not s.ndim},
        "steps": shard.steps,
    }
    parts = [array[start:stop] for array in arrays]
    if isinstance(shard, HashShard):
        parts.insert(0, shard.keys[start:stop])
    return head, parts


def put_piece(shard: Shard, head: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Write rows and their slots; ``arrays`` are row numbers or keys, values, and slots.

    Rows of a hash table are made. Raises :class:`~meshwright.errors.ArrayError` where it does not
    fit, and nothing is written.
    """
    rows, values, *slots = arrays
    named = dict(zip(head["slots"], slots, strict=True))
    _check_slots(shard, {*named, *head["scalars"]})
    full = {None: values, **named}
    for name, array in full.items():
        wanted = (len(rows), *shard.full(name).shape[1:])
        if array.shape != wanted:
            raise ArrayError(
                f"{len(rows)} rows of {shard.name!r} came with {name or 'values'} of shape "
                f"{list(array.shape)}, and not of {list(wanted)}."
            )
    at = shard.positions(rows)
    for name, array in full.items():
        shard.full(name)[at] = array
    for name, value in head["scalars"].items():
        shard.slots[name][...] = value
    shard.steps = int(head["steps"])


def _check_slots(shard: Shard, names: set[str]) -> None:
    if names != set(shard.slots):
        raise ArrayError(
            f"table {shard.name!r} has slots {', '.join(sorted(shard.slots)) or 'none'}, and came "
            f"with {', '.join(sorted(names)) or 'none'}. Use the optimizer that it was saved with."
        )
