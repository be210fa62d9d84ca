"""Elements by their numbers: ranges, one-hot vectors, gather, and sums scattered to places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArrayError, DimError
from ..layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from .arguments import dtype_of, whole_number
from .array import NamedArray, as_named, find, position, spread, union
from .operation import operation
from .pieces import on_pieces, split_of
from .placing import place


@operation
def arange(dim: DimsLike, dtype: Any = jnp.int32) -> NamedArray:
    """The numbers 0, 1, 2, ... along a dim.

    >>> arange("length:4").array
    Array([0, 1, 2, 3], dtype=int32)
    """
    (along,) = _one(dim, "arange")
    return NamedArray(jnp.arange(along.size, dtype=dtype_of(dtype)), (along,))


@operation
def one_hot(
    indices: Any, dim: DimsLike, *, dtype: Any = jnp.float32, on: Any = 1, off: Any = 0
) -> NamedArray:
    """``on`` along ``dim`` at the place that each index names, and ``off`` elsewhere.

    ``dim`` is new, and comes last. An index that is out of range, negative ones too, is ``off``
    everywhere. Raises :class:`ArrayError` for indices that are not whole numbers.

    >>> from meshwright.named import named
    >>> one_hot(named([2, 0], "batch:2"), "vocab:3").array
    Array([[0., 0., 1.],
           [1., 0., 0.]], dtype=float32)
    """
    indices = whole_numbers(indices, "one_hot: the indices")
    (along,) = _one(dim, "one_hot")
    dims = as_dims((*indices.dims, along))
    dtype = dtype_of(dtype)
    places = jax.lax.broadcasted_iota(jnp.int32, [d.size for d in dims], len(dims) - 1)
    hot = indices.array[..., None] == places
    return NamedArray(jnp.where(hot, jnp.asarray(on, dtype), jnp.asarray(off, dtype)), dims)


@operation
def gather(x: Any, indices: Any, dim: str | Dim) -> NamedArray:
    """The elements of ``x`` at these places along a dim; zeros where an index is out of range.

    The dims of ``indices`` take the place of ``dim``. Those that ``x`` has too are matched by name:
    each index looks at its own element of them. Negative indices are out of range. If ``dim`` is
    split, devices sum what each of them has, and ``x`` is not gathered; ``indices`` are, if one of
    their dims is split along the same axis. Raises :class:`ArrayError` for indices that are not
    whole numbers.

    >>> from meshwright.named import named
    >>> table = named(jnp.arange(6.0).reshape(3, 2), "vocab:3 io:2")
    >>> gather(table, named([2, 0, 9], "length:3"), "vocab").array
    Array([[4., 5.],
           [0., 1.],
           [0., 0.]], dtype=float32)
    """
    x, indices = as_named(x), whole_numbers(indices, "gather: the indices")
    at = _Places(x, indices, dim, "gather")
    operand = NamedArray(spread(x, at.operand), at.operand)
    axis = split_of(at.operand).get(at.along.name)
    rival = next((d for d in at.new if axis and split_of([d]).get(d.name) == axis), None)
    if rival is None:
        array = _rows_at(operand.array, at.numbers, len(at.shared), at.position)
    else:
        array = _taken_apart(operand, at, rival)
    return NamedArray(spread(NamedArray(array, at.gathered), at.result), at.result)


@operation
def scatter_add(x: Any, indices: Any, values: Any, dim: str | Dim) -> NamedArray:
    """``x`` with ``values`` added at these places along a dim, where they are in range.

    The reverse of :func:`gather`: ``values`` has dims of what ``gather(x, indices, dim)`` gives,
    and is broadcast along those that it lacks. Several values for one place are all added. If
    ``dim`` and a dim of ``indices`` are split along one axis, XLA gathers an operand. Raises
    :class:`DimError` for a dim of ``values`` that has no place.

    >>> from meshwright.named import named
    >>> words = named([2, 0, 2], "length:3")
    >>> scatter_add(named(jnp.zeros(4), "vocab:4"), words, 1.0, "vocab").array
    Array([1., 0., 2., 0.], dtype=float32)
    """
    x, values = as_named(x), as_named(values)
    indices = whole_numbers(indices, "scatter_add: the indices")
    at = _Places(x, indices, dim, "scatter_add")
    union(at.gathered, values.dims, what="scatter_add")
    if extra := [value_dim for value_dim in values.dims if value_dim not in at.gathered]:
        raise DimError(
            f"scatter_add: the values have {text_of(extra)}, but their dims are among those that "
            f"gather gives for these indices, [{text_of(at.result)}]. Sum over it first."
        )
    shape = [taken_dim.size for taken_dim in at.gathered]
    added = jnp.broadcast_to(spread(values, at.gathered), shape).astype(x.dtype)

    def add(array: Any, places: Any, some: Any) -> Any:
        before = (slice(None),) * at.position
        return array.at[(*before, places)].add(some, mode="drop")

    array = _over(add, len(at.shared))(spread(x, at.operand), at.numbers, added)
    return NamedArray(spread(NamedArray(array, at.operand), x.dims), x.dims)


@operation
def index(x: Any, where: Mapping[str, Any]) -> NamedArray:
    """What ``x[where]`` gives: each named dim sliced, or indexed and so taken away.

    ``where`` says for dims by name a slice, a number (negative ones count from the end), or whole
    numbers as a :class:`NamedArray`, whose dims then take the place of the dim. Numbers that are
    only known at run time give zeros where they are out of range, as :func:`gather` does. Raises
    :class:`DimError` for a number that is out of range.

    >>> from meshwright.named import named
    >>> x = named(jnp.arange(12).reshape(3, 4), "batch:3 length:4")
    >>> x[{"batch": -1, "length": slice(0, 2)}].array
    Array([8, 9], dtype=int32)
    """
    x = as_named(x)
    if not isinstance(where, Mapping):
        raise DimError(
            f"x[{where!r}]: dims are named, so an index names them: x[{{'length': slice(0, 5), "
            "'batch': 0}]. To go through the elements of a dim, use unstack."
        )
    for name in where:
        find(x.dims, name)
    for name, at in where.items():
        x = _at(x, find(x.dims, name), at)
    return x


def _of_slice(at: slice, dim: Dim) -> tuple[int, int, int]:
    for bound in filter(None, (at.start, at.stop, at.step)):
        whole_number(bound, f"x[{{{dim.name!r}: slice(...)}}]: a bound")
    return at.indices(dim.size)


def _at(x: NamedArray, dim: Dim, at: Any) -> NamedArray:
    if isinstance(at, slice):
        begin, end, step = _of_slice(at, dim)
        count = len(range(begin, end, step))
        if step == 1:
            return place([(x, -begin)], dim.name, dim.resized(count))
        places = begin + step * jnp.arange(count)
        return gather(x, NamedArray(places, (dim.resized(count),)), dim)
    if isinstance(at, bool) or not isinstance(at, (int, np.integer)):
        return gather(x, at, dim)
    if not -dim.size <= at < dim.size:
        raise DimError(f"x[{{{dim.name!r}: {at}}}]: the elements of {dim} are 0 to {dim.size - 1}.")
    array = jax.lax.index_in_dim(x.array, int(at), position(x.dims, dim), keepdims=False)
    return NamedArray(array, tuple(other for other in x.dims if other != dim))


def whole_numbers(x: Any, what: str) -> NamedArray:
    """The array in 32 bits at least, if it holds whole numbers. Raises :class:`ArrayError` if not.

    The size of a dim need not fit into fewer: of uint8 the size 256 would be 0.
    """
    x = as_named(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ArrayError(
            f"{what} of type {x.dtype} are not whole numbers; cast(..., 'int32') makes them so."
        )
    return NamedArray(x.array.astype(jnp.int32), x.dims) if x.dtype.itemsize < 4 else x


class _Places:
    """Where indices point: orders of dims in which the dims of both arrays come first.

    ``operand`` and ``gathered`` are those of the array and of what is taken from it, ``result`` is
    how the latter is handed back. ``numbers`` are the bare indices; what is out of range is made so
    at the upper end, since JAX counts negative ones from there.
    """

    def __init__(self, x: NamedArray, indices: NamedArray, dim: str | Dim, what: str) -> None:
        along = find(x.dims, dim)
        others = tuple(other for other in x.dims if other != along)
        union(others, indices.dims, what=what)
        shared = tuple(other for other in others if other in indices.dims)
        new = tuple(index_dim for index_dim in indices.dims if index_dim not in others)
        own = tuple(own_dim for own_dim in x.dims if own_dim not in shared)
        self.along, self.shared, self.new = along, shared, new
        self.position = own.index(along)
        self.operand: Dims = (*shared, *own)
        self.gathered: Dims = (*shared, *own[: self.position], *new, *own[self.position + 1 :])
        where = x.dims.index(along)
        self.result: Dims = (*x.dims[:where], *new, *x.dims[where + 1 :])
        bare = spread(indices, (*shared, *new))
        inside = (bare >= 0) & (bare < along.size)
        self.numbers = jnp.where(inside, bare.astype(jnp.int32), along.size)


def _over(function: Callable[..., Any], shared: int) -> Callable[..., Any]:
    for _ in range(shared):
        function = jax.vmap(function)
    return function


def _rows_at(array: Any, numbers: Any, shared: int, position: int) -> Any:
    def take(array: Any, numbers: Any) -> Any:
        if not array.shape[position]:  # JAX refuses to take anything from nothing
            shape = (*array.shape[:position], *numbers.shape, *array.shape[position + 1 :])
            return jnp.zeros(shape, array.dtype)
        return jnp.take(array, numbers, axis=position, mode="fill", fill_value=0)

    return _over(take, shared)(array, numbers)


def _taken_apart(operand: NamedArray, at: _Places, rival: Dim) -> Any:
    """Where ``rival``, a dim of the indices, is split along the axis of the dim that goes.

    Left to itself, XLA would gather the operand; here every device sees all indices instead.
    """
    aside = rival.renamed(f"{rival.name}_taken")  # the operand may have a dim of this name, too
    new, dims_after = ([aside if d == rival else d for d in dims] for dims in (at.new, at.gathered))
    split = dict(split_of(at.operand, new))
    after = {name: axis for name, axis in split.items() if name != at.along.name}
    after[aside.name] = axis = split[at.along.name]
    numbers = NamedArray(at.numbers, (*at.shared, *new))
    options = {"shared": len(at.shared), "position": at.position, "axis": axis}
    scatter = dims_after.index(aside)
    dims = tuple(dims_after)
    (result,) = on_pieces(
        _taken_of_piece, [operand, numbers], split, [dims], after, scatter=scatter, **options
    )
    return result.array


def _taken_of_piece(
    array: Any, numbers: Any, *, shared: int, position: int, axis: str, scatter: int
) -> list[Any]:
    piece = array.shape[shared + position]
    here = numbers - jax.lax.axis_index(axis) * piece
    here = jnp.where((here >= 0) & (here < piece), here, piece)
    rows = _rows_at(array, here, shared, position)
    summed = rows.astype(jnp.int8) if rows.dtype == bool else rows
    mine = jax.lax.psum_scatter(summed, axis, scatter_dimension=scatter, tiled=True)
    return [mine.astype(rows.dtype)]


def _one(dim: DimsLike, what: str) -> Dims:
    dims = as_dims(dim)
    if len(dims) != 1:
        raise DimError(
            f"{what} goes along one dim, such as 'vocab:64'; received [{text_of(dims)}]."
        )
    return dims


NamedArray.__getitem__ = lambda self, where: index(self, where)  # type: ignore[attr-defined]
