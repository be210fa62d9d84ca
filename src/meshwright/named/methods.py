"""Methods of a named array: those that NumPy's users expect, each an operation of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .array import NamedArray
from .contraction import einsum
from .elementwise import cast
from .ordering import argmax, argmin
from .reductions import (
    reduce_all,
    reduce_any,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_sum,
)
from .shapes import broadcast, rename, reshape, transpose

_METHODS: dict[str, Callable[..., Any]] = {
    "sum": reduce_sum,
    "mean": reduce_mean,
    "max": reduce_max,
    "min": reduce_min,
    "prod": reduce_prod,
    "all": reduce_all,
    "any": reduce_any,
    "argmax": argmax,
    "argmin": argmin,
    "reshape": reshape,
    "rename": rename,
    "transpose": transpose,
    "broadcast": broadcast,
    "astype": cast,
    "item": lambda self: self.array.item(),
    "__matmul__": lambda self, other: einsum([self, other]),
    "__rmatmul__": lambda self, other: einsum([other, self]),
}

for _name, _function in _METHODS.items():
    # A plain function binds itself to its array, whatever the operation is wrapped in.
    setattr(NamedArray, _name, lambda self, *args, _f=_function, **how: _f(self, *args, **how))
