"""Several arrays as one flat vector, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def joined(arrays: Iterable[Any]) -> Any:
    """Arrays one behind the other in a vector."""
    import jax.numpy as jnp

    return jnp.concatenate([array.ravel() for array in arrays])


def cut(flat: Any, shapes: Iterable[tuple[int, ...]]) -> list[Any]:
    """Arrays of these shapes from a vector, in their order.

    >>> import jax.numpy as jnp
    >>> [array.tolist() for array in cut(jnp.arange(5), [(2, 2), ()])]
    [[[0, 1], [2, 3]], 4]
    """
    arrays, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        arrays.append(flat[start : start + size].reshape(shape))
        start += size
    return arrays
