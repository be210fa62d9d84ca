"""Values and slots that come from elsewhere, such as a checkpoint, put where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...errors import ArrayError
from ..wire.message import Message
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
            f"variable {shard.name!r} has shape {list(shard.shape)}, and {list(values.shape)} came."
        )
    np.copyto(shard.values, values, casting="same_kind")


def _load_table(shard: Shard, keys: np.ndarray, values: np.ndarray) -> None:
    if not isinstance(shard, HashShard):
        raise ArrayError(f"variable {shard.name!r} is not a hash table and takes no keys.")
    if keys.ndim != 1 or values.shape != (len(keys), *shard.row_shape):
        raise ArrayError(
            f"hash table {shard.name!r}, whose rows have shape {list(shard.row_shape)}, came with "
            f"keys of shape {list(keys.shape)} and values of {list(values.shape)}."
        )
    slots = {
        name: np.full((len(keys), *slot.shape[1:]), shard.first[name], slot.dtype)
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
                f"slot {name!r} of {shard.name!r} has shape {list(slot.shape)}, and "
                f"{list(array.shape)} came."
            )
        np.copyto(slot, array, casting="same_kind")
