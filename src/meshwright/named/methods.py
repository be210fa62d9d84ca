"""Methods of a named array: those that NumPy's users expect, each an operation of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DimError
from ..layouts.dim_rules import text_of
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

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": reduce_sum,
    "mean": reduce_mean,
    "max": reduce_max,
    "min": reduce_min,
    "prod": reduce_prod,
    "all": reduce_all,
    "any": reduce_any,
    "argmax": argmax,
    "argmin": argmin,
}
_METHODS: dict[str, Callable[..., Any]] = {
    "reshape": reshape,
    "rename": rename,
    "broadcast": broadcast,
    "astype": cast,
    "item": lambda self: self.array.item(),
    "__matmul__": lambda self, other: einsum([self, other]),
    "__rmatmul__": lambda self, other: einsum([other, self]),
}


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    # A plain function binds itself to its array, whatever the operation is wrapped in.
    return lambda self, *args, **options: function(self, *args, **options)


def _reduction(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: NamedArray, *args: Any, **options: Any) -> Any:
        if "axis" in options:  # np.sum(x) asks its argument so
            return _for_numpy(name, self, **options)
        return function(self, *args, **options)

    return method


def _for_numpy(name: str, x: NamedArray, axis: Any, **options: Any) -> Any:
    """The number of all elements, as NumPy's function gives it."""
    if axis is not None:
        raise DimError(
            f"dims of [{text_of(x.dims)}] are given by name, as x.{name}('{x.dims[0].name}'); "
            f"received axis={axis!r}. Of the bare array: np.{name}(x.array, {axis!r})."
        )
    return getattr(np.asarray(x), name)(**options)


def _transposed(self: NamedArray, order: Any = None, *, rules: Any = None) -> NamedArray:
    if order is None:  # np.transpose(x) asks so
        raise DimError(
            f"transpose takes every dim of [{text_of(self.dims)}] by name, in the new order."
        )
    return transpose(self, order, rules=rules)


for _name, _function in _METHODS.items():
    setattr(NamedArray, _name, _method(_function))
for _name, _function in _REDUCTIONS.items():
    setattr(NamedArray, _name, _reduction(_name, _function))
NamedArray.transpose = _transposed
