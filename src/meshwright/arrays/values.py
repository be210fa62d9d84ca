"""What is handed in as an array: JAX arrays, Keras variables, NumPy, lists, scalars."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..errors import ArrayError

_NO_ARRAY = "{} cannot lie on a mesh: it takes numbers or booleans of one shape."


def array_in(x: Any) -> jax.Array | None:
    """``x``, or the array that a Keras variable holds; ``None`` if there is neither."""
    array = x if isinstance(x, jax.Array) else getattr(x, "value", None)
    return array if isinstance(array, jax.Array) else None


def host_array(x: Any) -> Any:
    """A value that is not a JAX array yet, as NumPy; a list that holds tracers, as a tracer."""
    try:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
            return jnp.asarray(x)
        value = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise ArrayError(f"{_NO_ARRAY.format(type(x).__name__)} ({error})") from error
    if not (jnp.issubdtype(value.dtype, np.number) or jnp.issubdtype(value.dtype, np.bool_)):
        raise ArrayError(_NO_ARRAY.format(f"{type(x).__name__} of dtype {value.dtype}"))
    narrow = jax.dtypes.canonicalize_dtype(value.dtype)
    _check_integers_fit(value, narrow)
    # JAX may go on reading NumPy's memory, so that writing to `x` later would change the result.
    return np.array(value, dtype=narrow)


def _check_integers_fit(value: np.ndarray, narrow: np.dtype) -> None:
    if value.dtype == narrow or value.dtype.kind not in "iu" or not value.size:
        return
    least, most, limits = value.min(), value.max(), np.iinfo(narrow)
    if least < limits.min or most > limits.max:
        raise ArrayError(
            f"integers from {least} to {most} ({value.dtype}) do not fit {narrow}, which JAX keeps "
            "them in. Use smaller ones, or call jax.config.update('jax_enable_x64', True) first."
        )


def as_numpy(x: Any) -> np.ndarray:
    """The values of an array on the host; of random keys, the words that they are made of."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def rank_of(x: Any) -> int:
    """How many dims ``x`` has."""
    value = array_in(x)
    return np.ndim(host_array(x) if value is None else value)
