"""Where the largest and smallest elements along a dim are, and what they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import DimError
from ..layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from .array import NamedArray, as_named, find, position
from .indexing import gather, index
from .operation import operation
from .pieces import current_mesh, held_whole, on_pieces, split_of
from .reductions import ordered


@operation
def argmax(x: Any, dim: str | Dim) -> NamedArray:
    """Where along a dim the largest element is; the first one of equals.

    >>> from meshwright.named import named
    >>> argmax(named(jnp.array([3, 7, 7]), "length:3"), "length").array
    Array(1, dtype=int32)
    """
    return _extreme(jnp.argmax, x, dim, "argmax")


@operation
def argmin(x: Any, dim: str | Dim) -> NamedArray:
    """Where along a dim of ``x`` the smallest element is; the first one of equals.

    ``dim`` is the name of that dim.

    >>> import meshwright.named as mn
    >>> print(mn.argmin(mn.named([7, 3, 3], "length:3"), "length").array)
    1
    """
    return _extreme(jnp.argmin, x, dim, "argmin")


@operation
def top_1(x: Any, dim: str | Dim) -> tuple[NamedArray, NamedArray]:
    """The largest element along a dim, and where it is; the first one of equals.

    >>> from meshwright.named import named
    >>> value, place = top_1(named(jnp.array([3, 7, 7]), "length:3"), "length")
    >>> int(value), int(place)
    (7, 1)
    """
    places = argmax(x, dim)
    return gather(x, places, dim), places


@operation
def top_k(x: Any, dim: str | Dim, k: DimsLike) -> tuple[NamedArray, NamedArray]:
    """The largest elements along a dim, largest first, and where they are; the first of equals.

    ``k`` is the new dim, such as ``"beams:4"``; it comes last, and may be split. If ``dim`` is
    split, each device finds its largest, and only these are gathered. Raises :class:`DimError` if
    there are fewer elements than wanted.

    >>> from meshwright.named import named
    >>> values, places = top_k(named(jnp.array([3, 9, 7]), "vocab:3"), "vocab", "beams:2")
    >>> values.array, places.array
    (Array([9, 7], dtype=int32), Array([1, 2], dtype=int32))
    """
    x, new_dims = ordered(x, "top_k"), as_dims(k)
    along = find(x.dims, dim)
    if len(new_dims) != 1:
        raise DimError(
            f"top_k: k is one new dim, such as 'beams:4'; received [{text_of(new_dims)}]."
        )
    as_dims((*(other for other in x.dims if other != along), *new_dims))  # no name comes twice
    if new_dims[0].size > along.size:
        raise DimError(f"top_k: {new_dims[0]} of {along}; there are only {along.size} elements.")
    return _largest(x, along, new_dims[0])


@operation
def nth_largest(x: Any, n: int, dim: str | Dim) -> NamedArray:
    """The element that ``n`` others along a dim are not smaller than: 0 is the largest.

    Raises :class:`DimError` if the dim has fewer elements.

    >>> from meshwright.named import named
    >>> int(nth_largest(named(jnp.array([3, 9, 7]), "length:3"), 1, "length"))
    7
    """
    return _nth(as_named(x), n, dim, "nth_largest", largest=True)


@operation
def nth_smallest(x: Any, n: int, dim: str | Dim) -> NamedArray:
    """The element that ``n`` others along a dim are not larger than: 0 is the smallest.

    Raises :class:`DimError` if the dim has fewer elements.

    >>> import meshwright.named as mn
    >>> print(mn.nth_smallest(mn.named([3, 9, 7], "length:3"), 1, "length").array)
    7
    """
    return _nth(as_named(x), n, dim, "nth_smallest", largest=False)


@operation
def reduce_first(x: Any, dim: str | Dim) -> NamedArray:
    """The first element of ``x`` along a ``dim``. Raises :class:`DimError` if there is none.

    >>> import meshwright.named as mn
    >>> print(mn.reduce_first(mn.named([7, 3, 5], "length:3"), "length").array)
    7
    """
    x = as_named(x)
    return index(x, {find(x.dims, dim).name: 0})


def _extreme(function: Any, x: Any, dim: str | Dim, what: str) -> NamedArray:
    x = ordered(x, what)
    along = find(x.dims, dim)
    if not along.size:
        raise DimError(f"{what}: {along} has no elements.")
    places = function(x.array, axis=position(x.dims, along)).astype(jnp.int32)
    return NamedArray(places, tuple(other for other in x.dims if other != along))


def _nth(x: NamedArray, n: int, dim: str | Dim, what: str, largest: bool) -> NamedArray:
    along = find(ordered(x, what).dims, dim)
    if not 0 <= n < along.size:
        raise DimError(f"{what}: n={n} is out of range for {along}: 0 to {along.size - 1}.")
    if n > along.size // 2:  # it is closer to the other end
        n, largest = along.size - 1 - n, not largest
    x = x if largest else _reversed(x)
    values, _ = _largest(x, along, along.resized(n + 1))
    nth = index(values, {along.name: n})
    return nth if largest else _reversed(nth)


def _reversed(x: NamedArray) -> NamedArray:
    """The same elements in the reverse order of size; twice, it is the array itself."""
    whole = not jnp.issubdtype(x.dtype, jnp.floating)
    return NamedArray(~x.array if whole else -x.array, x.dims)  # -x of the least number overflows


def _largest(x: NamedArray, along: Dim, k: Dim) -> tuple[NamedArray, NamedArray]:
    """The largest of all are among the largest of each piece."""
    where, split = position(x.dims, along), split_of(x.dims)
    rest = tuple(dim for dim in x.dims if dim != along)
    axis = split.get(along.name)
    if axis is None:
        largest = on_pieces(_of_piece, [x], split, [(*rest, k)] * 2, where=where, count=k.size)
        return largest[0], largest[1]
    pieces = current_mesh()[axis]
    count = min(k.size, along.size // pieces)
    few: Dims = (*rest, along.resized(count * pieces))
    largest = on_pieces(_of_piece, [x], split, [few] * 2, where=where, count=count, axis=axis)
    largest = [held_whole(x_few, along.name) for x_few in largest]
    others = {name: split[name] for name in split if name != along.name}
    values, places = on_pieces(_of_few, largest, others, [(*rest, k)] * 2, count=k.size)
    return values, places


def _of_piece(array: Any, *, where: int, count: int, axis: str | None = None) -> list[Any]:
    values, places = jax.lax.top_k(_of_one_zero(jnp.moveaxis(array, where, -1)), count)
    begin = 0 if axis is None else jax.lax.axis_index(axis) * array.shape[where]
    return [values, places + begin]


def _of_one_zero(array: Any) -> Any:
    """The same numbers with no -0.0 among them, which XLA sorts below 0.0 though they are equal."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array - jnp.where(array == 0, jax.lax.stop_gradient(array), jnp.zeros((), array.dtype))


def _of_few(values: Any, places: Any, *, count: int) -> list[Any]:
    values, at = jax.lax.top_k(values, count)
    return [values, jnp.take_along_axis(places, at, -1)]
