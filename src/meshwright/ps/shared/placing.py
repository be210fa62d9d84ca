"""Which server each shard lies on: by bytes, or in turn. Pure: loads come in, numbers go out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import ClusterError
from .partitioners import row_ranges

# (bytes of each new shard, bytes already on each server, shards placed so far) -> server of each
Placing = Callable[[Sequence[int], Sequence[int], int], list[int]]


def by_bytes(shard_bytes: Sequence[int], loads_bytes: Sequence[int], num_placed: int) -> list[int]:
    """Each shard goes to the server that holds the fewest bytes so far; the first of equals.

    TensorFlow places by count alone, so that one large table and many small variables make a hot
    server (tensorflow#45291).

    >>> by_bytes([100, 10, 10, 10], [0, 0], 0)
    [0, 1, 1, 1]
    """
    loads = list(loads_bytes)
    servers = []
    for num_bytes in shard_bytes:
        server = min(range(len(loads)), key=loads.__getitem__)
        # A shard of no bytes counts as one, so that empty variables spread out as well.
        loads[server] += max(1, num_bytes)
        servers.append(server)
    return servers


def round_robin(
    shard_bytes: Sequence[int], loads_bytes: Sequence[int], num_placed: int
) -> list[int]:
    """Each shard goes to the next server in turn, as in TensorFlow.

    >>> round_robin([100, 10, 10], [0, 0], 1)
    [1, 0, 1]
    """
    return [(num_placed + shard) % len(loads_bytes) for shard in range(len(shard_bytes))]


PLACINGS: dict[str, Placing] = {"bytes": by_bytes, "round_robin": round_robin}


def placing(name: str) -> Placing:
    """The rule of this name: ``"bytes"`` or ``"round_robin"``.

    Raises :class:`~meshwright.errors.ClusterError` for another name.
    """
    if name not in PLACINGS:
        raise ClusterError(
            f"placement must be one of {', '.join(map(repr, PLACINGS))}; received {name!r}."
        )
    return PLACINGS[name]


@dataclass(frozen=True)
class ShardPlace:
    """One shard: its name on the server that holds it, and its rows of the variable."""

    name: str
    server: int
    start: int
    stop: int


@dataclass(frozen=True)
class VariableSpec:
    """A variable and where its shards lie; ``shape`` of a hash table is that of one row behind 0.

    >>> spec = placed("table", (5, 2), "float32", num_shards=2, loads_bytes=[0, 0])
    >>> [(shard.name, shard.server, shard.start, shard.stop) for shard in spec.shards]
    [('table/0', 0, 0, 3), ('table/1', 1, 3, 5)]
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[ShardPlace, ...]
    is_hash: bool = False

    @property
    def is_whole(self) -> bool:
        return len(self.shards) == 1

    def shard_shape(self, shard: ShardPlace) -> tuple[int, ...]:
        return (shard.stop - shard.start, *self.shape[1:]) if self.shape else ()


def wholes_of(specs: Iterable[VariableSpec]) -> dict[str, str]:
    """For each shard of a variable that is cut, which variable it is a part of."""
    return {shard.name: s.name for s in specs if not s.is_whole for shard in s.shards}


def placed(
    name: str,
    shape: Sequence[int],
    dtype: str,
    *,
    num_shards: int,
    loads_bytes: Sequence[int],
    rule: Placing = by_bytes,
    num_placed: int = 0,
    is_hash: bool = False,
) -> VariableSpec:
    """Cut a variable into shards of whole rows, and find a server for each."""
    shape = tuple(shape)
    ranges = row_ranges(shape[0] if shape else 1, num_shards)
    row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
    sizes = [(stop - start) * row_bytes for start, stop in ranges]
    servers = rule(sizes, loads_bytes, num_placed)
    names = [name] if num_shards == 1 else [f"{name}/{shard}" for shard in range(num_shards)]
    shards = zip(names, servers, ranges, strict=True)
    return VariableSpec(
        name, shape, dtype, tuple(ShardPlace(n, s, *rows) for n, s, rows in shards), is_hash
    )
