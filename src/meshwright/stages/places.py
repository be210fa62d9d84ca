"""What lies at a place in the first dims of arrays: read, written, added to.

Every place is there: without a test of that, XLA writes it and leaves the rest alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Place = tuple[Any, ...]  # an index for each of the first dims


def entry(values: Any, place: Place) -> Any:
    """Of each array, what lies at the place."""
    if all(isinstance(at, int) for at in place):
        return jax.tree.map(lambda value: value[place], values)

    def of(value: Any) -> Any:
        dims = value.shape[len(place) :]
        one = jax.lax.dynamic_slice(value, _starts(value, place), [1] * len(place) + [*dims])
        return one.reshape(dims)

    return jax.tree.map(of, values)


def put(values: Any, place: Place, new: Any) -> Any:
    """The arrays with new values at the place."""

    def of(value: Any, new: Any) -> Any:
        new = new.reshape(*[1] * len(place), *new.shape)
        return jax.lax.dynamic_update_slice(value, new, _starts(value, place))

    return jax.tree.map(of, values, new)


def plus(values: Any, place: Place, more: Any) -> Any:
    """The arrays with more at the place."""

    def of(value: Any, more: Any) -> Any:
        starts, more = _starts(value, place), more.reshape(*[1] * len(place), *more.shape)
        before = jax.lax.dynamic_slice(value, starts, more.shape)
        return jax.lax.dynamic_update_slice(value, before + more, starts)

    return jax.tree.map(of, values, more)


def _starts(value: Any, place: Place) -> list[Any]:
    rest = [0] * (value.ndim - len(place))
    return [jnp.asarray(at, "int32") for at in (*place, *rest)]  # where x64 is on, 0 is an int64
