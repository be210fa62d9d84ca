"""Where a token stands: biases by distance, rotations and waves, in place of a learned table."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim
from ..array import NamedArray, find
from ..elementwise import absolute, cos, elementwise, exp, sin, where
from ..indexing import arange
from ..operation import operation
from ..shifting import shift
from .embedding import embed
from .initialisers import Initialiser, Normal
from .layer import Params, as_dim, in_dtype, under_rules, widened

_SMALL = Normal(0.02)


@dataclass(frozen=True)
class RelativeBias:
    """A learned number for each head and distance, which attention adds to its products.

    Near distances have a bucket each, farther ones share buckets that grow with their logarithm,
    and those of ``furthest`` or more share the last. Half of the buckets are of positions after,
    unless ``causal``. Called with offsets, such as -3 for three positions before, it gives the bias
    of each, of their dims and ``heads``. (T5, Raffel et al. 2020.)

    >>> import jax
    >>> layer = RelativeBias("heads:2", buckets=8, furthest=16)
    >>> offsets = arange("memory:5") - arange("length:4")
    >>> layer(layer.init(jax.random.key(0)), offsets).shape
    {'memory': 5, 'length': 4, 'heads': 2}
    """

    heads: str | Dim
    buckets: int = 32
    furthest: int = 128
    causal: bool = False
    initialiser: Initialiser = _SMALL

    def __post_init__(self) -> None:
        least = 2 if self.causal else 4
        if self.buckets < least or self.furthest <= self._exact:
            raise DimError(
                f"RelativeBias takes {least} buckets or more, and a furthest= above the "
                f"{self._exact} distances that have a bucket each; received "
                f"buckets={self.buckets} and furthest={self.furthest}."
            )

    @property
    def _one_way(self) -> int:
        return self.buckets if self.causal else self.buckets // 2

    @property
    def _exact(self) -> int:
        return self._one_way // 2

    @property
    def _bucket(self) -> Dim:
        return Dim("bucket", self.buckets)

    @under_rules
    def init(self, key: Any) -> Params:
        heads = as_dim(self.heads, "heads")
        return {"table": self.initialiser(key, (self._bucket,), (heads,))}

    @under_rules
    def __call__(self, params: Params, offsets: NamedArray) -> NamedArray:
        return _bias(self, params["table"], offsets)

    def bucket(self, offset: int) -> int:
        """The bucket of a distance: what the layer does, for one number.

        >>> [RelativeBias("heads:2", buckets=8, furthest=16).bucket(at) for at in (-9, -2, 0, 2, 9)]
        [3, 2, 0, 6, 7]
        """
        distance = max(-offset, 0) if self.causal else abs(offset)
        after = self._one_way if offset > 0 and not self.causal else 0
        return after + bisect.bisect_right(self._firsts, distance) - 1

    @property
    def _firsts(self) -> list[int]:
        """The first distance of each bucket; whole numbers, so that no rounding moves one."""
        exact, wide = self._exact, self._one_way - self._exact
        ratio = self.furthest / exact
        far = [math.ceil(exact * ratio ** (i / wide) - 1e-9) for i in range(wide)]
        return [*range(exact), *far]


@operation
def _bias(layer: RelativeBias, table: NamedArray, offsets: NamedArray) -> NamedArray:
    distance = where(offsets < 0, -offsets, 0) if layer.causal else absolute(offsets)
    firsts = jnp.array(layer._firsts)
    bucket = elementwise(lambda x: jnp.searchsorted(firsts, x, side="right") - 1, distance)
    if not layer.causal:
        bucket = bucket + where(offsets > 0, layer._one_way, 0)
    return embed(table, bucket, "bucket")


@operation
def rotated(
    x: NamedArray, at: NamedArray, over: str | Dim = "d_kv", *, base: float = 10_000.0
) -> NamedArray:
    """Queries or keys, turned by angles that grow with their position ``at``.

    The product of two then depends on how far they are apart, and not on where they are. An element
    of the first half of ``over`` and the one that stands as far in the second half turn together,
    at a rate from 1 down to 1 / ``base``. Raises :class:`DimError` for an odd size. (RoFormer, Su
    et al. 2021.)

    >>> import numpy as np
    >>> from meshwright.named import named
    >>> x = named([[1.0, 0.0], [1.0, 0.0]], "length:2 d_kv:2")
    >>> print(np.asarray(rotated(x, arange("length:2"))).round(2))
    [[1.   0.  ]
     [0.54 0.84]]
    """
    over = find(x.dims, over)
    if over.size % 2:
        raise DimError(f"rotary positions turn pairs: the size of {str(over)!r} must be even.")
    angle = at * _rates(over, over.size // 2, base)
    sign = where(arange(over) < over.size // 2, -1.0, 1.0)
    wide = widened(x)
    other = shift(wide, over.size // 2, over, wrap=True)
    return in_dtype(_as(wide * cos(angle) + other * sin(angle) * sign, x), x.dtype)


@operation
def sinusoids(at: NamedArray, d_model: str | Dim, *, base: float = 10_000.0) -> NamedArray:
    """Waves of the position ``at``: sines in the first half of ``d_model``, cosines in the second.

    Their rates go from 1 down to 1 / ``base``. (Vaswani et al. 2017, who lay sines and cosines in
    turn.)

    >>> import numpy as np
    >>> print(np.asarray(sinusoids(arange("length:2"), "d_model:2")).round(2))
    [[0.   1.  ]
     [0.84 0.54]]
    """
    d_model = as_dim(d_model, "d_model")
    half = -(-d_model.size // 2)
    angle = at * _rates(d_model, half, base)
    return where(arange(d_model) < half, sin(angle), cos(angle), out=(*at.dims, d_model))


def _rates(over: Dim, half: int, base: float) -> NamedArray:
    """The rate at which each element turns; the same in both halves."""
    place = in_dtype(arange(over) % half, jnp.dtype("float32"))
    return exp(place * (-math.log(base) / half))


def _as(x: NamedArray, like: NamedArray) -> NamedArray:
    return x if x.dims == like.dims else x.transpose([dim.name for dim in like.dims])
