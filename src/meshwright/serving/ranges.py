"""Numbers in a narrower type: each keeps its value as far as the type goes, or it is a fault."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

# Types that clients have by default, and JAX computes in half of: accepted where the values fit.
_HALVES = {"int64": "int32", "uint64": "uint32", "float64": "float32"}


def narrower(dtype: str) -> str:
    """The type of half the bits that values of a 64-bit type are accepted for.

    >>> narrower("int64"), narrower("int16")
    ('int32', 'int16')
    """
    return _HALVES.get(dtype, dtype)


def wider(dtype: str) -> str | None:
    """The 64-bit type that is accepted in place of a type, if there is one.

    >>> wider("float32")
    'float64'
    """
    return next((wide for wide, half in _HALVES.items() if half == dtype), None)


def in_dtype(array: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, str]:
    """An array of numbers in a type, and which of them is out of its range; empty for none.

    Nothing is looked at where the type holds every value of the array's own.

    >>> in_dtype(np.array([5, 2**33]), np.dtype("int32"))[1]
    'value 8589934592 is outside the range of int32, -2147483648 to 2147483647'
    >>> in_dtype(np.array([1e300, np.inf]), np.dtype("float32"))[1]
    'value 1e+300 is outside the range of float32, -3.40282e+38 to 3.40282e+38'
    """
    if array.dtype == dtype:
        return array, ""
    if dtype.kind in "iu":
        return array.astype(dtype), _integer_fault(array, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = array.astype(dtype)
    if np.can_cast(array.dtype, dtype, "safe") or np.isfinite(narrow).all():
        return narrow, ""
    lost = array[np.isfinite(array) & ~np.isfinite(narrow)]
    return narrow, outside(lost[0], dtype) if lost.size else ""


def _integer_fault(array: np.ndarray, dtype: np.dtype) -> str:
    if not array.size or np.can_cast(array.dtype, dtype, "safe"):
        return ""
    least, most = limits_of(dtype)
    wrong = [value for value in (array.min(), array.max()) if not least <= value <= most]
    return outside(wrong[0], dtype) if wrong else ""


def limits_of(dtype: np.dtype) -> tuple[Any, Any]:
    """The least and the largest finite value of a type."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min, limits.max
    most = float(ml_dtypes.finfo(dtype).max)
    return -most, most


def outside(value: Any, dtype: np.dtype) -> str:
    """Says that a number is out of the range of a type, and what that is."""
    least, most = (
        f"{limit:g}" if isinstance(limit, float) else limit for limit in limits_of(dtype)
    )
    return f"value {value} is outside the range of {dtype.name}, {least} to {most}"
