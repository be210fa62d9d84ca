"""Convolution as a value: what a call asks for by names, and how a device does its piece of it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DimError
from ..layouts.dim_rules import Dim, Dims, pairs_of, text_of
from .array import NamedArray, as_named, find, name_of, position, union
from .reductions import Over, names_in
from .rules import BoundRules, in_force
from .windowed import (
    Along,
    Numbers,
    Padding,
    along,
    by_device,
    check_fits,
    counts,
    laid_along,
    laying,
    per_dim,
    reached,
)

# "h:fh w:fw", or pairs: a dim of x, and the dim of the kernel that moves along it.
Windows = str | Mapping[Any, str | Dim] | Iterable[tuple[str | Dim, str | Dim]]


@dataclass(frozen=True)
class _Slide:
    """A convolution, in all that a compiled program depends on."""

    x: Dims
    kernel: Dims
    out: Dims
    along: tuple[Along, ...]
    taps: tuple[str, ...]  # the kernel's dims that move, as ``along``
    summed: tuple[str, ...]
    groups: tuple[str, ...]
    new: tuple[str, ...]  # output channels
    over: tuple[str, ...]  # axes that the sum is spread over
    alone: tuple[str, ...]  # axes that split the kernel and not x
    bound: BoundRules | None
    precision: Any
    dtype: Any


def convolve(
    x: Any, kernel: Any, windows: Windows, what: str, *, reduce: Over = None,
    strides: Numbers = 1, dilation: Numbers = 1, padding: Padding = "SAME", precision: Any = None,
    dtype: Any = None, transposed: bool = False,
) -> NamedArray:  # fmt: skip
    """What :func:`conv` and its kin do; ``what`` is the name that errors give it."""
    x, kernel = as_named(x), as_named(kernel)
    pairs = window_pairs(windows)
    _check_names(x.dims, kernel.dims, pairs, what)
    every = union(x.dims, kernel.dims, what=what)
    summed, groups = _channels(x.dims, kernel.dims, reduce, what)
    taps = [find(kernel.dims, tap) for _, tap in pairs]
    new = [dim for dim in kernel.dims if dim not in (*taps, *summed, *groups)]
    moving = [find(x.dims, name) for name, _ in pairs]
    placed = _placed(moving, taps, strides, dilation, padding, transposed, what)
    if rules := in_force():
        rules.rules.check_together(every, f"{what} over")
        rules.layout(x.dims, f"operand of {what}")
        rules.layout(kernel.dims, f"kernel of {what}")
    placed = laid_along(placed, taps, what)
    sizes = {one.dim.name: one.results for one in placed}
    window_dims = [dim.resized(sizes.get(dim.name, dim.size)) for dim in x.dims]
    plan = _Slide(
        x.dims, kernel.dims, in_place(window_dims, summed, new), placed,
        taps=_names(taps), summed=_names(summed), groups=_names(groups), new=_names(new),
        over=_axes([*summed, *taps]), alone=_axes([*new, *taps]), bound=laying(),
        precision=precision, dtype=dtype,
    )  # fmt: skip
    return NamedArray(_slide(x.array, kernel.array, plan), plan.out)


def _placed(
    dims: Sequence[Dim], taps: Sequence[Dim], strides: Numbers, dilation: Numbers,
    padding: Padding, transposed: bool, what: str,
) -> list[Along]:  # fmt: skip
    """How the kernel's dims move along those of x."""
    names = _names(dims)
    steps = counts(strides, names, f"{what}: strides")
    gaps = counts(dilation, names, f"{what}: dilation")
    around = per_dim(padding, names, f"{what}: padding")
    placed = [
        along(dim, tap.size, steps[dim.name], gaps[dim.name], around[dim.name],
              transposed=transposed)
        for dim, tap in zip(dims, taps, strict=True)
    ]  # fmt: skip
    check_fits(placed, what)
    return placed


def window_pairs(windows: Windows) -> tuple[tuple[str, str], ...]:
    """Names of dims of x, each with the kernel's dim that moves along it."""
    if isinstance(windows, str):
        return tuple(pairs_of(windows, "h:fh"))
    pairs: Any = windows.items() if isinstance(windows, Mapping) else windows
    try:
        return tuple((name_of(dim), name_of(tap)) for dim, tap in pairs)
    except (TypeError, ValueError):
        raise DimError(
            f"windows={windows!r} does not say which dim of the kernel moves along which dim of x: "
            "give 'h:fh w:fw', or pairs of names."
        ) from None


def _check_names(x: Dims, kernel: Dims, pairs: Sequence[tuple[str, str]], what: str) -> None:
    """Raise :class:`DimError` for every dim of ``windows`` that is not where it should be."""
    have, taps = _names(x), _names(kernel)
    faults = []
    for name, tap in pairs:
        if name not in have:
            faults.append(f"x [{text_of(x)}] has no dim {name!r}, which windows= names")
        if tap not in taps:
            faults.append(
                f"the kernel [{text_of(kernel)}] has no dim {tap!r}, which windows= names"
            )
        if name in taps:
            faults.append(
                f"dim {name!r} of x is in the kernel [{text_of(kernel)}] as well: give what moves "
                "along it another name"
            )
        if tap in have:
            faults.append(f"dim {tap!r} of the kernel is in x [{text_of(x)}] as well: rename it")
    for at in (0, 1):
        several = [pair[at] for pair in pairs]
        faults += [f"windows= names {n!r} twice" for n in {*several} if several.count(n) > 1]
    if faults:
        raise DimError("\n".join(f"{what}: {fault}." for fault in dict.fromkeys(faults)))


def _channels(x: Dims, kernel: Dims, reduce: Over, what: str) -> tuple[list[Dim], list[Dim]]:
    """The dims that both have: those to be summed over, and those that stay."""
    shared = [dim for dim in x if dim in kernel]
    if reduce is None:
        if not shared:
            raise DimError(
                f"{what}: x [{text_of(x)}] and kernel [{text_of(kernel)}] share no dim, so there "
                "are no input channels. Name those of the kernel as in x, or, if it has none, use "
                "reduce=()."
            )
        return shared, []
    names = [name_of(dim) for dim in names_in(reduce)]
    if absent := [name for name in names if name not in _names(shared)]:
        raise DimError(
            f"{what}: reduce= names {', '.join(map(repr, absent))}, which x [{text_of(x)}] and "
            f"kernel [{text_of(kernel)}] do not both have; they share [{text_of(shared)}]."
        )
    summed = [dim for dim in shared if dim.name in names]
    return summed, [dim for dim in shared if dim not in summed]


def in_place(dims: Sequence[Dim], summed: Sequence[Dim], new: Sequence[Dim]) -> Dims:
    """The dims, with the new ones where the first of those that go has stood, else at the end."""
    at = min([position(dims, dim) for dim in summed], default=len(dims))
    before, after = dims[:at], [dim for dim in dims[at:] if dim not in summed]
    return (*before, *new, *after)


def _axes(dims: Iterable[Dim]) -> tuple[str, ...]:
    """The axes that split any of these dims."""
    if (bound := laying()) is None:
        return ()
    axes = (axis for dim in dims for axis in bound.rules.axes(dim.name))
    return tuple(axis for axis in axes if bound.mesh[axis] > 1)


def _names(dims: Iterable[Dim]) -> tuple[str, ...]:
    return tuple(dim.name for dim in dims)


# The computation


@functools.partial(jax.jit, static_argnames="plan")
def _slide(x: Any, kernel: Any, plan: _Slide) -> Any:
    """The convolution of bare arrays; every device works on its pieces."""
    here = functools.partial(_here, plan=plan)
    return by_device(here, plan.bound, (plan.x, plan.kernel), plan.out)(x, kernel)


def _here(x: Any, kernel: Any, plan: _Slide) -> Any:
    """The convolution of what one device holds."""
    dtype = jnp.result_type(x, kernel)
    x, kernel = x.astype(dtype), _turned(kernel.astype(dtype), plan)
    if plan.alone:
        # Devices that differ in the kernel alone sum their gradients of x once edges went back.
        x = jax.lax.pcast(x, plan.alone, to="varying")
    x, padding, between = _with_edges(x, plan)
    left, right, out = _runs(plan)
    every = (*_names(plan.x), *_names(plan.kernel))
    sizes = dict(zip(every, (*x.shape, *kernel.shape), strict=True))
    y = jax.lax.conv_general_dilated(
        left.merge(x),
        right.merge(kernel),
        [one.window.stride for one in plan.along],
        padding,
        between,
        [one.window.dilation for one in plan.along],
        jax.lax.ConvDimensionNumbers(left.places, right.places, out.places),
        feature_group_count=math.prod(sizes[name] for name in plan.groups),
        precision=plan.precision,
        preferred_element_type=plan.dtype,
    )
    results = {one.dim.name: one.results // one.pieces for one in plan.along}
    y = out.unmerge(y, {**sizes, **results})
    return jax.lax.psum(y, plan.over) if plan.over else y


def _turned(kernel: Any, plan: _Slide) -> Any:
    """The kernel, last row first along dims where it is laid down."""
    taps = zip(plan.taps, plan.along, strict=True)
    flipped = [_names(plan.kernel).index(name) for name, one in taps if one.flipped]
    return jax.lax.rev(kernel, flipped) if flipped else kernel


def _with_edges(x: Any, plan: _Slide) -> tuple[Any, list[tuple[int, int]], list[int]]:
    """``x`` with what the windows reach; the padding and the gaps that are left to put in."""
    padding, between = [], []
    for one in plan.along:
        place = _names(plan.x).index(one.dim.name)
        x, pair, gap = reached(x, place, one, np.zeros((), x.dtype)[()])
        padding.append(pair)
        between.append(gap)
    return x, padding, between


def _runs(plan: _Slide) -> tuple[_Merged, _Merged, _Merged]:
    """How the dims of x, of the kernel and of the result are merged."""
    spatial = [(one.dim.name,) for one in plan.along]
    inside, outside = (*plan.groups, *plan.summed), (*plan.groups, *plan.new)
    batch = [name for name in _names(plan.x) if name not in inside and (name,) not in spatial]
    taps = [(name,) for name in plan.taps]
    return (
        _Merged(_names(plan.x), [batch, inside, *spatial]),
        _Merged(_names(plan.kernel), [outside, plan.summed, *taps]),
        _Merged(_names(plan.out), [batch, outside, *spatial]),
    )


class _Merged:
    """Dims gathered into runs, as XLA's convolution wants them: one of batch, one of channels.

    The runs stand in the order in which the array has them, so that an array whose runs are
    together already is not transposed. ``places`` says where each run stands.
    """

    def __init__(self, names: Sequence[str], runs: Sequence[Sequence[str]]) -> None:
        first = [min((names.index(n) for n in run), default=len(names)) for run in runs]
        order = sorted(range(len(runs)), key=lambda i: first[i])
        self.names = names
        self.runs = [runs[i] for i in order]
        self.places = tuple(order.index(i) for i in range(len(runs)))
        self.order = [names.index(n) for n in itertools.chain(*self.runs)]

    def merge(self, array: Any) -> Any:
        """The array with one dim for each run."""
        size = dict(zip(self.names, array.shape, strict=True))
        shape = [math.prod(size[name] for name in run) for run in self.runs]
        return jnp.transpose(array, self.order).reshape(shape)

    def unmerge(self, array: Any, sizes: Mapping[str, int]) -> Any:
        """Back from :meth:`merge`, to dims of these sizes."""
        array = array.reshape([sizes[self.names[i]] for i in self.order])
        return jnp.transpose(array, [self.order.index(i) for i in range(array.ndim)])
