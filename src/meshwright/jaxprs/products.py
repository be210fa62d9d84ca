"""Rules of products, convolutions and windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .factors import Dim, Dims, leaves
from .facts import Facts, Rule


def dot_general(f: Facts) -> list[Dims]:
    """Contracted dims are summed. Where a dim would come twice, it is moved in one operand."""
    contracted, batch = f.params["dimension_numbers"]
    left, right = f.ins
    for pairs in (batch, contracted):
        for i, j in zip(*pairs, strict=True):
            f.join(left[i], 1, right[j])
    f.summed += [left[i] or right[j] for i, j in zip(*contracted, strict=True)]
    shared = [left[i] or right[j] for i, j in zip(*batch, strict=True)]
    mine = [dim for i, dim in enumerate(left) if i not in contracted[0] and i not in batch[0]]
    yours = [dim for i, dim in enumerate(right) if i not in contracted[1] and i not in batch[1]]
    if f.backward and not shared and f.made[0] > f.made[1]:
        # In the gradient of a kernel the value keeps its dim, and its gradient finds the kernel's;
        # products that share dims are those of attention, where the second operand has the keys.
        mine = [f.moved(0, dim) if _is_among(dim, yours) else dim for dim in mine]
    return f.distinct([(*shared, *mine, *yours)])


def _is_among(dim: Dim, others: Iterable[Dim]) -> bool:
    found = {factor for other in others for factor in leaves(other)}
    return not found.isdisjoint(leaves(dim))


# Convolutions


def convolution(f: Facts) -> list[Dims]:
    """Rows and channels as in a product; what a window goes over is needed whole."""
    numbers = f.params["dimension_numbers"]
    left, right = f.ins
    rows, channels = left[numbers.lhs_spec[0]], left[numbers.lhs_spec[1]]
    features, depth = right[numbers.rhs_spec[0]], right[numbers.rhs_spec[1]]
    shape = f.out_shape()
    groups, row_groups = f.params["feature_group_count"], f.params["batch_group_count"]
    if groups > 1:
        channels = _grouped(f, channels, features, groups)
    if row_groups > 1:
        rows = _grouped(f, rows, features, row_groups)
    f.join(channels, 1, depth)
    f.summed.append(channels or depth)
    if row_groups > 1 and rows:  # XLA of JAX 0.10 gathers both operands here, and sums even so
        f.whole += [channels, depth]
    out: list[Dim] = [()] * len(shape)
    out[numbers.out_spec[0]], out[numbers.out_spec[1]] = rows, features
    for window in _windows(f):
        out[window.result] = _spatial(f, window)
    return f.distinct([tuple(out)])


def _grouped(f: Facts, dim: Dim, features: Dim, groups: int) -> Dim:
    """What is left of a dim within one of the groups, which lie as those of the features do."""
    inside, outside = f.new(_size_within(dim, groups)), f.new(groups)
    each = f.new(_size_within(features, groups))
    if not (f.factors.tie(dim, outside + inside) and f.factors.tie(features, outside + each)):
        f.whole += [dim, features]
    return inside


def _size_within(dim: Dim, groups: int) -> int:
    """The size of one of the groups of a dim."""
    return max(1, math.prod(factor.size for factor in dim) // groups)


class _Window(NamedTuple):
    """One spatial dim: its place in the operands and the result, and whether nothing moves it."""

    left: int
    right: int
    result: int
    is_plain: bool  # no stride, padding or dilation


def _windows(f: Facts) -> Iterator[_Window]:
    numbers, p = f.params["dimension_numbers"], f.params
    for i, places in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        steps = p["window_strides"][i], p["lhs_dilation"][i], p["rhs_dilation"][i]
        yield _Window(*places, steps == (1, 1, 1) and tuple(p["padding"][i]) == (0, 0))


def _spatial(f: Facts, window: _Window) -> Dim:
    """The spatial dim of the result. A window of one element changes nothing; one as large as the
    rows sums over them, as in the gradient of a kernel of one element."""
    rows, kernel = f.ins[0][window.left], f.ins[1][window.right]
    size = f.out_shape()[window.result]
    if window.is_plain and f.shape(1)[window.right] == 1:
        return rows
    if window.is_plain and size == 1:
        f.join(rows, 1, kernel)
        f.summed.append(rows)
        return ()
    f.whole += [rows, kernel]
    return rows if f.shape(0)[window.left] == size else f.new(size)


# Windows without a kernel


def window(f: Facts) -> list[Dims]:
    """Pooling: dims that the window does not go over stay."""
    return [_pooled(f, 0, f.out_shape())]


def window_and_gather(f: Facts) -> list[Dims]:
    """What is picked from the first operand as a window picks from the second one."""
    for mine, yours in zip(f.ins[0], f.ins[1], strict=True):
        f.join(mine, 1, yours)
    return [_pooled(f, 0, f.out_shape())]


def window_and_scatter(f: Facts) -> list[Dims]:
    """The gradient of pooling: a source, small, goes where the windows of an operand tell."""
    alone = _untouched(f)
    for place, (small, large) in enumerate(zip(f.ins[0], f.ins[1], strict=True)):
        if alone[place]:
            f.join(large, 0, small)
        else:
            f.whole += [small, large]
    return [f.ins[1]]


def _pooled(f: Facts, operand: int, shape: tuple[int, ...]) -> Dims:
    alone = _untouched(f)
    out: list[Dim] = []
    for place, size in enumerate(shape):
        dim = f.ins[operand][place]
        if not alone[place]:
            f.whole.append(dim)
        out.append(dim if f.shape(operand)[place] == size else f.new(size))
    return tuple(out)


def _untouched(f: Facts) -> list[bool]:
    """Per dim, whether its windows are single elements, one after another."""
    p = f.params
    steps = [p[name] for name in _STEPS if p.get(name) is not None]
    paddings: Any = p["padding"]
    return [
        all(step[i] == 1 for step in steps) and tuple(padding) == (0, 0)
        for i, padding in enumerate(paddings)
    ]


_STEPS = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")

RULES: dict[str, Rule] = {
    "conv_general_dilated": convolution,
    "dot_general": dot_general,
    **dict.fromkeys(
        ["reduce_window_max", "reduce_window_min", "reduce_window_sum", "reduce_window"], window
    ),
    "select_and_gather_add": window_and_gather,
    "select_and_scatter_add": window_and_scatter,
}
