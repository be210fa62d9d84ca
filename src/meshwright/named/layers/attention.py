"""Attention: values averaged with the softmax of products of queries and keys, whole or local."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...errors import DimError
from ...layouts.dim_rules import Dim, text_of
from ..array import NamedArray, find
from ..contraction import einsum
from ..elementwise import absolute, add, equal, greater_equal, less, less_equal, logical_and, where
from ..indexing import arange
from ..joining import concat, pad, slice
from ..operation import operation
from ..pieces import current_mesh, split_of
from ..random import dropout
from ..reductions import softmax
from ..shapes import merge_dims, split_dim
from ..shifting import shift
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
    made = without(values.dims, (*shared, memory))
    return einsum([weights, values], (*shared, *alone, *made))


@operation
def attend_locally(
    queries: NamedArray,
    keys: NamedArray,
    values: NamedArray,
    radius: int,
    *,
    causal: bool = False,
    length: str | Dim = "length",
    d_kv: str | Dim = "d_kv",
    mask: NamedArray | None = None,
    segments: NamedArray | None = None,
    bias: Callable[[NamedArray], NamedArray] | None = None,
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
    """
    length = find(queries.dims, length)
    if radius < 1:
        raise DimError(f"attention is local within a radius of 1 or more; received {radius}.")
    if length not in keys.dims or length not in values.dims:
        raise DimError(
            f"local attention is within one length: queries [{text_of(queries.dims)}] have "
            f"{length}, and so should keys [{text_of(keys.dims)}] and values "
            f"[{text_of(values.dims)}]."
        )
    block = Dim("block", _block_size(length, min(radius, length.size)))
    # Blocks keep the name of the length: they lie along its axis.
    blocks = length.resized(-(-length.size // block.size))
    memory = Dim("memory", block.size * (2 if causal else 3))
    spare = blocks.size * block.size - length.size

    def in_blocks(x: NamedArray) -> NamedArray:
        return split_dim(pad(x, length, after=spare), length.name, (blocks, block))

    def neighbourhood(x: NamedArray) -> NamedArray:
        here = in_blocks(x)
        parts = [shift(here, 1, blocks), here]
        if not causal:
            parts.append(shift(here, -1, blocks))
        return concat(parts, block, name=memory.name)

    if mask is None:
        mask = less(arange(length), length.size)
    # Nothing lies beyond either end: there the neighbourhood of a mask is false.
    away = arange(block) - (arange(memory) - block.size)
    seen = logical_and(neighbourhood(mask), _near(away, radius, causal))
    if segments is not None:
        seen = logical_and(seen, equal(in_blocks(segments), neighbourhood(segments)))
    found = attend(
        in_blocks(queries),
        neighbourhood(keys),
        neighbourhood(values),
        memory=memory, d_kv=d_kv, mask=seen, bias=None if bias is None else bias(-away),
        scale=scale, talking=talking, rate=rate, key=key,
    )  # fmt: skip
    return slice(merge_dims(found, (blocks, block), length.name), length.name, 0, length.size)


def _talked(logits: NamedArray, kernel: NamedArray) -> NamedArray:
    """Logits of talkers, each a sum over heads; the memory stays last."""
    *first, memory = without(logits.dims, kernel.dims)
    return einsum([logits, kernel], (*first, *without(kernel.dims, logits.dims), memory))


def _near(away: NamedArray, radius: int, causal: bool) -> NamedArray:
    """Which positions of a block and its neighbours each position of the block may see."""
    near = less_equal(absolute(away), radius)
    return logical_and(near, greater_equal(away, 0)) if causal else near


def _block_size(length: Dim, radius: int) -> int:
    """The radius, or a little more if blocks then come out even in what each device holds."""
    axis = split_of([length]).get(length.name)
    held = length.size if axis is None else length.size // current_mesh()[axis]
    return next((size for size in range(radius, 2 * radius) if held % size == 0), radius)
