"""Values and slots that come from elsewhere, such as a checkpoint, put where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ArrayError
from ..wire.message import Message
from .groups import ACCUMULATOR, TOUCHED
from .marks import Marks
from .shards import HashShard, Shard
from .store import Store


def load(store: Store, message: Message) -> None:
    """Do what a ``load`` message says.

    Its head: ``values``, names of variables, an array each; ``tables``, names of hash tables, keys
    and values each, which are then all that the table holds; ``slots``, pairs of a name and its
    slots, an array each; ``steps``, how many gradients the optimizer of each variable has had.
    Raises :class:`~meshwright.errors.ArrayError` where something does not fit.
    """
    head = message.head
    slots: Sequence[tuple[str, Sequence[str]]] = head.get("slots", ())
    values, tables = store.get(head.get("values", ())), store.get(head.get("tables", ()))
    owners = store.get(name for name, _ in slots)
    needed = len(values) + 2 * len(tables) + sum(len(own) for _, own in slots)
    if len(message.arrays) != needed:
        raise ArrayError(f"a load that needs {needed} arrays brings {len(message.arrays)}.")
    arrays = iter(message.arrays)
    for shard in values:
        _load_values(shard, next(arrays))
    for shard in tables:
        _load_table(shard, next(arrays), next(arrays))
    for shard, (_, own) in zip(owners, slots, strict=True):
        _load_slots(shard, own, arrays)
    steps = head.get("steps", {})
    for shard, count in zip(store.get(steps), steps.values(), strict=True):
        shard.steps = int(count)


def _load_values(shard: Shard, values: np.ndarray) -> None:
    if values.shape != shard.shape:
        raise ArrayError(
            f"variable {shard.name!r} has shape {list(shard.shape)}; received {list(values.shape)}."
        )
    np.copyto(shard.values, values, casting="same_kind")
    shard.changed()


def _load_table(shard: Shard, keys: np.ndarray, values: np.ndarray) -> None:
    if not isinstance(shard, HashShard):
        raise ArrayError(f"variable {shard.name!r} is not a hash table and takes no keys.")
    if keys.ndim != 1 or values.shape != (len(keys), *shard.row_shape):
        raise ArrayError(
            f"rows of hash table {shard.name!r} have shape {list(shard.row_shape)}; received keys "
            f"of shape {list(keys.shape)} and values of {list(values.shape)}."
        )
    slots = {
        name: np.full((len(keys), *slot.shape[1:]), shard.first_of(name, values), slot.dtype)
        if slot.ndim
        else slot
        for name, slot in shard.slots.items()
    }
    shard.load(keys, np.array(values, shard.dtype), slots)


def _load_slots(shard: Shard, names: Sequence[str], arrays: Iterator[np.ndarray]) -> None:
    for name in names:
        array = next(arrays)
        if name not in shard.slots:
            raise ArrayError(
                f"variable {shard.name!r} has no slot {name!r}; it has {', '.join(shard.slots)}."
            )
        slot = shard.slot(name)
        if slot.shape != array.shape:
            raise ArrayError(
                f"slot {name!r} of {shard.name!r} has shape {list(slot.shape)}; received "
                f"{list(array.shape)}."
            )
        np.copyto(slot, array, casting="same_kind")
    if ACCUMULATOR in names and TOUCHED in shard.slots and TOUCHED not in names:
        # A model has no such flags: the rows that wait for a step are those that have gathered.
        accumulator = shard.slot(ACCUMULATOR).reshape(shard.shape[0], -1)
        shard.slot(TOUCHED)[...] = (accumulator != 0).any(axis=1)


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


def changes_of(
    shard: Shard, life: str | None, mark: int | None
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Which rows have changed since a mark, and which keys were removed.

    Where the marks are others than those of ``life``, the head says so: then all rows are to be
    taken, and of a hash table their keys are given.
    """
    none = np.zeros(0, np.int64)
    is_known = shard.marks is not None and shard.marks.life == life and mark is not None
    if shard.marks is None:
        shard.marks = Marks(len(shard.full()))
    keys = shard.keys if isinstance(shard, HashShard) else None
    rows, removed = none if keys is None else keys, none
    if is_known:
        at = shard.marks.since(int(mark or 0), shard.shape[0])
        rows = at if keys is None else keys[at]
    if is_known and keys is not None:
        removed = np.setdiff1d(shard.marks.removed_since(int(mark or 0)), keys)
    head = {"known": is_known, "life": shard.marks.life, "mark": shard.marks.asked()}
    return head, [rows, removed]


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
        expected = (len(rows), *shard.full(name).shape[1:])
        if array.shape != expected:
            raise ArrayError(
                f"{len(rows)} rows of {shard.name!r}: expected {name or 'values'} of shape "
                f"{list(expected)}; received {list(array.shape)}."
            )
    at = shard.positions(rows)
    for name, array in full.items():
        shard.full(name)[at] = array
    shard.changed(at)
    for name, value in head["scalars"].items():
        shard.slots[name][...] = value
    shard.steps = int(head["steps"])


def _check_slots(shard: Shard, names: set[str]) -> None:
    if names != set(shard.slots):
        raise ArrayError(
            f"table {shard.name!r} has slots {', '.join(sorted(shard.slots)) or 'none'}; "
            f"received {', '.join(sorted(names)) or 'none'}. Use the optimizer that it was "
            "saved with."
        )
