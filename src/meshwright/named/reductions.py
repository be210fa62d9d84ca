"""Reductions over named dims, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ArrayError, DimError
from ..layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of, words_of
from .array import NamedArray, as_named, find, position
from .operation import example, named_operation, operation

Over = str | Dim | Iterable[str | Dim] | None  # dims to reduce; none means every one


def dims_over(dims: Dims, over: Over) -> Dims:
    """The dims that ``over`` names, a text perhaps several. Raises :class:`DimError` for others,
    and for one that is named twice."""
    return dims if over is None else as_dims([find(dims, name) for name in names_in(over)])


def names_in(over: str | Dim | Iterable[str | Dim]) -> list[str | Dim]:
    """Dims as one writes them, ``"h w"``, as a list. Raises :class:`DimError` for what is none."""
    if isinstance(over, str):
        return [*words_of(over)]
    several: list[Any] = [over]
    if isinstance(over, Iterable) and not isinstance(over, Dim):
        several = list(over)
    if wrong := [name for name in several if not isinstance(name, str | Dim)]:
        raise DimError(
            f"dims are given by name, as 'batch' or ['h', 'w']; received {wrong[0]!r} in {over!r}."
        )
    return several


def dims_among(dims: DimsLike | Iterable[str | Dim], among: Dims) -> Dims:
    """Dims with sizes, or bare names of dims that are known: ``"batch hidden:8"``.

    Raises :class:`DimError` for a bare name that is not known.
    """
    if isinstance(dims, Dim) or not isinstance(dims, Iterable):
        return as_dims(dims)
    items = words_of(dims) if isinstance(dims, str) else dims
    chosen_dims: list[Any] = []
    for item in items:
        if isinstance(item, str) and ":" not in item:
            if item not in [dim.name for dim in among]:
                raise DimError(
                    f"there is no dim {item!r} in [{text_of(among)}]. A new dim needs its size, "
                    f"such as '{item}:8'."
                )
            chosen_dims.append(find(among, item))
        else:
            chosen_dims.extend(as_dims(item) if isinstance(item, str) else [item])
    return as_dims(chosen_dims)


def reduced(function: Callable[..., Any], x: Any, over: Over) -> NamedArray:
    """A bare function with ``axis=``, applied over dims by name.

    The result keeps the array's layout, without the reduced dims; XLA ensures that.
    """
    x = as_named(x)
    dims = dims_over(x.dims, over)
    axes = tuple(position(x.dims, dim) for dim in dims)
    rest = tuple(dim for dim in x.dims if dim not in dims)
    return NamedArray(function(x.array, axis=axes), rest, x._rules)


def ordered(x: Any, what: str) -> NamedArray:
    """An array whose elements have an order. Raises :class:`ArrayError` for complex ones."""
    x = as_named(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ArrayError(
            f"{what}: of {x.dtype} elements none is the largest or the smallest. Compare their "
            "absolute values or their real parts."
        )
    return x


def _extreme(name: str, function: Callable[..., Any], x: NamedArray, over: Over) -> NamedArray:
    """The largest or smallest element, or NaN where one is."""
    if empty := [dim for dim in dims_over(x.dims, over) if not dim.size]:
        raise DimError(f"{name}: {text_of(empty)} has no elements.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduced(function, x, over)

    def of(array: Any, axis: Any) -> Any:  # XLA leaves NaN out on CPUs
        is_missing = jnp.any(jnp.isnan(array), axis=axis)
        return jnp.where(is_missing, jnp.asarray(jnp.nan, x.dtype), function(array, axis=axis))

    return reduced(of, x, over)


def _reduction(
    name: str, function: Callable[..., Any], says: str, values: str, result: str
) -> Callable[..., NamedArray]:
    def call(x: Any, over: Over = None) -> NamedArray:
        if function in (jnp.max, jnp.min):
            return _extreme(name, function, ordered(x, name), over)
        return reduced(function, x, over)

    sample = example(f"mn.{name}(mn.named({values}, 'batch:2 io:2'), 'io')", result)
    doc = f"{says} of ``x`` over the dims named by ``over``, or over all.{sample}"
    return named_operation(call, name, doc)


reduce_sum = _reduction("reduce_sum", jnp.sum, "The sum", "[[1.0, 2.0], [3.0, 5.0]]", "[3. 8.]")
reduce_mean = _reduction(
    "reduce_mean", jnp.mean, "The mean", "[[1.0, 2.0], [3.0, 5.0]]", "[1.5 4. ]"
)
reduce_max = _reduction(
    "reduce_max", jnp.max, "The largest element", "[[1.0, 2.0], [3.0, 5.0]]", "[2. 5.]"
)
reduce_min = _reduction(
    "reduce_min", jnp.min, "The smallest element", "[[1.0, 2.0], [3.0, 5.0]]", "[1. 3.]"
)
reduce_prod = _reduction(
    "reduce_prod", jnp.prod, "The product", "[[1.0, 2.0], [3.0, 5.0]]", "[ 2. 15.]"
)
reduce_all = _reduction(
    "reduce_all", jnp.all, "Whether every element", "[[True, False], [True, True]]", "[False  True]"
)
reduce_any = _reduction(
    "reduce_any", jnp.any, "Whether any element", "[[True, False], [False, False]]", "[ True False]"
)
logsumexp = _reduction(
    "logsumexp",
    jax.nn.logsumexp,
    "The logarithm of the sum of exponentials",
    "[[1.0, 2.0], [3.0, 5.0]]",
    "[2.31 5.13]",
)


@operation
def softmax(x: Any, over: Over) -> NamedArray:
    """Exponentials of ``x``, divided by their sum over the dims named by ``over``.

    >>> import meshwright.named as mn
    >>> print(mn.softmax(mn.named([[0.0, 0.0], [0.0, 2.0]], "batch:2 io:2"), "io").array.round(2))
    [[0.5  0.5 ]
     [0.12 0.88]]
    """
    x = as_named(x)
    axes = tuple(position(x.dims, dim) for dim in dims_over(x.dims, over))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):  # JAX takes their maximum, XLA only on a piece
        array = jnp.exp(x.array - jax.nn.logsumexp(x.array, axis=axes, keepdims=True))
    else:
        array = jax.nn.softmax(x.array, axis=axes)
    return NamedArray(array, x.dims, x._rules)


@operation
def log_softmax(x: Any, over: Over, *, extra_logit: Any = None) -> NamedArray:
    """The logarithm of :func:`softmax` of ``x`` over the dims named by ``over``.

    ``extra_logit`` is one more class that gets no result.

    >>> import meshwright.named as mn
    >>> print(mn.log_softmax(mn.named([0.0, 0.0], "io:2"), "io").array.round(2))
    [-0.69 -0.69]
    """
    x = as_named(x)
    axes = tuple(position(x.dims, dim) for dim in dims_over(x.dims, over))
    total = jax.nn.logsumexp(x.array, axis=axes, keepdims=True)
    if extra_logit is not None:
        total = jnp.logaddexp(total, jnp.asarray(extra_logit, x.dtype))
    return NamedArray(x.array - total, x.dims, x._rules)
