"""Pooling over named dims, which may be split: the largest, the mean, or any reduction of windows.

Mesh-TensorFlow pools whole dims, in windows that do not overlap. Here windows may overlap, and a
split dim exchanges edges as in :func:`conv`. Pooling over a whole dim is ``reduce_max(x, "h w")``.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArrayError, DimError
from ..layouts.dim_rules import Dim, Dims, DimsLike, as_dims, text_of
from . import windowed
from .array import NamedArray, as_named, position
from .operation import operation
from .reductions import reduce_mean
from .rules import BoundRules, in_force
from .windowed import Along, Numbers, Padding

Windows = DimsLike | Mapping[str, int]  # "h:2 w:3": how many elements of each dim


@operation
def max_pool(
    x: Any, windows: Windows, *, strides: Numbers | None = None, padding: Padding = "VALID"
) -> NamedArray:
    """The largest element of each window, which spans a number of elements per dim, "h:3 w:3".

    Windows lie side by side unless ``strides`` says how far apart they begin: for all or per dim,
    ``2``, ``"h:2 w:1"``, ``{"h": 2}``. ``padding`` is "VALID", "SAME", or how many places a window
    may reach beyond the edges: ``[(1, 1), (0, 1)]``, ``{"h": 1, "w": "SAME"}``; there is nothing
    there. All dims may be split. Raises :class:`DimError` for dims, strides and sizes that do not
    fit, and :class:`DivisibilityError` for a dim of the result that does not divide.

    >>> from meshwright.named import named
    >>> x = named(jnp.arange(6), "t:6")
    >>> print(max_pool(x, "t:2").array, max_pool(x, "t:3", strides=1).array)
    [1 3 5] [2 3 4 5]
    """
    return _pooled(x, windows, strides, padding, _Kind.LARGEST, "max_pool")


@operation
def avg_pool(
    x: Any, windows: Windows, *, strides: Numbers | None = None, padding: Padding = "VALID"
) -> NamedArray:
    """The mean of the elements in each window; takes the same arguments as :func:`max_pool`.

    Places beyond the edges are not counted.

    >>> from meshwright.named import named
    >>> print(avg_pool(named(jnp.arange(6.0), "t:6"), "t:3", strides=2, padding=1).array)
    [0.5 2.  4. ]
    """
    return _pooled(x, windows, strides, padding, _Kind.MEAN, "avg_pool")


@operation
def pool(
    x: Any, windows: Windows, reduce: Callable[[NamedArray, Any], NamedArray] = reduce_mean
) -> NamedArray:
    """Any reduction of windows that lie side by side: ``pool(x, "t:4", reduce=mn.logsumexp)``.

    ``reduce`` is a function of a named array and of the dims to reduce over. Raises
    :class:`DimError` if a dim is not a whole number of windows. (Mesh-TensorFlow's
    ``pool_tensor_1d``.)

    >>> from meshwright.named import named, reduce_sum
    >>> print(pool(named(jnp.arange(6), "t:6"), "t:3", reduce=reduce_sum).array)
    [ 3 12]
    """
    x = as_named(x)
    sizes = _sizes(x, windows, "pool")
    if uneven := [d for d in x.dims if d.size % sizes.get(d.name, 1)]:
        raise DimError(
            f"pool: {', '.join(f'{str(d)!r} in windows of {sizes[d.name]}' for d in uneven)} "
            "leaves a rest. Use a window that divides the dim; max_pool and avg_pool drop the rest."
        )
    placed = _alongside(x, sizes, sizes, dict.fromkeys(sizes, "VALID"), "pool")
    windowed.laid_along(placed, (), "pool", padded=False)
    inner = {name: _unused(f"{name}_window", x.dims) for name in sizes}
    dims = [
        part
        for dim in x.dims
        for part in (
            (dim.resized(dim.size // sizes[dim.name]), Dim(inner[dim.name], sizes[dim.name]))
            if dim.name in sizes
            else (dim,)
        )
    ]
    array = jnp.reshape(x.array, [dim.size for dim in dims])
    return reduce(NamedArray(array, tuple(dims)), [Dim(inner[n], sizes[n]) for n in sizes])


@operation
def stride(x: Any, strides: DimsLike | Mapping[str, int]) -> NamedArray:
    """Each so-many-th element along dims, "h:2 w:2", from the first on.

    (Mesh-TensorFlow's ``stride_tensor_1d``.)

    >>> from meshwright.named import named
    >>> print(stride(named(jnp.arange(6), "t:6"), "t:2").array)
    [0 2 4]
    """
    x = as_named(x)
    steps = _sizes(x, strides, "stride")
    return _pooled(x, dict.fromkeys(steps, 1), steps, "VALID", _Kind.FIRST, "stride")


# What a call asks for


class _Kind(enum.Enum):
    """What becomes of a window."""

    LARGEST = enum.auto()
    MEAN = enum.auto()
    FIRST = enum.auto()


@dataclass(frozen=True)
class _Plan:
    """A pooling, in all that a compiled program depends on."""

    kind: _Kind
    x: Dims
    out: Dims
    along: tuple[Along, ...]
    bound: BoundRules | None


def _pooled(
    x: Any, windows: Windows, strides: Numbers | None, padding: Padding, kind: _Kind, what: str
) -> NamedArray:
    x = as_named(x)
    if kind is _Kind.LARGEST and not (_is_kind(x, jnp.floating) or _is_kind(x, jnp.integer)):
        raise ArrayError(
            f"{what}: of {x.dtype} elements none is the largest. Cast them before, or say what "
            "becomes of a window: pool(x, windows, reduce=reduce_any)."
        )
    sizes = _sizes(x, windows, what)
    steps = sizes if strides is None else windowed.counts(strides, list(sizes), f"{what}: strides")
    around = windowed.per_dim(padding, list(sizes), f"{what}: padding")
    placed = _alongside(x, sizes, steps, around, what)
    placed = windowed.laid_along(placed, (), what, padded=kind is not _Kind.FIRST)
    results = {one.dim.name: one.results for one in placed}
    out = tuple(dim.resized(results.get(dim.name, dim.size)) for dim in x.dims)
    return NamedArray(_run(x.array, _Plan(kind, x.dims, out, placed, windowed.laying())), out)


def _sizes(x: NamedArray, windows: Windows, what: str) -> dict[str, int]:
    """How many elements a window has of each dim; raises :class:`DimError` for dims not there."""
    if not isinstance(windows, str | Dim | Iterable):
        raise DimError(
            f"{what}: {windows!r} does not say how many elements of which dims: give 'h:2 w:2'."
        )
    pairs = windows.items() if isinstance(windows, Mapping) else windows
    dims = {dim.name: dim.size for dim in as_dims(pairs)}  # type: ignore[arg-type]
    if unknown := [name for name in dims if name not in x.shape]:
        raise DimError(
            f"{what}: x [{text_of(x.dims)}] has no dim {', '.join(map(repr, unknown))}. "
            "Windows are of the form 'h:2 w:2'."
        )
    return windowed.counts(dims, list(dims), f"{what}: windows")


def _alongside(
    x: NamedArray, sizes: Mapping[str, int], steps: Mapping[str, int], padding: Mapping[str, Any],
    what: str,
) -> list[Along]:  # fmt: skip
    """How the windows lie along each dim."""
    placed = [windowed.along(x.dim(n), sizes[n], steps[n], 1, padding[n]) for n in sizes]
    if wide := [one for one in placed if max(one.window.padding) >= one.window.size]:
        raise DimError(
            "\n".join(
                f"{what}: padding {one.padding_text} of dim {one.dim.name!r} leaves a window of "
                f"{one.window.size} without an element. Pad by less than the window."
                for one in wide
            )
        )
    windowed.check_fits(placed, what)
    if rules := in_force():
        rules.layout(x.dims, f"operand of {what}")
    return placed


def _is_kind(x: NamedArray, kind: Any) -> bool:
    return jnp.issubdtype(x.dtype, kind)


def _unused(name: str, dims: Sequence[Dim]) -> str:
    names = {dim.name for dim in dims}
    while name in names:
        name += "_"
    return name


# The computation


@functools.partial(jax.jit, static_argnames="plan")
def _run(x: Any, plan: _Plan) -> Any:
    here = functools.partial(_here, plan=plan)
    y = windowed.by_device(here, plan.bound, [plan.x], plan.out)(x)
    return y if plan.kind is not _Kind.MEAN else _divided(y, plan, jnp.result_type(x, 1.0))


def _here(x: Any, plan: _Plan) -> Any:
    """What becomes of the windows of one device."""
    if plan.kind is _Kind.FIRST:
        return _first(x, plan)
    fill = _least(x.dtype) if plan.kind is _Kind.LARGEST else np.zeros((), x.dtype)[()]
    around, sizes, steps = [(0, 0)] * x.ndim, [1] * x.ndim, [1] * x.ndim
    for one in plan.along:
        at = position(plan.x, one.dim)
        x, around[at], _ = windowed.reached(x, at, one, fill)
        sizes[at], steps[at] = one.window.size, one.window.stride
    if plan.kind is _Kind.LARGEST:
        return jax.lax.reduce_window(x, fill, jax.lax.max, sizes, steps, around)
    x = x.astype(_wide(jnp.result_type(x, 1.0)))
    return jax.lax.reduce_window(x, np.zeros((), x.dtype)[()], jax.lax.add, sizes, steps, around)


def _first(x: Any, plan: _Plan) -> Any:
    for one in plan.along:
        at = position(plan.x, one.dim)
        x, _, _ = windowed.reached(x, at, one, np.zeros((), x.dtype)[()])
        x = jax.lax.slice_in_dim(x, 0, None, one.window.stride, at)
    return x


def _divided(y: Any, plan: _Plan, dtype: Any) -> Any:
    """Sums divided by how many elements each window has; whole windows all have as many."""
    number: Any = np.ones([1] * y.ndim, _wide(dtype))
    for one in plan.along:
        starts = np.arange(one.results) * one.window.stride - one.window.padding[0]
        ends = np.minimum(starts + one.window.size, one.dim.size)
        shape = [-1 if dim.name == one.dim.name else 1 for dim in plan.out]
        number = number * (ends - np.maximum(starts, 0)).reshape(shape)
    number = number.astype(_wide(dtype))
    return (y / (number.flat[0] if np.all(number == number.flat[0]) else number)).astype(dtype)


def _wide(dtype: Any) -> Any:
    """The element type to add up in: short floats lose too much."""
    return jnp.promote_types(dtype, jnp.float32)


def _least(dtype: Any) -> Any:
    least = -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
    return np.array(least, dtype)[()]
