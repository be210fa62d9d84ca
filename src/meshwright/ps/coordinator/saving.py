"""Checkpoints of variables and slots, written and read by a worker: none of it comes by here.

The files are those of synchronous training (:mod:`meshwright.checkpoint`): whole arrays by name,
so that any number of servers may read them. They lie where the workers see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...equal_layers import merged
from ...errors import CheckpointError
from ..shared.client import Servers
from ..shared.placing import VariableSpec
from ..worker.context import current
from ..worker.gradients import tell_optimizer
from ..worker.updates import Update

Optimizer = Sequence[Any]  # config, names of variables, options of their gradients
_NOTE = "parameter_server"  # where among a checkpoint's notes
_KEYS = "keys"  # of a hash table: the key of each row


def save_here(
    directory: str,
    step: int,
    specs: Sequence[VariableSpec],
    optimizers: Sequence[Optimizer],
    layout: str,
) -> str:
    """On a worker: write all variables and slots; returns the path of the checkpoint."""
    from ...checkpoint import Checkpoints
    from ...checkpoint.record import newest
    from ...program import TrainState
    from ..shared.slots import read_slots

    servers = _servers()
    by_name = {spec.name: spec for spec in specs}
    values = dict(zip(by_name, servers.read(specs), strict=True))
    slots, steps = read_slots(servers, by_name)
    state = {}
    for spec in specs:
        if spec.is_hash:
            keys = servers.keys(spec)
            order = np.argsort(keys)
            values[spec.name] = values[spec.name][order]
            slots[spec.name] = {kind: _by(array, order) for kind, array in slots[spec.name].items()}
            state[f"{spec.name}/{_KEYS}"] = keys[order]
    flat = {f"{name}/{kind}": a for name, own in slots.items() for kind, a in own.items()}
    notes = {_NOTE: {"optimizers": [list(one) for one in optimizers], "steps": steps}}
    with Checkpoints(directory, keep=None) as checkpoints:
        checkpoints.save(step, TrainState(values, state, flat, {}), layout=layout, notes=notes)
        checkpoints.wait()
        written = newest(checkpoints.directory, step)
    assert written is not None
    return str(written.directory)


def restore_here(directory: str, specs: Sequence[VariableSpec]) -> int:
    """On a worker: give the servers what a checkpoint holds; returns its step."""
    from ...checkpoint import read_checkpoint, restore_state
    from ...program import TrainState
    from ..shared.slots import load_slots

    servers = _servers()
    info = read_checkpoint(directory)
    parts: dict[str, dict[str, np.ndarray]] = {"params": {}, "state": {}, "slots": {}}
    for array in info.arrays:
        parts[array.part][array.path] = np.broadcast_to(np.zeros((), array.dtype), array.dims)
    state = restore_state(info, TrainState(**parts, metrics={}))
    notes = info.notes.get(_NOTE, {"optimizers": [], "steps": 0})
    by_name = {spec.name: spec for spec in specs}
    for name, value in state.params.items():
        _give(servers, by_name[name], np.asarray(value), state.state.get(f"{name}/{_KEYS}"))
    for config, names, options in notes["optimizers"]:
        tell_optimizer(servers, {}, config, [by_name[name] for name in names], options)
    slots: dict[str, dict[str, np.ndarray]] = {}
    for path, value in state.slots.items():
        name, _, kind = path.rpartition("/")
        slots.setdefault(name, {})[kind] = np.asarray(value)
    own = {name: by_name[name] for name in slots}
    load_slots(servers, own, slots, notes["steps"])
    return info.step


def names_in(directory: str | Path) -> tuple[int, frozenset[str]]:
    """The step of the newest checkpoint, and the names of its variables; reads no array."""
    from ...checkpoint import read_checkpoint

    info = read_checkpoint(directory)
    return info.step, frozenset(array.path for array in info.arrays if array.part == "params")


def check_fits(directory: str | Path, specs: Mapping[str, VariableSpec]) -> list[Optimizer]:
    """The optimizers of a checkpoint that fits these variables; reads no array.

    Raises :class:`~meshwright.errors.CheckpointError` that lists every variable that is missing
    on either side, or has another shape or dtype.
    """
    from ...checkpoint import read_checkpoint

    info = read_checkpoint(directory)
    saved = {array.path: array for array in info.arrays if array.part == "params"}
    faults = [f"{name} is not in the checkpoint" for name in specs if name not in saved]
    for name, array in saved.items():
        spec = specs.get(name)
        if spec is None:
            faults.append(f"{name} is in the checkpoint, and no variable has this name")
        elif spec.dtype != array.dtype or not _same_shape(spec, array.dims):
            faults.append(
                f"{name} is {array.dtype}{list(array.dims)} in the checkpoint, and "
                f"{spec.dtype}{list(spec.shape)} here"
            )
    if faults:
        listed = "\n  ".join(merged(faults))
        raise CheckpointError(
            f"{info.directory} does not fit the variables:\n  {listed}\n"
            "Make the variables with the names and shapes that they were saved with."
        )
    return list(info.notes.get(_NOTE, {"optimizers": []})["optimizers"])


def _give(servers: Servers, spec: VariableSpec, value: np.ndarray, keys: np.ndarray | None) -> None:
    if spec.is_hash:
        assert keys is not None
        servers.push([Update(spec, "rows_assign", (np.asarray(keys), value))])
    else:
        servers.push([Update(spec, "assign", (value,))])


def _by(array: np.ndarray, order: np.ndarray) -> np.ndarray:
    return array[order] if array.ndim else array


def _same_shape(spec: VariableSpec, dims: Sequence[int]) -> bool:
    return tuple(dims[1:]) == spec.shape[1:] if spec.is_hash else tuple(dims) == spec.shape


def _servers() -> Servers:
    context = current()
    assert context is not None
    return context.servers
