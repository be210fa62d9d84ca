"""Loops and maps of functions over named dims, on JAX's own.

What Mesh-TensorFlow's ``while_loop`` calls accumulators, sums that are exchanged between devices
once at the end, needs no word here: give the sum a dim of its own that lies along the axis
(``parts:8`` of ``parts:8 rows:128``), carry it, and reduce it after the loop. Each device then
holds one part, as it would anyway. XLA by itself exchanges a carried sum in every turn, because the
body may read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ArrayError, DimError, ModelError
from ..layouts.dim_rules import Dim, as_dims, text_of
from .array import NamedArray, as_named, find, lay_out, name_of, position, spread, union
from .operation import callback, is_named, operation
from .pieces import held_whole
from .rules import in_force, under


@operation
def while_loop(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any) -> Any:
    """``body`` of the carry, again and again, as long as ``cond`` of it holds.

    The carry is any pytree; it begins as ``init`` and keeps its dims. There is no gradient through
    it: where the number of turns is known, use :func:`scan`. Raises :class:`DimError` that names
    every part of the carry whose dims change.

    >>> from meshwright.named import named, reduce_max
    >>> x = named(jnp.array([1.0, 3.0]), "batch:2")
    >>> while_loop(lambda x: reduce_max(x) < 20, lambda x: x * 2, x).array
    Array([ 8., 24.], dtype=float32)
    """

    def holds(carry: Any) -> Any:
        truth = as_named(callback(cond)(carry))
        if truth.dims:
            raise DimError(
                f"while_loop: the condition has dims [{text_of(truth.dims)}]; it is one truth "
                "value. Reduce it with reduce_any or reduce_all."
            )
        if truth.dtype != bool:
            raise ArrayError(
                f"while_loop: the condition is of type {truth.dtype}; it is one truth value. "
                "Compare it, as in x > 0."
            )
        return truth.array

    init = _begun(init)
    return jax.lax.while_loop(
        holds, lambda carry: _same_carry(init, callback(body)(carry), "while_loop"), init
    )


@operation
def fori_loop(low: Any, high: Any, body: Callable[[NamedArray, Any], Any], init: Any) -> Any:
    """``body(i, carry)`` for each ``i`` from ``low`` up to ``high``, which is left out.

    As :func:`while_loop`; with bounds that are known when it is traced, it has a gradient.

    >>> import meshwright.named as mn
    >>> x = mn.named([1, 10], "batch:2")
    >>> print(mn.fori_loop(0, 3, lambda i, carry: carry + i, x).array)
    [ 4 13]
    """

    def turn(i: Any, carry: Any) -> Any:
        return _same_carry(init, callback(body)(NamedArray(i, ()), carry), "fori_loop")

    init = _begun(init)
    return jax.lax.fori_loop(*_bounds(low, high), turn, init)


def _bounds(low: Any, high: Any) -> tuple[Any, Any]:
    """Python's whole numbers as they are, and others as arrays of one type, as JAX wants them."""
    bounds = {"low": as_named(low), "high": as_named(high)}
    for name, bound in bounds.items():
        if bound.dims or not jnp.issubdtype(bound.dtype, jnp.integer):
            received = f"[{text_of(bound.dims)}]" if bound.dims else f"a {bound.dtype}"
            raise DimError(f"fori_loop: {name} must be one whole number; received {received}.")
    if isinstance(low, int) and isinstance(high, int):
        return low, high
    dtype = jnp.result_type(*(bound.array for bound in bounds.values()))
    return bounds["low"].array.astype(dtype), bounds["high"].array.astype(dtype)


@operation
def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    dim: str | Dim,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """``carry, y = body(carry, x)`` for the slices ``x`` of ``xs`` along a dim, in order.

    Each named array in ``xs`` is cut along ``dim``, wherever it stands; bare arrays, of keys say,
    along their first. What ``body`` returns second is stacked, and ``dim`` is its first. The carry
    keeps its dims. Without ``xs`` the dim is given with its size, ``"steps:10"``. A split ``dim``
    of ``xs`` is gathered before the loop, since every device takes every turn.

    Raises :class:`DimError` for arrays that lack the dim, and for a carry whose dims change.

    >>> from meshwright.named import named
    >>> x = named(jnp.arange(6.0).reshape(2, 3), "batch:2 time:3")
    >>> zero = named(jnp.zeros(2), "batch:2")
    >>> total, sums = scan(lambda s, x: (s + x, s + x), zero, x, "time")
    >>> sums.shape, total.array
    ({'time': 3, 'batch': 2}, Array([ 3., 12.], dtype=float32))
    """
    along = _scanned_dim(xs, dim)

    def turn(carry: Any, x: Any) -> tuple[Any, Any]:
        result = callback(body)(carry, _map(lambda x: NamedArray(x.array, x.dims), x))
        if not isinstance(result, tuple) or len(result) != 2:
            raise ModelError(
                "scan: the body returns two things, the carry and what is stacked (None for "
                f"nothing); received {type(result).__name__}."
            )
        carry, y = result
        return _same_carry(init, carry, "scan"), y

    init = _begun(init)
    first = _map(lambda x: _sliced_first(x, along), xs)
    carry, ys = jax.lax.scan(turn, init, first, along.size, reverse=reverse, unroll=unroll)
    return carry, _stacked(ys, along, "scan")


def vmap(function: Callable[..., Any], dim: str | Dim) -> Callable[..., Any]:
    """The function of what its arguments have at each place of a dim.

    Every named array among the arguments that has the dim is mapped over, wherever it stands, and
    the function sees it without; all else is the same at each place. Results have the dim first.
    The rules hold inside as if the dim were there. Raises :class:`DimError` if no argument has it.

    >>> from meshwright.named import named, einsum
    >>> x, w = named(jnp.ones([3, 2]), "io:3 batch:2"), named(jnp.ones(3), "io:3")
    >>> vmap(lambda x, w: einsum([x, w], ""), "batch")(x, w).array
    Array([3., 3.], dtype=float32)
    """

    @functools.wraps(function)
    def call(*args: Any, rules: Any = None, **options: Any) -> Any:
        return _vmap(function, dim, args, options, rules=rules)

    return call


@operation
def _vmap(function: Callable[..., Any], dim: str | Dim, args: Any, options: Any) -> Any:
    leaves, tree = jax.tree.flatten((args, options), is_leaf=is_named)
    along = _mapped_dim([x for x in leaves if is_named(x)], dim)
    over = {i: x for i, x in enumerate(leaves) if is_named(x) and along in x.dims}
    rules = in_force()
    inside = None if rules is None else rules.mapping(along)

    def at_a_place(*slices: Any) -> Any:
        filled = list(leaves)
        for (i, x), part in zip(over.items(), slices, strict=True):
            filled[i] = NamedArray(part, tuple(d for d in x.dims if d != along))
        args, options = jax.tree.unflatten(tree, filled)
        with under(inside):
            return callback(function)(*args, **options)

    places = [position(x.dims, along) for x in over.values()]
    axes = None if rules is None or rules.only_check else rules.rules.axes(along.name) or None
    mapped = jax.vmap(at_a_place, places, axis_size=along.size, spmd_axis_name=axes)
    return _stacked(mapped(*(x.array for x in over.values())), along, "vmap")


def _mapped_dim(arrays: list[NamedArray], dim: str | Dim) -> Dim:
    name = name_of(dim)
    for candidate in union(*(x.dims for x in arrays), what="vmap"):
        if candidate.name == name:
            return find([candidate], dim)
    have = ", ".join(f"[{text_of(x.dims)}]" for x in arrays) or "no named array"
    raise DimError(f"vmap over {str(dim)!r}: no argument has this dim; they are {have}.")


def _scanned_dim(xs: Any, dim: str | Dim) -> Dim:
    leaves, _ = jax.tree_util.tree_flatten_with_path(xs, is_leaf=is_named)
    if not leaves:
        return _with_size(dim)
    name = name_of(dim)
    lack = [
        f"xs{jax.tree_util.keystr(path)} [{text_of(x.dims)}]"
        for path, x in leaves
        if is_named(x) and name not in [d.name for d in x.dims]
    ]
    if lack:
        raise DimError(
            f"scan over {str(dim)!r}: {', '.join(lack)} {'have' if lack[1:] else 'has'} no such "
            "dim. What is the same in every turn, the body may simply use."
        )
    if numbers := [jax.tree_util.keystr(path) for path, x in leaves if not _dims_of(x)]:
        raise DimError(
            f"scan over {str(dim)!r}: xs{', xs'.join(numbers)} is one number, which has no "
            "elements. What is the same in every turn, the body may simply use."
        )
    sizes = [find(x.dims, dim) if is_named(x) else Dim(name, jnp.shape(x)[0]) for _, x in leaves]
    return union(*([size] for size in sizes), what="scan")[0]


def _dims_of(x: Any) -> bool:
    return bool(x.dims if is_named(x) else jnp.ndim(x))


def _with_size(dim: str | Dim) -> Dim:
    if isinstance(dim, str) and ":" not in dim:
        raise DimError(f"scan without xs takes the dim with its size, '{dim}:10'; not {dim!r}.")
    return as_dims(dim)[0]


def _sliced_first(x: NamedArray, along: Dim) -> NamedArray:
    whole = held_whole(x, along.name)
    rest = tuple(dim for dim in x.dims if dim != along)
    return NamedArray(jnp.moveaxis(whole.array, position(x.dims, along), 0), (along, *rest))


def _stacked(tree: Any, along: Dim, what: str) -> Any:
    """What JAX has stacked, with ``along`` as the first dim of each."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    twice = [
        f"result{jax.tree_util.keystr(path)} [{text_of(x._dims)}]"
        for path, x in paths
        if is_named(x) and along.name in [dim.name for dim in x._dims]
    ]
    if twice:
        raise DimError(
            f"{what} over {str(along)!r}: {', '.join(twice)} has a dim of this name already, and "
            "would have it twice. Rename it inside."
        )
    return _map(lambda x: NamedArray(x.array, (along, *x._dims)), tree)


def _map(function: Callable[[NamedArray], NamedArray], tree: Any) -> Any:
    """A function of every named array in a pytree; bare ones stay."""
    return jax.tree.map(lambda x: function(x) if is_named(x) else x, tree, is_leaf=is_named)


def _begun(init: Any) -> Any:
    return _map(lambda x: lay_out(x, "carry"), init)


def _same_carry(before: Any, after: Any, what: str) -> Any:
    """What a body returned, with the dims in the order in which they went in."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(before, is_leaf=is_named)
    results, same = jax.tree.flatten(after, is_leaf=is_named)
    if tree != same:
        raise ModelError(
            f"{what}: the carry goes in as {_form(before)} and comes out as {_form(after)}. A "
            "carry keeps its form: return one of the form that it begins with."
        )
    pairs = [(path, x, y) for (path, x), y in zip(leaves, results, strict=True)]
    faults = [
        f"{what}: carry{jax.tree_util.keystr(path)} goes in {_dims_text(x)} "
        f"and comes out {_dims_text(y)}."
        for path, x, y in pairs
        if (is_named(x) or is_named(y)) and _dims(x) != _dims(y)
    ]
    if faults:
        raise DimError(
            "\n".join(faults) + "\nA carry keeps its dims: rename or reduce what the body returns, "
            "or begin with an array that has these dims."
        )
    if faults := [_type_fault(path, x, y) for path, x, y in pairs if _changes_type(x, y)]:
        raise ArrayError(
            "\n".join(f"{what}: {fault}" for fault in faults) + "\nA carry keeps its element "
            "type: cast what the body returns, or begin with an array of that type."
        )
    return jax.tree.unflatten(tree, [_like(x, y) for _, x, y in pairs])


def _form(tree: Any) -> str:
    """A carry as one reads it: ``(*, {'x': *})``, with a star for each array."""
    return str(jax.tree.map(lambda _: _STAR, tree, is_leaf=is_named))


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()


def _changes_type(before: Any, after: Any) -> bool:
    """Whether the type of a carry changes; a Python number takes that of what comes out."""
    kind = _kind_of(before)
    return not kind.weak_type and kind.dtype != _kind_of(after).dtype


def _kind_of(x: Any) -> Any:
    return jax.typeof(x.array if is_named(x) else x)


def _type_fault(path: Any, before: Any, after: Any) -> str:
    place, (one, other) = jax.tree_util.keystr(path), (_kind_of(x).dtype for x in (before, after))
    return f"carry{place} goes in as {one} and comes out as {other}."


def _like(before: Any, after: Any) -> Any:
    if not is_named(before):
        return after.array if is_named(after) else after
    after = as_named(after)
    if after.dims == before.dims:
        return lay_out(after, "carry")
    return lay_out(NamedArray(spread(after, before.dims), before.dims), "carry")


def _dims(x: Any) -> set[Dim] | None:
    if is_named(x):
        return set(x.dims)
    return None if jnp.ndim(x) else set()


def _dims_text(x: Any) -> str:
    if not is_named(x):
        return "without names" if jnp.ndim(x) else "as a number"
    return f"as [{text_of(x.dims)}]" if x.dims else "without dims"
