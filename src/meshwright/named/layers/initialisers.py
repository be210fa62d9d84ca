"""How parameters begin: random numbers whose size follows from the dims that are summed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from ...layouts.dim_rules import Dims, DimsLike, as_dims
from ..array import NamedArray
from ..operation import operation

_FANS: dict[str, Literal["fan_in", "fan_out", "fan_avg"]]
_FANS = {"inputs": "fan_in", "outputs": "fan_out", "both": "fan_avg"}

# From a key, the dims that are summed over and those that are made, an array with both.
Initialiser = Callable[[Any, Dims, Dims], NamedArray]


@dataclass(frozen=True)
class VarianceScaling:
    """Random numbers of variance ``scale`` over the number of a kernel's inputs, or of its outputs.

    Called with a key, the input dims and the output dims. What a layer gives then varies as much
    as what it is given, whatever the sizes of its dims (Glorot and Bengio 2010, He et al. 2015).
    The numbers depend on key and sizes, never on rules.

    >>> kernel = VarianceScaling()(jax.random.key(0), "heads:8 d_kv:8", "d_model:64")
    >>> kernel.shape, round(float(kernel.array.std()), 2)
    ({'heads': 8, 'd_kv': 8, 'd_model': 64}, 0.13)
    """

    scale: float = 1.0
    over: Literal["inputs", "outputs", "both"] = "inputs"
    distribution: Literal["normal", "truncated_normal", "uniform"] = "normal"

    def __call__(
        self, key: Any, inputs: DimsLike, outputs: DimsLike, *, rules: Any = None
    ) -> NamedArray:
        return _scaled(self, key, as_dims(inputs), as_dims(outputs), rules=rules)


SCALED = VarianceScaling()  # what kernels begin as, unless another is asked for


@dataclass(frozen=True)
class Normal:
    """Normal random numbers of this standard ``deviation``, whatever the dims.

    >>> table = Normal(0.02)(jax.random.key(0), "vocab:100", "d_model:64")
    >>> table.shape, round(float(table.array.std()), 2)
    ({'vocab': 100, 'd_model': 64}, 0.02)
    """

    deviation: float = 1.0

    def __call__(
        self, key: Any, inputs: DimsLike, outputs: DimsLike, *, rules: Any = None
    ) -> NamedArray:
        return _normal(self, key, as_dims(inputs), as_dims(outputs), rules=rules)


STANDARD = Normal()  # what tables begin as


@operation
def _scaled(how: VarianceScaling, key: Any, inputs: Dims, outputs: Dims) -> NamedArray:
    dims = as_dims((*inputs, *outputs))
    make = jax.nn.initializers.variance_scaling(
        how.scale,
        _FANS[how.over],
        how.distribution,
        in_axis=range(len(inputs)),
        out_axis=range(len(inputs), len(dims)),
    )
    return NamedArray(make(key, [dim.size for dim in dims]), dims)


@operation
def _normal(how: Normal, key: Any, inputs: Dims, outputs: Dims) -> NamedArray:
    dims = as_dims((*inputs, *outputs))
    return NamedArray(how.deviation * jax.random.normal(key, [dim.size for dim in dims]), dims)
