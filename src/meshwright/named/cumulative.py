"""Sums of all elements up to each one, along a dim."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..layouts.dim_rules import Dim
from .array import NamedArray, as_named, find, position
from .operation import operation
from .pieces import on_pieces, split_of


@operation
def cumsum(x: Any, dim: str | Dim, *, exclusive: bool = False, reverse: bool = False) -> NamedArray:
    """The sum of all elements up to each one along a dim; without that one itself if ``exclusive``.

    With ``reverse`` sums go from the other end. If the dim is split, devices exchange the totals of
    their pieces and nothing else.

    >>> from meshwright.named import named
    >>> cumsum(named(jnp.arange(4), "length:4"), "length").array
    Array([0, 1, 3, 6], dtype=int32)
    """
    x = as_named(x)
    if x.dtype == bool:  # a sum of truths is their number
        x = NamedArray(x.array.astype(jnp.int32), x.dims)
    along, split = find(x.dims, dim), split_of(x.dims)
    options = {"where": position(x.dims, along), "exclusive": exclusive, "reverse": reverse}
    axis = split.get(along.name)
    (result,) = on_pieces(_of_piece, [x], split, [x.dims], axis=axis, **options)
    return result


def _of_piece(
    array: Any, *, where: int, axis: str | None, exclusive: bool, reverse: bool
) -> list[Any]:
    sums = _sums(array, where, exclusive, reverse)
    if axis is None:
        return [sums]
    total = jnp.sum(array, where, keepdims=True, dtype=array.dtype)
    return [sums + _of_those_before(total, axis, reverse)]


def _sums(array: Any, where: int, exclusive: bool, reverse: bool) -> Any:
    sums = jax.lax.cumsum(array, where, reverse)
    if not exclusive or not array.shape[where]:
        return sums
    # Not sums - array: that would lose the small ones beside a large one.
    first = jnp.zeros_like(jax.lax.slice_in_dim(sums, 0, 1, axis=where))
    size = array.shape[where]
    if reverse:
        return jnp.concatenate([jax.lax.slice_in_dim(sums, 1, size, axis=where), first], where)
    return jnp.concatenate([first, jax.lax.slice_in_dim(sums, 0, size - 1, axis=where)], where)


def _of_those_before(total: Any, axis: str, reverse: bool) -> Any:
    """The sum of the totals of all devices before this one: in doubling steps (Hillis and Steele
    1986), each a message to the device that many further on."""
    pieces = jax.lax.axis_size(axis)

    def from_before(number: Any, distance: int) -> Any:
        pairs = [(i, i + distance) for i in range(pieces - distance)]
        return jax.lax.ppermute(number, axis, [pair[:: -1 if reverse else 1] for pair in pairs])

    total, distance = from_before(total, 1), 1
    while distance < pieces:
        total = total + from_before(total, distance)
        distance *= 2
    return total
