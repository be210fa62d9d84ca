"""Each variable in a memory of its own: a step that donates one array twice crashes the process.

Keras' moving averages of weights end by assigning one variable to another, which then share memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ... import _compat


def memory_of(array: jax.Array) -> int:
    """Where the first piece of an array is that this process has."""
    return array.addressable_data(0).unsafe_buffer_pointer()


def unshared(array: jax.Array, memories: set[int]) -> jax.Array:
    """The array, or a copy of one in these memories, to which it is added."""
    memory = memory_of(array)
    if memory in memories:
        array = jnp.copy(array)
    memories.add(memory)
    return array


def variables_of(model: Any) -> list[Any]:
    """All variables of a model, its optimizer and its metrics."""
    optimizer = _compat.optimizer_of(model)
    slots = [] if optimizer is None else optimizer.variables
    return [*model.variables, *slots, *model.metrics_variables]


def separate(model: Any) -> None:
    """Give each of these variables a memory of its own."""
    memories: set[int] = set()
    for variable in variables_of(model):
        array = _compat.raw_value(variable)
        if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.is_deleted():
            continue
        if array.addressable_shards:
            own = unshared(array, memories)
            if own is not array:
                _compat.restore_value(variable, own)
