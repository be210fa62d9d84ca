"""Which rows of a variable have changed on its servers since they were last asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..wire.message import Message
from .client import Servers
from .placing import ShardPlace, VariableSpec


@dataclass(frozen=True)
class Since:
    """When a shard was asked, in its own numbers."""

    life: str
    mark: int


@dataclass(frozen=True, eq=False)
class Changed:
    """Rows of one shard, and keys that it has no longer; ``is_all``: these are all of its rows."""

    rows: np.ndarray
    removed: np.ndarray
    is_all: bool
    until: Since


def changed_rows(
    servers: Servers, spec: VariableSpec, since: Mapping[str, Since]
) -> dict[str, Changed]:
    """What has changed in each shard since its entry of ``since``, by the shards' names.

    A shard without an entry, or of a server that was started again, gives all of its rows.
    """
    changed = {}
    for shard in spec.shards:
        before = since.get(shard.name)
        head = {} if before is None else {"life": before.life, "mark": before.mark}
        answer = servers.ask(shard.server, Message("changes", {"name": shard.name, **head}))
        until = Since(answer.head["life"], answer.head["mark"])
        is_all = not answer.head["known"]
        rows = _rows_of(spec, shard, answer.arrays[0], is_all)
        changed[shard.name] = Changed(rows, answer.arrays[1], is_all, until)
    return changed


def _rows_of(spec: VariableSpec, shard: ShardPlace, local: np.ndarray, is_all: bool) -> np.ndarray:
    """Rows of the variable, or keys."""
    if spec.is_hash:
        return local
    return np.arange(shard.start, shard.stop) if is_all else local + shard.start
