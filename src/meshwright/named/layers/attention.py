"""Attention: values averaged with the softmax of products of queries and keys, whole or local."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim, Dims, text_of
from ..array import NamedArray, find
from ..contraction import einsum
from ..elementwise import (
    absolute,
    add,
    equal,
    greater,
    greater_equal,
    less_equal,
    logical_and,
    logical_or,
    where,
)
from ..indexing import arange
from ..joining import concat, pad, slice
from ..operation import operation
from ..pieces import current_mesh, split_of
from ..random import dropout
from ..reductions import dims_over, softmax
from ..shapes import Names, merge_dims, split_dim
from ..shifting import shift
from ..windowed import Numbers, counts
from .layer import in_dtype, without

_LEAST = -1e30  # a logit that has no weight, and is finite: a row of nothing else has no NaN


Talking = tuple[NamedArray, NamedArray]  # from heads to talkers, and back


@operation
def attend(
    queries: NamedArray,
    keys: NamedArray,
    values: NamedArray,
    *,
    memory: str | Dim = "memory",
    d_kv: str | Dim = "d_kv",
    mask: NamedArray | None = None,
    bias: NamedArray | None = None,
    scale: float | None = None,
    talking: Talking | None = None,
    rate: float = 0.0,
    key: Any = None,
) -> NamedArray:
    """The values, averaged for every query with the softmax of its products with the keys.

    ``memory`` is the dim of keys and values that is averaged over; ``d_kv`` that of the products.
    Dims that queries and keys share, such as batch and heads, are matched; keys without heads
    serve all heads. Products are multiplied by ``scale``, by default one over the root of the size
    of ``d_kv``, and ``bias`` is added (Raffel et al. 2020). Where ``mask`` is false a value has no
    weight. The dims of both are any of those of queries and memory. What may see nothing at all
    gets the mean of everything. ``talking`` are two kernels, from ``heads`` to ``talkers`` before
    the softmax and back after it: heads talk (Shazeer et al. 2020). Softmax is taken in float32 at
    least. With a ``key``, the part ``rate`` of the weights is left out. (Vaswani et al. 2017; keys
    without heads after Shazeer 2019.)

    >>> import meshwright.named as mn
    >>> queries = mn.named(jnp.ones([2, 3, 4]), "batch:2 length:3 d_kv:4")
    >>> memory = mn.named(jnp.ones([2, 5, 4]), "batch:2 memory:5 d_kv:4")
    >>> attend(queries, memory, memory).shape
    {'batch': 2, 'length': 3, 'd_kv': 4}
    """
    memory, d_kv = find(keys.dims, memory), find(queries.dims, d_kv)
    shared = tuple(dim for dim in queries.dims if dim in keys.dims and dim != d_kv)
    alone = without(queries.dims, (*shared, d_kv))
    logits = einsum(
        [queries * (d_kv.size**-0.5 if scale is None else scale), keys],
        (*shared, *alone, memory),
        dtype=jnp.promote_types(queries.dtype, jnp.float32),
    )
    if bias is not None:
        logits = add(logits, bias, out=logits.dims)
    dims = logits.dims
    if talking is not None:
        logits = _talked(logits, talking[0])
    if mask is not None:
        logits = where(mask, logits, _LEAST, out=logits.dims)
    weights = in_dtype(softmax(logits, memory), values.dtype)
    if talking is not None:
        weights = einsum([weights, in_dtype(talking[1], weights.dtype)], dims)
    if key is not None and rate:
        weights = dropout(weights, key, rate=rate)
    own = without(values.dims, (*shared, memory))
    return einsum([weights, values], (*shared, *alone, *own))


@operation
def attend_locally(
    queries: NamedArray,
    keys: NamedArray,
    values: NamedArray,
    radius: Numbers,
    *,
    causal: bool = False,
    length: Names = "length",
    d_kv: str | Dim = "d_kv",
    mask: NamedArray | None = None,
    segments: NamedArray | None = None,
    bias: Callable[..., NamedArray] | None = None,
    scale: float | None = None,
    talking: Talking | None = None,
    rate: float = 0.0,
    key: Any = None,
) -> NamedArray:
    """:func:`attend` to positions at most ``radius`` away, and only to earlier ones if ``causal``.

    Queries, keys and values have one ``length``; so may the ``mask``, which is of the keys.
    Positions whose ``segments`` differ do not see each other. ``bias`` makes the bias of products
    from how far away a key is, such as -3 for three positions before. The length is cut into blocks
    of ``radius`` positions or a few more, and every block attends to itself and to the blocks
    beside it: memory and time grow with length times radius. Along a split length, devices exchange
    the blocks at their borders; where no such blocks fit into what one device holds, the length is
    gathered.

    Positions of images lie along several dims, ``length="height width"``, of one radius or of one
    each, ``"height:2 width:3"``: a position sees a rectangle around it, and if ``causal``, what is
    before it row by row (local 2-D attention, Parmar et al. 2018). ``bias`` is then a function of
    how far away a key is along each.

    >>> import meshwright.named as mn
    >>> same = mn.named(jnp.zeros([4, 1]), "length:4 d_kv:1")  # every key has the same weight
    >>> values = mn.named([[1.0], [2.0], [3.0], [4.0]], "length:4 d_kv:1")
    >>> attend_locally(same, same, values, radius=1, causal=True).array.tolist()
    [[1.0], [1.5], [2.5], [3.5]]
    """
    lengths = dims_over(queries.dims, length)
    radii = counts(radius, [dim.name for dim in lengths], "local attention: radius")
    if missing := [dim for dim in lengths if dim not in keys.dims or dim not in values.dims]:
        raise DimError(
            f"local attention is within one length: queries [{text_of(queries.dims)}] have "
            f"{text_of(missing)}, and so should keys [{text_of(keys.dims)}] and values "
            f"[{text_of(values.dims)}]."
        )
    cuts = _Cuts.of(lengths, radii, causal)
    mask = _everywhere(lengths) if mask is None else logical_and(mask, _everywhere(lengths))
    away = [arange(cut.block) - (arange(cut.memory) - cut.block.size) for cut in cuts.cuts]
    near = cuts.together(_near(away, list(radii.values()), causal))
    # Nothing lies beyond either end: there the neighbourhood of a mask is false.
    visible = logical_and(cuts.neighbourhood(mask), near)
    if segments is not None:
        same = equal(cuts.in_blocks(segments), cuts.neighbourhood(segments))
        visible = logical_and(visible, same)
    values_seen = attend(
        cuts.in_blocks(queries),
        cuts.neighbourhood(keys),
        cuts.neighbourhood(values),
        memory="memory", d_kv=d_kv, mask=visible,
        bias=None if bias is None else cuts.together(bias(*(-one for one in away))),
        scale=scale, talking=talking, rate=rate, key=key,
    )  # fmt: skip
    return cuts.whole(values_seen)


@dataclass(frozen=True)
class _Cuts:
    """Each of the lengths in blocks."""

    cuts: tuple[_Cut, ...]

    @classmethod
    def of(cls, lengths: Sequence[Dim], radii: Mapping[str, int], causal: bool) -> _Cuts:
        # Row by row, nothing below is earlier; of the row of a query, either side may be.
        return cls(
            tuple(
                _Cut(dim, radii[dim.name], one_sided=causal and i == 0)
                for i, dim in enumerate(lengths)
            )
        )

    def in_blocks(self, x: NamedArray) -> NamedArray:
        """Cut into blocks along each length."""
        for cut in self.cuts:
            x = cut.in_blocks(x)
        return x

    def neighbourhood(self, x: NamedArray) -> NamedArray:
        """What each block sees, as one dim ``memory``."""
        for cut in self.cuts:
            x = cut.neighbourhood(x)
        return self.together(x)

    def together(self, x: NamedArray) -> NamedArray:
        """What is seen along each length, as one dim ``memory``."""
        return merge_dims(x, [cut.memory for cut in self.cuts], "memory")

    def whole(self, x: NamedArray) -> NamedArray:
        """Blocks joined to the lengths again."""
        for cut in self.cuts:
            x = cut.whole(x)
        return x


@dataclass(frozen=True)
class _Cut:
    """One dim in blocks, each of which sees itself and those beside it, or just the one before."""

    length: Dim
    radius: int
    one_sided: bool

    @functools.cached_property
    def block(self) -> Dim:
        size = _block_size(self.length, max(min(self.radius, self.length.size), 1))
        return Dim(f"{self.length.name}_block", size)

    @property
    def blocks(self) -> Dim:
        """They keep the name of the length, so that they lie along its axis."""
        return self.length.resized(-(-self.length.size // self.block.size))

    @property
    def memory(self) -> Dim:
        return Dim(f"{self.length.name}_memory", self.block.size * (2 if self.one_sided else 3))

    def in_blocks(self, x: NamedArray) -> NamedArray:
        spare = self.blocks.size * self.block.size - self.length.size
        return split_dim(
            pad(x, self.length, after=spare), self.length.name, (self.blocks, self.block)
        )

    def neighbourhood(self, x: NamedArray) -> NamedArray:
        here = self.in_blocks(x)
        parts = [shift(here, 1, self.blocks), here]
        if not self.one_sided:
            parts.append(shift(here, -1, self.blocks))
        return concat(parts, self.block, name=self.memory.name)

    def whole(self, x: NamedArray) -> NamedArray:
        name = self.length.name
        return slice(merge_dims(x, (self.blocks, self.block), name), name, 0, self.length.size)


def _everywhere(lengths: Dims) -> NamedArray:
    return NamedArray(jnp.ones([dim.size for dim in lengths], bool), lengths)


def _talked(logits: NamedArray, kernel: NamedArray) -> NamedArray:
    """Logits of talkers, each a sum over heads; the memory stays last."""
    *first, memory = without(logits.dims, kernel.dims)
    return einsum([logits, kernel], (*first, *without(kernel.dims, logits.dims), memory))


def _near(away: Sequence[NamedArray], radii: Sequence[int], causal: bool) -> NamedArray:
    """Which positions of the neighbourhood each position of a block may see."""
    near = functools.reduce(
        logical_and,
        (less_equal(absolute(one), radius) for one, radius in zip(away, radii, strict=True)),
    )
    if not causal:
        return near
    *outer, last = away
    before = greater_equal(last, 0)
    for one in reversed(outer):  # row by row
        before = logical_or(greater(one, 0), logical_and(equal(one, 0), before))
    return logical_and(near, before)


def _block_size(length: Dim, radius: int) -> int:
    """The radius, or a little more if blocks then come out even in what each device holds."""
    axis = split_of([length]).get(length.name)
    local_size = length.size if axis is None else length.size // current_mesh()[axis]
    return next((size for size in range(radius, 2 * radius) if local_size % size == 0), radius)
