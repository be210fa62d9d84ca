"""Sums of products over named dims."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from ..errors import DimError
from ..layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from .arguments import dtype_of
from .array import NamedArray, as_named, spread, union
from .meeting import Meeting
from .operation import operation
from .reductions import Over, dims_among, dims_over
from .rules import in_force


@operation
def einsum(
    xs: Sequence[Any],
    out: DimsLike | None = None,
    *,
    reduce: Over = None,
    rename: Mapping[str, str] | None = None,
    precision: Any = None,
    dtype: Any = None,
) -> NamedArray:
    """The product of all arrays, summed over the dims that the result does not have.

    ``out`` names the result's dims in order; one that no operand has is broadcast, and has its
    size beside it: ``"batch copies:4"``. ``reduce`` names
    the dims to sum over instead. With neither, the dims that only one operand has stay, in order of
    appearance. ``dtype`` is the element type of sums and result. Raises :class:`DimError` for a dim
    with two sizes and :class:`LayoutError` if the rules lay two of all these dims along one axis.
    (Mesh-TensorFlow's ``einsum``.)

    ``rename`` gives dims of the result another name, as :func:`rename` does after the product, but
    the product may use both names: sums that are split over the new name's axis are scattered there
    and not summed on every device, and a dim whose old name shares its axis with another dim of the
    product is gathered before. ``out`` and ``reduce`` are in the new names and in the old ones.
    (Sequence parallelism, Korthikanti et al. 2022.)

    >>> from meshwright.named import named
    >>> x, w = named(jnp.ones([4, 3]), "batch:4 io:3"), named(jnp.ones([3, 2]), "io:3 hidden:2")
    >>> einsum([x, w]).shape
    {'batch': 4, 'hidden': 2}
    >>> einsum([x, w], rename={"batch": "rows"}).shape
    {'rows': 4, 'hidden': 2}
    """
    if isinstance(xs, str):
        raise DimError(
            f"einsum takes arrays whose dims have names, and no subscripts such as {xs!r}: "
            "einsum([x, w]), or einsum([x, w], out='batch:64 hidden:16')."
        )
    if isinstance(out, NamedArray):
        raise DimError(
            "einsum takes its arrays in a list, einsum([x, w]); what stands second are the dims of "
            f"the result, and not an array [{text_of(out.dims)}]."
        )
    if isinstance(xs, NamedArray):
        xs = [xs]
    dtype = dtype_of(dtype)
    arrays = [as_named(x) for x in xs]
    if not arrays:
        raise DimError("einsum needs at least one array.")
    every = union(*(x.dims for x in arrays), what="einsum")
    names = rename or {}
    result = _result_dims(arrays, every, _with_old_names(out, names, every), reduce)
    new = tuple(dim for dim in result if dim not in every)
    out_dims = tuple(dim for dim in result if dim in every)
    renamed = _renamed(out_dims, names, new)
    meeting = Meeting.of(every, out_dims, names)
    if bound := in_force():
        bound.check_together(meeting.renamed((*every, *new)), "einsum over")
    product = _product_of_any
    if len(arrays) == 2:
        product = _product_in_order if meeting.split else _product_of_two
    summed = meeting.product(product, arrays, out_dims, precision=precision, dtype=dtype)
    array = NamedArray(summed, renamed)
    return _broadcast(array, tuple(dim.renamed(names.get(dim.name, dim.name)) for dim in result))


def _with_old_names(out: DimsLike | None, names: Mapping[str, str], every: Dims) -> Dims | None:
    if out is None:
        return None
    old = {new: old for old, new in names.items()}
    renamed = [dim.renamed(names.get(dim.name, dim.name)) for dim in every]
    return tuple(
        dim.renamed(old.get(dim.name, dim.name)) for dim in dims_among(out, tuple(renamed))
    )


def _renamed(out_dims: Dims, names: Mapping[str, str], new: Dims) -> Dims:
    absent = [name for name in names if name not in {dim.name for dim in out_dims}]
    if absent:
        raise DimError(
            f"einsum: rename= names {', '.join(map(repr, absent))}, which the product over "
            f"[{text_of(out_dims)}] does not keep. It goes from old names to new ones, and out= "
            "has the new ones."
        )
    renamed = tuple(dim.renamed(names.get(dim.name, dim.name)) for dim in out_dims)
    return as_dims((*renamed, *new))[: len(out_dims)]


def _broadcast(x: NamedArray, result: Dims) -> NamedArray:
    if x.dims == result:
        return x
    shape = [dim.size if dim in x.dims else 1 for dim in result]
    return NamedArray(jnp.broadcast_to(x.array.reshape(shape), [d.size for d in result]), result)


def _product_of_two(
    arrays: Sequence[NamedArray], out_dims: Dims, *, precision: Any, dtype: Any
) -> Any:
    """What ``jnp.einsum`` makes of two operands, one ``dot_general``, without its search."""
    one, other = arrays
    promoted = jnp.promote_types(one.dtype, other.dtype)
    x, y = (
        _without_its_own(one, out_dims, other, dtype or promoted),
        _without_its_own(other, out_dims, one, dtype or promoted),
    )
    apart = (x.dims, y.dims) != (one.dims, other.dims)
    if dtype is not None and (apart or jnp.issubdtype(promoted, jnp.bool_)):
        # A count is of no fewer bits than the result, nor is what was summed before the product.
        promoted = jnp.promote_types(promoted, dtype)
    both = [dim for dim in x.dims if dim in y.dims]
    summed, batch = [d for d in both if d not in out_dims], [d for d in both if d in out_dims]
    places = (_places(x, summed), _places(y, summed)), (_places(x, batch), _places(y, batch))
    operands = x.array.astype(promoted), y.array.astype(promoted)
    array = _dot_general(*operands, places, precision, dtype)
    own = [dim for operand in (x, y) for dim in operand.dims if dim not in both]
    return spread(NamedArray(array, (*batch, *own)), out_dims)


def _without_its_own(x: NamedArray, out_dims: Dims, other: NamedArray, dtype: Any) -> NamedArray:
    """The array, summed over dims that neither the result nor the other array has."""
    own_dims = tuple(dim for dim in x.dims if dim in out_dims or dim in other.dims)
    if own_dims == x.dims:
        return x
    places = [i for i, dim in enumerate(x.dims) if dim not in own_dims]
    return NamedArray(jnp.sum(x.array, places, dtype), own_dims)


def _places(x: NamedArray, dims: Sequence[Dim]) -> tuple[int, ...]:
    return tuple(x.dims.index(dim) for dim in dims)


# JAX traces and differentiates it once for all products of the same kind, and writes it out.
@functools.partial(_compat.jit_inlined, static_argnums=(2, 3, 4))
def _dot_general(x: Any, y: Any, places: Any, precision: Any, dtype: Any) -> Any:
    return jax.lax.dot_general(x, y, places, precision, preferred_element_type=dtype)


def _product_in_order(
    arrays: Sequence[NamedArray], out_dims: Dims, *, precision: Any, dtype: Any
) -> Any:
    """The same, and its gradients are products whose dims are at once in the order wanted.

    JAX's own gradient of the second operand is a product the other way round, transposed. XLA makes
    one of the two where it lays programs out by itself; in what runs on pieces it copies.
    """
    one, other = arrays
    if {*one.dims} ^ {*other.dims} <= {*out_dims}:
        how = (one.dims, other.dims, out_dims, precision, dtype)
        return _in_order(how, one.array, other.array)
    return _product_of_two(arrays, out_dims, precision=precision, dtype=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_order(how: Any, x: Any, y: Any) -> Any:
    dims_of_x, dims_of_y, out_dims, precision, dtype = how
    arrays = NamedArray(x, dims_of_x), NamedArray(y, dims_of_y)
    return _product_of_two(arrays, out_dims, precision=precision, dtype=dtype)


def _forward(how: Any, x: Any, y: Any) -> Any:
    return _in_order(how, x, y), (x, y)


def _backward(how: Any, saved: Any, gradient: Any) -> Any:
    dims_of_x, dims_of_y, out_dims, precision, _ = how
    x, y = NamedArray(saved[0], dims_of_x), NamedArray(saved[1], dims_of_y)
    g = NamedArray(gradient, out_dims)
    of_x = _product_of_two([g, y], x.dims, precision=precision, dtype=None)
    of_y = _product_of_two([x, g], y.dims, precision=precision, dtype=None)
    return of_x.astype(x.dtype), of_y.astype(y.dtype)


_in_order.defvjp(_forward, _backward)


def _product_of_any(
    arrays: Sequence[NamedArray], out_dims: Dims, *, precision: Any, dtype: Any
) -> Any:
    letters = {dim: i for i, dim in enumerate(union(*(x.dims for x in arrays), what="einsum"))}
    # Of several types jnp.einsum makes products that are wider than what it asks of the last one.
    promoted = jnp.result_type(*(x.array for x in arrays))
    operands = [
        part
        for x in arrays
        for part in (x.array.astype(promoted), [letters[dim] for dim in x.dims])
    ]
    result = [letters[dim] for dim in out_dims]
    return jnp.einsum(*operands, result, precision=precision, preferred_element_type=dtype)


def _result_dims(arrays: list[NamedArray], every: Dims, out: DimsLike | None, reduce: Over) -> Dims:
    summed = None if reduce is None else dims_over(every, reduce)
    if out is None:
        if summed is not None:
            return tuple(dim for dim in every if dim not in summed)
        return tuple(dim for dim in every if sum(dim in x.dims for x in arrays) == 1)
    result = as_dims(out)
    union(every, result, what="einsum")
    if summed is not None and (both := [dim for dim in summed if dim in result]):
        raise DimError(
            f"einsum: {text_of(both)} is in reduce= and in out=[{text_of(result)}]; "
            "name it in one of them."
        )
    if summed is not None and (
        unplaced := [d for d in every if d not in summed and d not in result]
    ):
        raise DimError(
            f"einsum: {text_of(unplaced)} is neither in reduce= nor in out=[{text_of(result)}]; "
            "leave reduce= out, and what out= lacks is summed over."
        )
    return result
