"""Optimizer slots between a Keras model and the servers, whole on one side and cut on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..wire.message import Message
from .client import Servers
from .cutting import by_server
from .placing import ShardPlace, VariableSpec, wholes_of

Slots = dict[str, dict[str, np.ndarray]]  # parameter -> kind ("momentum") -> whole array


def optimizer_heads(
    config: Mapping[str, Any],
    specs: Sequence[VariableSpec],
    group: str,
    *,
    without_decay: Sequence[VariableSpec] = (),
    compensation: bool = False,
) -> dict[int, dict[str, Any]]:
    """The message about the optimizer of these variables, for each server that has a part."""
    wholes = wholes_of(specs)
    undecayed = {shard.name for spec in without_decay for shard in spec.shards}
    heads: dict[int, dict[str, Any]] = {}
    for server, shards in by_server(specs).items():
        names = [shard.name for _, shard in shards]
        heads[server] = {
            "group": group,
            "config": dict(config),
            "names": names,
            "exclude_from_weight_decay": [name for name in names if name in undecayed],
            "compensation": compensation,
            "wholes": wholes,
        }
    return heads


def set_rate(
    servers: Servers, learning_rate: float, specs: Sequence[VariableSpec], group: str
) -> None:
    """Set the learning rate of a group, on every server that holds a part of it."""
    for server in by_server(specs):
        servers.ask(server, Message("rate", {"group": group, "learning_rate": learning_rate}))


def read_slots(servers: Servers, specs: Mapping[str, VariableSpec]) -> tuple[Slots, int]:
    """The slots of variables by path, and how many steps their optimizers have made at most."""
    slots: dict[str, dict[str, np.ndarray]] = {}  # by shard
    steps = [0]
    for server, shards in by_server(specs.values()).items():
        answer = servers.ask(server, Message("slots", {"names": [s.name for _, s in shards]}))
        arrays = iter(answer.arrays)
        for name, kinds in answer.head["slots"]:
            slots[name] = {kind: next(arrays) for kind in kinds}
        steps += answer.head["steps"].values()
    return {path: _whole(spec, slots) for path, spec in specs.items()}, max(steps)


def load_slots(
    servers: Servers, specs: Mapping[str, VariableSpec], slots: Slots, steps: int
) -> None:
    """Set slots of variables by path, and how many steps their optimizers have made.

    Raises :class:`~meshwright.ArrayError` for a slot that an optimizer there does not have.
    """
    paths = {spec.name: path for path, spec in specs.items()}
    for server, shards in by_server(specs.values()).items():
        named: list[Any] = []
        arrays: list[np.ndarray] = []
        for spec, shard in shards:
            own = slots.get(paths[spec.name], {})
            named.append([shard.name, list(own)])
            arrays += [_part(spec, shard, array) for array in own.values()]
        head = {
            "values": [],
            "slots": named,
            "steps": {shard.name: steps for _, shard in shards},
        }
        servers.ask(server, Message("load", head, tuple(arrays)))


def _whole(spec: VariableSpec, slots: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    parts = [slots[shard.name] for shard in spec.shards]
    return {kind: _joined(spec, [part[kind] for part in parts]) for kind in parts[0]}


def _joined(spec: VariableSpec, parts: list[Any]) -> np.ndarray:
    if spec.is_whole or np.ndim(parts[0]) == 0:  # a scalar is the same for all shards
        return np.array(parts[0])
    return np.concatenate([np.asarray(part) for part in parts])


def _part(spec: VariableSpec, shard: ShardPlace, array: np.ndarray) -> np.ndarray:
    whole = spec.is_whole or np.ndim(array) == 0
    return np.asarray(array if whole else array[shard.start : shard.stop])
