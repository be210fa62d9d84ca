"""Look-ups of one entry of an array's first dim, as ``jnp.take(stack, 3, axis=0)`` makes them."""

from __future__ import annotations

from typing import Any


def is_of_one_entry(eqn: Any) -> bool:
    """Whether a gather takes one entry of the first dim, and all of the others.

    >>> import jax, jax.numpy as jnp
    >>> from .edits import equations
    >>> def gathers(axis):
    ...     traced = jax.make_jaxpr(lambda w: jnp.take(w, 3, axis=axis))(jnp.ones((8, 8)))
    ...     return [eqn for eqn in equations(traced) if eqn.primitive.name == "gather"]
    >>> [is_of_one_entry(eqn) for axis in (0, 1) for eqn in gathers(axis)]
    [True, False]
    """
    if eqn.primitive.name != "gather":
        return False
    stack, index = (var.aval.shape for var in eqn.invars[:2])
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    taken = numbers.collapsed_slice_dims, numbers.start_index_map, numbers.offset_dims
    of_first = taken == ((0,), (0,), tuple(range(len(stack) - 1)))
    return index == (1,) and of_first and tuple(sizes) == (1, *stack[1:])
