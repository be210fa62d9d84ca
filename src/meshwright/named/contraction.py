"""Sums of products over named dims."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from ..errors import DimError
from .array import NamedArray, as_named, spread, union
from .operation import operation
from .reductions import Over, chosen
from .rules import in_force


@operation
def einsum(
    xs: Sequence[Any],
    out: DimsLike | None = None,
    *,
    reduce: Over = None,
    precision: Any = None,
    dtype: Any = None,
) -> NamedArray:
    """The product of all arrays, summed over the dims that the result does not have.

    ``out`` names the result's dims in order; one that no operand has is broadcast. ``reduce`` names
    the dims to sum over instead. With neither, the dims that only one operand has stay, in order of
    appearance. ``dtype`` is the element type of sums and result. Raises :class:`DimError` for a dim
    with two sizes and :class:`LayoutError` if the rules lay two of all these dims along one axis.
    (Mesh-TensorFlow's ``einsum``.)

    >>> from meshwright.named import named
    >>> x, w = named(jnp.ones([4, 3]), "batch:4 io:3"), named(jnp.ones([3, 2]), "io:3 hidden:2")
    >>> einsum([x, w]).shape
    {'batch': 4, 'hidden': 2}
    """
    if isinstance(xs, str):
        raise DimError(
            f"einsum takes arrays whose dims have names, and no subscripts such as {xs!r}: "
            "einsum([x, w]), or einsum([x, w], out='batch:64 hidden:16')."
        )
    if isinstance(xs, NamedArray):
        xs = [xs]
    arrays = [as_named(x) for x in xs]
    if not arrays:
        raise DimError("einsum of no arrays has no result: give at least one.")
    every = union(*(x.dims for x in arrays), what="einsum")
    result = _result_dims(arrays, every, out, reduce)
    new = [dim for dim in result if dim not in every]
    if found := in_force():
        found.check_together((*every, *new), "einsum over")
    kept = tuple(dim for dim in result if dim in every)
    product = _product_of_two if len(arrays) == 2 else _product_of_any
    array = product(arrays, kept, precision, dtype)
    if new:
        shape = [dim.size if dim in every else 1 for dim in result]
        array = jnp.broadcast_to(array.reshape(shape), [dim.size for dim in result])
    return NamedArray(array, result)


def _product_of_two(arrays: Sequence[NamedArray], kept: Dims, precision: Any, dtype: Any) -> Any:
    """What ``jnp.einsum`` makes of two operands, one ``dot_general``, without its search."""
    one, other = arrays
    promoted = jnp.promote_types(one.dtype, other.dtype)
    x, y = (
        _without_its_own(one, kept, other, dtype or promoted),
        _without_its_own(other, kept, one, dtype or promoted),
    )
    both = [dim for dim in x.dims if dim in y.dims]
    gone, batch = [d for d in both if d not in kept], [d for d in both if d in kept]
    places = (_places(x, gone), _places(y, gone)), (_places(x, batch), _places(y, batch))
    operands = x.array.astype(promoted), y.array.astype(promoted)
    array = _dot_general(*operands, places, precision, dtype)
    own = [dim for each in (x, y) for dim in each.dims if dim not in both]
    return spread(NamedArray(array, (*batch, *own)), kept)


def _without_its_own(x: NamedArray, kept: Dims, other: NamedArray, dtype: Any) -> NamedArray:
    """The array, summed over dims that neither the result nor the other array has."""
    left = tuple(dim for dim in x.dims if dim in kept or dim in other.dims)
    if left == x.dims:
        return x
    gone = [i for i, dim in enumerate(x.dims) if dim not in left]
    return NamedArray(jnp.sum(x.array, gone, dtype), left)


def _places(x: NamedArray, dims: Sequence[Dim]) -> tuple[int, ...]:
    return tuple(x.dims.index(dim) for dim in dims)


# JAX traces and differentiates it once for all products of the same kind, and writes it out.
@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _dot_general(x: Any, y: Any, places: Any, precision: Any, dtype: Any) -> Any:
    return jax.lax.dot_general(x, y, places, precision, preferred_element_type=dtype)


def _product_of_any(arrays: Sequence[NamedArray], kept: Dims, precision: Any, dtype: Any) -> Any:
    letters = {dim: i for i, dim in enumerate(union(*(x.dims for x in arrays), what="einsum"))}
    operands = [part for x in arrays for part in (x.array, [letters[dim] for dim in x.dims])]
    result = [letters[dim] for dim in kept]
    return jnp.einsum(*operands, result, precision=precision, preferred_element_type=dtype)


def _result_dims(arrays: list[NamedArray], every: Dims, out: DimsLike | None, reduce: Over) -> Dims:
    gone = None if reduce is None else chosen(every, reduce)
    if out is None:
        if gone is not None:
            return tuple(dim for dim in every if dim not in gone)
        return tuple(dim for dim in every if sum(dim in x.dims for x in arrays) == 1)
    result = as_dims(out)
    union(every, result, what="einsum")
    if gone is not None and (both := [dim for dim in gone if dim in result]):
        raise DimError(
            f"einsum: {text_of(both)} is in reduce= and in out=[{text_of(result)}]; "
            "name it in one of them."
        )
    if gone is not None and (lost := [d for d in every if d not in gone and d not in result]):
        raise DimError(
            f"einsum: {text_of(lost)} is neither in reduce= nor in out=[{text_of(result)}]; "
            "leave reduce= out, and what out= lacks is summed over."
        )
    return result
