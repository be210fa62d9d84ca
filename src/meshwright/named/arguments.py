"""Checks of what callers pass to operations beside named arrays: numbers, whole numbers, keys."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..errors import ArrayError, DimError, MeshwrightError, ModelError


def bare_array(x: Any) -> jax.Array:
    """Numbers as a bare array. Raises :class:`ArrayError` for what JAX makes no array of."""
    try:
        return jnp.asarray(x)
    except MeshwrightError:
        raise
    except (TypeError, ValueError) as error:
        raise ArrayError(
            f"cannot make an array of {reprlib.repr(x)}: an array holds numbers or truth values, "
            "in rows of one length."
        ) from error


def dtype_of(dtype: Any) -> Any:
    """An element type, from its name or itself. Raises :class:`ArrayError` for anything else."""
    try:
        return None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        raise ArrayError(
            f"unknown element type {dtype!r}; expected one such as 'float32' or jnp.int32."
        ) from None


def whole_number(value: Any, what: str) -> int:
    """A whole number as Python's own.

    Raises :class:`DimError` for others, and for one that is known only at run time.
    """
    if isinstance(value, Tracer):
        raise DimError(
            f"{what} is known only at run time; expected a whole number, since shapes depend on it."
        )
    try:
        return operator.index(value)
    except TypeError:
        raise DimError(f"{what} must be a whole number; received {value!r}.") from None


def float_type(dtype: Any, what: str, allowed: Any = jnp.floating) -> Any:
    """An element type of random numbers. Raises :class:`ModelError` for one of another kind."""
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or not jnp.issubdtype(kind, allowed):
        raise ModelError(
            f"{what}: dtype must be a floating-point type such as 'float32'; received {dtype!r}."
        )
    return kind


def random_key(key: Any) -> Any:
    """One key of ``jax.random``, typed or raw. Raises :class:`ModelError` for anything else."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if (typed and shape == ()) or (dtype == jnp.uint32 and shape is not None and len(shape) == 1):
        return key
    received = f"{shape[0] if len(shape) == 1 else shape} keys" if typed and shape else repr(key)
    raise ModelError(
        f"key must be one random key, as jax.random.key(0) makes it; received {received}."
    )
