"""Other dims for the same elements: reshape, rename, split and merge of dims, transpose, broadcast.

None of them changes a value. The result lies by its own dims, so each may move data between
devices: where a dim on one axis becomes another dim on that axis, that is an all-to-all (as between
batch and experts), and where a dim that was split becomes one that is not, a gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from ..errors import DimError
from ..layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from .array import NamedArray, as_named, find, name_of, spread, union
from .operation import operation
from .reductions import dims_among, dims_over

Names = str | Dim | Iterable[str | Dim]  # a text may hold several: "batch length"


@operation
def reshape(x: Any, dims: DimsLike) -> NamedArray:
    """The same elements in the same order, under other dims.

    Raises :class:`DimError` if there are more or fewer of them. Where the pieces of before and
    after cannot both be cut from one array, XLA gathers along one axis.

    >>> from meshwright.named import named
    >>> reshape(named(jnp.ones([8, 6]), "batch:8 io:6"), "groups:2 batch:4 io").shape
    {'groups': 2, 'batch': 4, 'io': 6}
    """
    x = as_named(x)
    dims = dims_among(dims, x.dims)
    if math.prod(dim.size for dim in dims) != x.size:
        raise DimError(
            f"reshape: [{text_of(x.dims)}] has {x.size} elements and [{text_of(dims)}] "
            f"{math.prod(dim.size for dim in dims)}; a reshape keeps their number."
        )
    return _reshaped(x, dims)


@operation
def rename(x: Any, names: str | Dim | Mapping[str, str], new: str | None = None) -> NamedArray:
    """The array with other names for some dims: ``rename(x, "old", "new")`` or ``{"old": "new"}``.

    A new name may bring another axis, so this moves data where the rules say so. Two names may
    change places.

    >>> from meshwright.named import named
    >>> x = named(jnp.ones([8, 8]), "length:8 heads:8")
    >>> rename(x, {"length": "memory"}).shape
    {'memory': 8, 'heads': 8}
    """
    x = as_named(x)
    if not isinstance(names, Mapping):
        if new is None:
            raise DimError(
                f"rename: no new name for {name_of(names)!r}; write rename(x, 'old', 'new') or "
                "rename(x, {'old': 'new'})."
            )
        names = {name_of(names): new}
    elif new is not None:
        raise DimError("rename: give a mapping, or an old and a new name, but not both.")
    for name in names:
        find(x.dims, name)
    dims = as_dims([dim.renamed(names.get(dim.name, dim.name)) for dim in x.dims])
    return NamedArray(x.array, dims)


@operation
def split_dim(x: Any, dim: str | Dim, dims: DimsLike) -> NamedArray:
    """One dim cut into several, the first of them outermost.

    Raises :class:`DimError` if their sizes do not multiply to that of ``dim``.

    >>> from meshwright.named import named
    >>> split_dim(named(jnp.ones([8, 6]), "batch:8 io:6"), "batch", "groups:2 batch:4").shape
    {'groups': 2, 'batch': 4, 'io': 6}
    """
    x, dims = as_named(x), as_dims(dims)
    old = find(x.dims, dim)
    if math.prod(new.size for new in dims) != old.size:
        raise DimError(
            f"split_dim: {old} cannot be cut into [{text_of(dims)}], whose sizes multiply to "
            f"{math.prod(new.size for new in dims)}."
        )
    return _reshaped(x, as_dims(_replaced(x.dims, old, dims)))


@operation
def merge_dims(x: Any, dims: Names, name: str) -> NamedArray:
    """Several dims made one, the first of ``dims`` outermost; it stands where that one stood.

    They need not be neighbours: the array is transposed first if they are not.

    >>> from meshwright.named import named
    >>> x = named(jnp.ones([2, 4, 6]), "groups:2 batch:4 io:6")
    >>> merge_dims(x, "groups batch", "batch").shape
    {'batch': 8, 'io': 6}
    """
    x = as_named(x)
    merged = as_dims(dims_over(x.dims, dims))
    if not merged:
        raise DimError("merge_dims: no dims to merge; name them: merge_dims(x, 'a b', 'c').")
    order = _replaced([dim for dim in x.dims if dim not in merged[1:]], merged[0], merged)
    new = Dim(name, math.prod(dim.size for dim in merged))
    result = as_dims(_replaced([dim for dim in x.dims if dim not in merged[1:]], merged[0], (new,)))
    return _reshaped(NamedArray(spread(x, order), order), result)


@operation
def transpose(x: Any, order: Names) -> NamedArray:
    """The dims in another order, ``"length batch"``; every one is named.

    The order says nothing to operations that match dims by name; it matters to :func:`reshape`,
    and to whom the bare array goes.

    >>> from meshwright.named import named
    >>> transpose(named(jnp.ones([8, 6]), "batch:8 io:6"), "io batch").shape
    {'io': 6, 'batch': 8}
    """
    x = as_named(x)
    dims = as_dims(dims_over(x.dims, order))
    if missing := [dim for dim in x.dims if dim not in dims]:
        raise DimError(
            f"transpose: the order [{text_of(dims)}] lacks {text_of(missing)} of "
            f"[{text_of(x.dims)}]; name every dim."
        )
    return NamedArray(spread(x, dims), dims)


@operation
def broadcast(x: Any, dims: DimsLike) -> NamedArray:
    """The array with all of these dims, in this order; along those that it lacked it is the same.

    Only new dims need their size. Raises :class:`DimError` if one of its own dims is missing.

    >>> from meshwright.named import named
    >>> broadcast(named(jnp.ones([6]), "io:6"), "batch:8 io").shape
    {'batch': 8, 'io': 6}
    """
    x = as_named(x)
    dims = dims_among(dims, x.dims)
    union(x.dims, dims, what="broadcast")
    if missing := [dim for dim in x.dims if dim not in dims]:
        raise DimError(
            f"broadcast: [{text_of(dims)}] lacks {text_of(missing)} of the array; name every dim "
            "that the result is to have."
        )
    return NamedArray(jnp.broadcast_to(spread(x, dims), [dim.size for dim in dims]), dims)


def _reshaped(x: NamedArray, dims: Dims) -> NamedArray:
    return NamedArray(jnp.reshape(x.array, [dim.size for dim in dims]), dims)


def _replaced(dims: Iterable[Dim], old: Dim, new: Dims) -> Dims:
    return tuple(new_dim for dim in dims for new_dim in (new if dim == old else (dim,)))
