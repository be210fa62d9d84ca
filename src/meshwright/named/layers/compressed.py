"""Attention to a memory of fewer positions: keys and values are means of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim, text_of
from ..array import NamedArray, find
from ..elementwise import cast, less_equal, logical_and, maximum, multiply, where
from ..indexing import arange
from ..joining import pad
from ..operation import operation
from ..reductions import reduce_any, reduce_sum
from ..shapes import split_dim
from .layer import Params, in_dtype, ones, widened
from .multi_head import Attention, Cache, Mask, Queries


@dataclass(frozen=True)
class CompressedAttention(Attention):
    """:class:`Attention` to means of ``window`` positions side by side, in place of each one.

    There are fewer products by that factor. Positions that a ``mask`` leaves out have no part in
    their mean. If ``causal``, a position sees the means that end with itself or before; the first
    few positions see none, and find nothing, which is zeros. For ``rotary`` positions and for a
    bias by distance, a mean stands where it ends. (Memory-compressed attention, Liu et al. 2018,
    whose means have learned weights; here they are equal, as in Mesh-TensorFlow, where however the
    first few positions see what follows them.)

    >>> import jax
    >>> from meshwright.named import named
    >>> layer = CompressedAttention("d_model:8", "heads:2", "d_kv:4", causal=True, window=3)
    >>> params = layer.init(jax.random.key(0))
    >>> layer(params, named(jnp.ones([3, 5, 8]), "batch:3 length:5 d_model:8")).array[0, :, 0] == 0
    Array([ True,  True, False, False, False], dtype=bool)
    """

    window: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius is not None:
            raise DimError(
                "compressed attention is to all positions: radius= is not supported; leave it out."
            )
        if self.window < 1:
            raise DimError(f"window must be 1 or more; received {self.window!r}.")

    @property
    def whole(self) -> bool:
        return False

    def _cached(self, keys: NamedArray, values: NamedArray, at: NamedArray | None) -> Cache:
        return super()._cached(keys, values, None)  # means are turned, not what they are of

    def _attended(self, params: Params, queries: Queries, cache: Cache) -> NamedArray:
        mask, at = queries.mask, queries.at
        if mask is not None and self.length in mask.shape:
            raise DimError(
                f"a mask of compressed attention is over the memory: expected dim {self.memory!r} "
                f"and not {self.length!r}; received [{text_of(mask.dims)}]."
            )
        cache, visible = _means(cache, mask, self.memory, self.window)
        ends = self._ends(find(cache["key"].dims, self.memory))
        if at is not None:
            cache = cache | {"key": self._turned(cache["key"], ends)}
            if self.causal:
                visible = logical_and(visible, less_equal(ends, at))
        values = super()._attended(params, queries._replace(mask=visible), cache)
        return where(reduce_any(visible, self.memory), values, 0.0, out=values.dims)

    def _away(self, memory: Dim, at: NamedArray) -> NamedArray:
        return self._ends(memory.resized(-(-memory.size // self.window))) - at

    def _ends(self, means: Dim) -> NamedArray:
        """The last position of each mean."""
        return arange(means) * self.window + (self.window - 1)

    def _visible(self, length: Dim, mask: Mask, segments: Mask, prefix: Mask) -> Mask:
        if segments is not None or prefix is not None:
            raise DimError(
                "compressed attention does not support segments= or prefix=: the positions of a "
                "mean may lie on both sides of a border."
            )
        return mask

    def _seen_by_step(self, memory: Dim, at: Any) -> NamedArray | None:
        return None


@operation
def _means(
    cache: Cache, mask: NamedArray | None, name: str, window: int
) -> tuple[Cache, NamedArray]:
    """The mean of each window, and whether there is anything in it."""
    memory = find(cache["key"].dims, name)
    windows = memory.resized(-(-memory.size // window)), Dim("window", window)
    spare = -memory.size % window

    def sums(x: NamedArray) -> NamedArray:
        return reduce_sum(split_dim(pad(x, memory, after=spare), name, windows), "window")

    there = ones((memory,)) if mask is None else cast(mask, jnp.float32)
    count = sums(there)

    def mean(x: NamedArray) -> NamedArray:
        wide = widened(x)
        return in_dtype(sums(multiply(wide, there, out=x.dims)) / maximum(count, 1.0), x.dtype)

    return {name: mean(x) for name, x in cache.items()}, count > 0
