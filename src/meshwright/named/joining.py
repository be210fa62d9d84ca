"""Putting arrays together along a dim, and taking them apart: concat, stack, slice, pad.

All of them work along a split dim as well. There every device sends just the runs of elements that
others need (``placing.py``); nothing is gathered, unless the result is to be whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DimError
from ..layouts.dim_rules import Dim, Dims, text_of
from .arguments import whole_number
from .array import NamedArray, as_named, find, name_of, position, spread
from .operation import operation
from .pieces import held_whole, split_of
from .placing import place


@operation
def concat(xs: Sequence[Any], dim: str | Dim, *, name: str | None = None) -> NamedArray:
    """The arrays one after the other along a dim, which may have another size in each.

    Their other dims are the same, in any order. ``name`` gives the joined dim another name, as one
    that the rules do not split. Raises :class:`DimError` for dims that differ.

    >>> from meshwright.named import named
    >>> x = named(jnp.ones([2, 3]), "batch:2 length:3")
    >>> concat([x, x], "length").shape
    {'batch': 2, 'length': 6}
    """
    arrays = _several(xs, "concat")
    along = name_of(dim)
    for x in arrays:
        find(x.dims, along)
    _check_alike([[d for d in x.dims if d.name != along] for x in arrays], arrays, "concat")
    order = arrays[0].dims
    arrays = [_ordered(x, order) for x in arrays]
    ends = np.cumsum([find(x.dims, along).size for x in arrays]).tolist()
    parts = list(zip(arrays, [0, *ends[:-1]], strict=True))
    return place(parts, along, Dim(name or along, ends[-1]))


@operation
def split(x: Any, dim: str | Dim, parts: int | Sequence[int]) -> list[NamedArray]:
    """The array cut along a dim into ``parts`` equal ones, or into ones of these sizes.

    Raises :class:`DimError` if they do not come out even.

    >>> from meshwright.named import named
    >>> [piece.shape for piece in split(named(jnp.ones([8]), "length:8"), "length", [2, 6])]
    [{'length': 2}, {'length': 6}]
    """
    x = as_named(x)
    along = find(x.dims, dim)
    sizes = _sizes(parts, along)
    if sum(sizes) != along.size or min(sizes, default=0) < 0:
        raise DimError(
            f"split: sizes {sizes} add up to {sum(sizes)}; sizes must be at least 0 and add up to "
            f"{along}."
        )
    begins = np.cumsum([0, *sizes[:-1]]).tolist()
    return [
        place([(x, -begin)], along.name, along.resized(size))
        for begin, size in zip(begins, sizes, strict=True)
    ]


def _sizes(parts: Any, along: Dim) -> list[int]:
    if np.ndim(parts):
        return [whole_number(size, "split: a size") for size in parts]
    count = whole_number(parts, "split: parts")
    if count < 1 or along.size % count:
        raise DimError(
            f"split: {along} does not divide into {count} equal parts; give their sizes, "
            "such as [2, 6]."
        )
    return [along.size // count] * count


@operation
def slice(x: Any, dim: str | Dim, begin: int, size: int, *, name: str | None = None) -> NamedArray:
    """``size`` elements along a dim, from ``begin`` on.

    ``name`` gives the dim of the result another name, as one that the rules do not split: a dim
    that is split must still divide afterwards. ``x[{"length": slice(0, 5)}]`` says the same.
    Raises :class:`DimError` for what lies outside.

    >>> from meshwright.named import named
    >>> slice(named(jnp.arange(8), "length:8"), "length", 2, 3).array
    Array([2, 3, 4], dtype=int32)
    """
    x = as_named(x)
    along = find(x.dims, dim)
    begin, size = whole_number(begin, "slice: begin"), whole_number(size, "slice: size")
    if begin < 0 or size < 0 or begin + size > along.size:
        raise DimError(
            f"slice: {size} elements from {begin} on are not all in {along}, whose elements are "
            f"0 to {along.size - 1}."
        )
    return place([(x, -begin)], along.name, Dim(name or along.name, size))


@operation
def pad(
    x: Any,
    dim: str | Dim,
    before: int = 0,
    after: int = 0,
    value: Any = 0,
    *,
    name: str | None = None,
) -> NamedArray:
    """The array with elements of this value put before and after it along a dim.

    ``name`` gives the longer dim another name, as one that the rules do not split. Raises
    :class:`DimError` for negative numbers.

    >>> from meshwright.named import named
    >>> pad(named(jnp.ones(3), "length:3"), "length", 1, 2).array
    Array([0., 1., 1., 1., 0., 0.], dtype=float32)
    """
    x = as_named(x)
    along = find(x.dims, dim)
    before, after = whole_number(before, "pad: before"), whole_number(after, "pad: after")
    if before < 0 or after < 0:
        raise DimError(
            f"pad: before and after must be at least 0 for dim {along.name!r}; received {before} "
            f"and {after}. Use slice to take elements away."
        )
    if as_named(value).dims:
        raise DimError(f"pad: the value has dims [{text_of(value.dims)}]; it is one number.")
    size = before + along.size + after
    return place([(x, before)], along.name, Dim(name or along.name, size), value)


@operation
def stack(xs: Sequence[Any], name: str, position: int = 0) -> NamedArray:
    """Arrays of the same dims side by side, along a new dim that stands at ``position``.

    >>> from meshwright.named import named
    >>> x = named(jnp.ones([3]), "io:3")
    >>> stack([x, x], "copies").shape
    {'copies': 2, 'io': 3}
    """
    arrays = _several(xs, "stack")
    _check_alike([x.dims for x in arrays], arrays, "stack")
    order = arrays[0].dims
    if any(dim.name == name for dim in order):
        raise DimError(
            f"stack: the arrays have dim {name!r} already, [{text_of(order)}]. Use concat."
        )
    position = whole_number(position, "stack: position")
    if not 0 <= position <= len(order):
        raise DimError(
            f"stack: position {position} is out of range: a new dim of [{text_of(order)}] can have "
            f"positions 0 to {len(order)}."
        )
    bare = [_ordered(x, order).array for x in arrays]
    dims = (*order[:position], Dim(name, len(bare)), *order[position:])
    if not split_of(dims).get(name):
        return NamedArray(jnp.stack(bare, position), dims)
    # XLA would split each array first, and then exchange: every device has all that it needs.
    shape = [dim.size for dim in dims]
    which = jax.lax.broadcasted_iota(jnp.int32, shape, position)
    array = jnp.zeros(shape, bare[0].dtype)
    for i, piece in enumerate(bare):
        array = jnp.where(which == i, jnp.expand_dims(piece, position), array)
    return NamedArray(array, dims)


@operation
def unstack(x: Any, dim: str | Dim) -> list[NamedArray]:
    """The arrays that stand side by side along a dim, as a list.

    If the dim is split it is gathered, since every device gets every array; take just those that
    are needed with ``x[{"dim": 3}]``.

    >>> import meshwright.named as mn
    >>> rows = mn.unstack(mn.named([[1, 2], [3, 4]], "batch:2 io:2"), "batch")
    >>> [row.array.tolist() for row in rows]
    [[1, 2], [3, 4]]
    """
    x = as_named(x)
    along = find(x.dims, dim)
    whole, where = held_whole(x, along.name), position(x.dims, along)
    rest = tuple(other for other in x.dims if other != along)
    return [
        NamedArray(jax.lax.index_in_dim(whole.array, i, where, keepdims=False), rest)
        for i in range(along.size)
    ]


def _several(xs: Sequence[Any], what: str) -> list[NamedArray]:
    xs = [xs] if isinstance(xs, NamedArray) else xs
    if not isinstance(xs, Iterable) or isinstance(xs, str):
        raise DimError(f"{what}: expected a list of named arrays; received {xs!r}.")
    arrays = [as_named(x) for x in xs]
    if not arrays:
        raise DimError(f"{what} needs at least one array.")
    dtype = jnp.result_type(*(x.array for x in arrays))
    return [NamedArray(x.array.astype(dtype), x.dims) for x in arrays]


def _check_alike(dims: list[Any], arrays: list[NamedArray], what: str) -> None:
    if any({*dim} != {*dims[0]} for dim in dims):
        listed = ", ".join(f"[{text_of(x.dims)}]" for x in arrays)
        joined = "" if what == "stack" else ", but for the one that is joined"
        raise DimError(f"{what}: the arrays have dims {listed}; they must be the same{joined}.")


def _ordered(x: NamedArray, like: Dims) -> NamedArray:
    """The array with its dims in the order of the names of others."""
    order = tuple(find(x.dims, dim.name) for dim in like)
    return x if order == x.dims else NamedArray(spread(x, order), order)
