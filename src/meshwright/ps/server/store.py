"""The variables of one server, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ArrayError, TaskError, UnknownVariableError
from ...units import bytes_text
from .initial_values import Draw, rows_of
from .shards import HashShard, Shard


class Store:
    """The shards that a server holds; ``memory_bytes`` is the most that they may take together."""

    def __init__(self, task: str, memory_bytes: int | None = None) -> None:
        self.task = task
        self.memory_bytes = memory_bytes
        self._shards: dict[str, Shard] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards.values())

    @property
    def names(self) -> list[str]:
        return list(self._shards)

    @property
    def variable_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self)

    @property
    def slot_bytes(self) -> int:
        return sum(shard.slot_bytes for shard in self)

    def get(self, names: Iterable[str]) -> list[Shard]:
        """The shards of these names, in their order.

        Raises :class:`~meshwright.errors.UnknownVariableError`, which names all that are not here.
        """
        names = list(names)
        missing = [name for name in names if name not in self._shards]
        if missing:
            raise UnknownVariableError(
                f"{self.task} has no variable {', '.join(map(repr, missing))}. "
                f"It holds {len(self._shards)}; create a variable before it is used.",
                self.task,
            )
        return [self._shards[name] for name in names]

    def one(self, name: str) -> Shard:
        """The shard of this name; raises as :meth:`get`."""
        return self.get([name])[0]

    def create(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        init: Mapping[str, Any],
        arrays: Sequence[np.ndarray],
    ) -> bool:
        """Make a variable, unless it exists with this shape and dtype; returns whether it did."""
        kind = _dtype(name, dtype)
        if name in self._shards:
            self._check_same(name, tuple(shape), kind, init)
            return False
        self.check_room(name, 0 if init.get("hash") else math.prod(shape) * kind.itemsize)
        try:
            self.put(_shard_of(name, tuple(shape), kind, dict(init), arrays))
        except MemoryError as error:
            raise self._too_large(name, math.prod(shape) * kind.itemsize) from error
        return True

    def put(self, shard: Shard) -> None:
        """Put a shard in, in the place of one of its name."""
        self._shards[shard.name] = shard
        if isinstance(shard, HashShard):
            shard.check_room = lambda more_bytes: self.check_room(shard.name, more_bytes)

    def check_room(self, name: str, more_bytes: int) -> None:
        """Raise :class:`~meshwright.errors.TaskError` if as many bytes more are too many."""
        if self.memory_bytes is None or not more_bytes:
            return
        if self.variable_bytes + self.slot_bytes + more_bytes > self.memory_bytes:
            raise self._too_large(name, more_bytes)

    def _too_large(self, name: str, more_bytes: int) -> TaskError:
        num_bytes_here = self.variable_bytes + self.slot_bytes
        limit = "" if self.memory_bytes is None else f" of {bytes_text(self.memory_bytes)}"
        return TaskError(
            f"variable {name!r} takes {bytes_text(more_bytes)} more on {self.task}, which holds "
            f"{bytes_text(num_bytes_here)}{limit} already. Use more servers, or a partitioner "
            "that cuts the variable into more shards.",
            self.task,
        )

    def _check_same(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, init: Mapping[str, Any]
    ) -> None:
        there = self._shards[name]
        is_hash = bool(init.get("hash"))
        same_shape = there.row_shape == shape[1:] if is_hash else there.shape == shape
        if there.is_hash != is_hash or not same_shape or there.dtype != dtype:
            raise ArrayError(
                f"variable {name!r} is on {self.task} as {_described(there)}; it is asked for as "
                f"{'a hash table of rows ' if is_hash else ''}{dtype}{list(shape)}. "
                "Give the other variable another name."
            )


def _described(shard: Shard) -> str:
    if shard.is_hash:
        return f"a hash table of rows {shard.dtype}{list(shard.row_shape)}"
    return f"{shard.dtype}{list(shard.shape)}"


def _dtype(name: str, dtype: str) -> np.dtype:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.kind not in "fiub":
        raise ArrayError(
            f"variable {name!r}: dtype {dtype} is not supported by servers, which hold floats, "
            "integers and booleans of NumPy; bfloat16 may be used on the wire, and by the workers."
        )
    return kind


def _shard_of(
    name: str, shape: tuple[int, ...], dtype: np.dtype, init: dict, arrays: Sequence[np.ndarray]
) -> Shard:
    if init.get("hash"):
        return HashShard(name, shape[1:], dtype, init)
    if init["kind"] == "value":
        if len(arrays) != 1 or arrays[0].shape != shape:
            shapes = [list(array.shape) for array in arrays]
            raise ArrayError(
                f"variable {name!r} of shape {list(shape)} is given values of {shapes}."
            )
        return Shard(name, np.array(arrays[0], dtype), init)
    return Shard(name, _draw_rows(name, shape, dtype, init), init)


def _draw_rows(name: str, shape: tuple[int, ...], dtype: np.dtype, init: dict) -> np.ndarray:
    full_shape = tuple(init.get("full_shape") or shape)
    start, stop = init.get("rows") or (0, shape[0] if shape else 1)
    draw = Draw.of(init, full_shape)
    if draw.law != "constant" and dtype.kind != "f":
        raise ArrayError(f"variable {name!r} of {dtype} cannot be made by {init['kind']!r}.")
    rows = shape[0] if shape else 1
    if stop - start != rows or shape[1:] != full_shape[1:] or not 0 <= start <= stop:
        raise ArrayError(
            f"variable {name!r} of shape {list(shape)} does not fit rows {start} to {stop} "
            f"of {list(full_shape)}."
        )
    seed = int(init.get("seed") or 0)
    return rows_of(draw, seed, full_shape or (1,), start, stop, dtype).reshape(shape)
