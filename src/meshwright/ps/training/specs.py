"""The variables of a training run on the servers: one per parameter, table and moving state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..shared.placing import ShardPlace, VariableSpec


@dataclass(frozen=True)
class Specs:
    """Where each array of a step lies on the servers, by path.

    ``counts`` is the vector that the metrics of an epoch are summed in.
    """

    params: Mapping[str, VariableSpec] = field(default_factory=dict)
    moving: Mapping[str, VariableSpec] = field(default_factory=dict)
    frozen: Mapping[str, VariableSpec] = field(default_factory=dict)
    tables: Mapping[str, VariableSpec] = field(default_factory=dict)
    counts: VariableSpec | None = None

    @property
    def pulled(self) -> tuple[VariableSpec, ...]:
        """What a worker reads for every step."""
        return (*self.params.values(), *self.moving.values())


def by_shard(spec: VariableSpec) -> list[tuple[VariableSpec, slice]]:
    """Each shard as a variable of its own, and which rows of the whole it holds.

    >>> from meshwright.ps.shared.placing import placed
    >>> spec = placed("w", (5, 2), "float32", num_shards=2, loads_bytes=[0, 0])
    >>> [(one.name, one.shape, rows) for one, rows in by_shard(spec)]
    [('w/0', (3, 2), slice(0, 3, None)), ('w/1', (2, 2), slice(3, 5, None))]
    """
    if spec.is_whole:
        return [(spec, slice(None))]
    found: list[tuple[VariableSpec, slice]] = []
    for shard in spec.shards:
        rows = shard.stop - shard.start
        place = ShardPlace(shard.name, shard.server, 0, rows)
        own = VariableSpec(shard.name, (rows, *spec.shape[1:]), spec.dtype, (place,), spec.is_hash)
        found.append((own, slice(shard.start, shard.stop)))
    return found
