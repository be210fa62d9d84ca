"""The values that a model is served with, and what they take on each device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..program import TrainState
from .api import Weight
from .tables import Rows
from .turns import turn_on


@dataclass(frozen=True, eq=False)
class Weights:
    """The values that a batch is computed with; a batch has one of these from begin to end."""

    version: str
    state: Any  # a TrainState; of a model of stages one for each, None for those of other processes
    rows: Rows | None = None  # of tables on parameter servers


def states_of(state: Any) -> list[TrainState]:
    """The state of a model, or those of its stages in this process."""
    states = [state] if isinstance(state, TrainState) else state
    return [each for each in states if each is not None]


def not_finite(state: Any) -> list[str]:
    """The parameters that hold NaN or infinity."""
    import jax
    import jax.numpy as jnp

    def is_finite(value: Any) -> Any:
        floats = jnp.issubdtype(value.dtype, jnp.floating)
        return jnp.isfinite(value).all() if floats else jnp.array(True)

    look = jax.jit(lambda values: {p: is_finite(v) for p, v in values.items()})
    flags = []
    for own in states_of(state):
        devices = {d for value in jax.tree.leaves(own.params) for d in value.sharding.device_set}
        with turn_on(devices):
            flags.append(jax.block_until_ready(look(own.params)))
    return list(dict.fromkeys(path for of in flags for path, flag in of.items() if not bool(flag)))


def bytes_by_device(state: Any) -> dict[str, int]:
    """The bytes of all arrays on each device of this process."""
    import jax

    result: dict[str, int] = {}
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            name = f"{shard.device.platform}:{shard.device.id}"
            result[name] = result.get(name, 0) + shard.data.nbytes
    return result


def described(state: Any) -> tuple[Weight, ...]:
    """Each array with its layout."""
    return tuple(
        Weight(
            path,
            str(array.dtype),
            tuple(array.shape),
            tuple(array.sharding.spec) + (None,) * (array.ndim - len(array.sharding.spec)),
            max(shard.data.nbytes for shard in array.addressable_shards),
        )
        for own in states_of(state)
        for part in own[:2]
        for path, array in part.items()
    )
