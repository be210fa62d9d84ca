"""The length in which a model whose inputs have dims of any size is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..jaxprs.edits import equations

_LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)  # the last two for raw sound


def typical_length(trace: Callable[[int], Any]) -> int:
    """The first length whose jaxpr, which ``trace`` returns, has no empty array.

    Convolutions without padding have no place in short rows: their layers raise, or pass on arrays
    without elements. Where every length has empty arrays, it is the first that can be traced.
    Raises what ``trace`` raises of every length, with a note that says so.

    >>> import jax, jax.numpy as jnp
    >>> def trace(length):
    ...     return jax.make_jaxpr(lambda x: jnp.sum(x[9:]))(jnp.ones(length))
    >>> typical_length(trace)
    16
    """
    first, why = None, None
    for length in _LENGTHS:
        try:
            jaxpr = trace(length)
        except Exception as error:  # of any kind: the layer that raises it is somebody else's
            why = why or error
            continue
        if not _has_empty(jaxpr):
            return length
        first = first or length
    if first is None:
        assert why is not None
        why.add_note(
            f"No length from {_LENGTHS[0]} to {_LENGTHS[-1]} can be traced for the dims of any "
            "size that the inputs have. Pass example=, inputs of a length that the model takes."
        )
        raise why
    return first


def _has_empty(jaxpr: Any) -> bool:
    return any(0 in getattr(v.aval, "shape", ()) for eqn in equations(jaxpr) for v in eqn.outvars)
