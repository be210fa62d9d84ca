"""What is known of an array while ``jit`` is tracing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..errors import TracingError


def is_tracing() -> bool:
    """Whether ``jit`` is tracing, so that what is computed now has no value yet."""
    return isinstance(jnp.zeros(()), Tracer)


def concrete_of(value: Any) -> Any:
    """The array behind ``value``; under an eager ``grad`` there is one, inside ``jit`` none."""
    return value.to_concrete_value() if isinstance(value, Tracer) else value


def refuse_shard_map() -> None:
    """Raise :class:`TracingError` where each device sees its own piece only."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise TracingError(
            f"inside shard_map (over {', '.join(map(repr, manual))}) each device sees its own "
            "piece, which has no layout. Call relayout before or after shard_map."
        )


def known_sharding(value: jax.Array) -> Any:
    """The sharding of an array; ``None`` where the compiler has yet to choose it."""
    concrete = concrete_of(value)
    if concrete is not None:
        return concrete.sharding
    traced = jax.typeof(value).sharding
    return traced if traced.mesh.are_all_axes_explicit and not traced.mesh.empty else None
