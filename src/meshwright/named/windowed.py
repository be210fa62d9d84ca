"""Windows that move along named dims: what convolution and pooling have in common.

A dim that windows move along may be split like any other. Each device then fetches from its
neighbours the rows that its windows reach (``step/halo.py``), and works on what it holds. It is
written out under ``shard_map`` because XLA by itself gets gradients of split windows wrong
(``step/spatial.py`` says which).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..errors import DimError, DivisibilityError
from ..layouts.dim_rules import Dim, as_dims
from ..step.halo import Halo, Window, fetch_along, halo
from .rules import BoundRules, in_force

Numbers = int | str | Sequence[int] | Mapping[str, int]  # for all, or for each in order or by name
Padding = Any  # "SAME", "VALID", rows on both sides, a pair of them; or these per dim, or by name


@dataclass(frozen=True)
class Along:
    """How windows lie along one dim, and along which axes it and the kernel's dim are split.

    Those are ``axis`` and ``window_axis``, with their numbers of pieces. ``flipped`` says that
    the kernel's rows are used last first, as in transposed convolution.
    """

    dim: Dim
    results: int
    window: Window
    padding_text: str = ""  # the padding, in the user's words
    flipped: bool = False
    axis: str | None = None
    pieces: int = 1
    window_axis: str | None = None
    window_pieces: int = 1


# What the user says of windows


def per_dim(value: Any, names: Sequence[str], what: str, default: Any = None) -> dict[str, Any]:
    """A value for each dim, from one for all, one each in order, or some by name."""
    if isinstance(value, str) and ":" in value:
        value = {dim.name: dim.size for dim in as_dims(value)}
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in names]
        lacking = [name for name in names if name not in value] if default is None else []
        if unknown or lacking:
            fault = f"names {_quoted(unknown)}" if unknown else f"lacks {_quoted(lacking)}"
            raise DimError(f"{what} {fault}; the windows move along {_quoted(names) or 'no dim'}.")
        return {name: value.get(name, default) for name in names}
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != len(names):
            raise DimError(
                f"{what}={value!r} has length {len(value)}, and the windows move along "
                f"{len(names)} dims ({_quoted(names)}). Give one for each dim, or name the dims: "
                f"{{{', '.join(f'{name!r}: ...' for name in names)}}}."
            )
        return dict(zip(names, value, strict=True))
    return dict.fromkeys(names, value)


def counts(value: Numbers, names: Sequence[str], what: str) -> dict[str, int]:
    """Whole numbers, at least 1, one for each dim. Raises :class:`DimError` for others."""
    numbers = per_dim(value, names, what, default=1)
    if wrong := {name: n for name, n in numbers.items() if not _is_whole(n) or n < 1}:
        raise DimError(
            f"{what} must be whole numbers, at least 1; received "
            f"{', '.join(f'{n!r} for dim {name!r}' for name, n in wrong.items())}."
        )
    return numbers


def along(
    dim: Dim, size: int, stride: int, dilation: int, padding: Any, *, transposed: bool = False
) -> Along:
    """How windows of this size lie along a dim; ``results`` may come out below 1.

    SAME gives a result for each stride, padded alike on both sides, one more after where it is
    odd. A transposed window is the adjoint of the plain one with the same stride and padding.
    """
    reach = (size - 1) * dilation + 1
    pair, padding_text = _pair(padding, dim.name)
    if not transposed:
        results = -(-dim.size // stride)
        if padding_text == "SAME":
            pair = _halves((results - 1) * stride + reach - dim.size)
        results = (dim.size + sum(pair) - reach) // stride + 1
        return Along(dim, results, Window(size, stride, pair, 1, dilation), padding_text)
    last = (dim.size - 1) * stride  # where the last window begins
    if padding_text == "SAME":
        pair = _halves(reach - stride)
    results = {"SAME": dim.size * stride, "VALID": last + max(reach, stride)}.get(
        padding_text, last + reach - sum(pair)
    )
    before = reach - 1 - pair[0]
    around = (before, results + reach - 2 - last - before)
    return Along(
        dim, results, Window(size, 1, around, stride, dilation), padding_text, flipped=True
    )


def _pair(padding: Any, name: str) -> tuple[tuple[int, int], str]:
    if isinstance(padding, str) and padding.upper() in ("SAME", "VALID"):
        return (0, 0), padding.upper()
    rows: Any = [padding] * 2 if _is_whole(padding) else padding
    if not isinstance(rows, str) and isinstance(rows, Sequence) and len(rows) == 2:
        low, high = rows
        if _is_whole(low) and _is_whole(high) and min(low, high) >= 0:
            return (low, high), f"({low}, {high})"
    raise DimError(
        f"padding {padding!r} for dim {name!r} is not 'SAME', 'VALID', or a pair such as (1, 1): "
        "the numbers of rows before and after, at least 0."
    )


def _halves(total: int) -> tuple[int, int]:
    total = max(total, 0)
    return total // 2, total - total // 2


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


# What the rules say of it


def check_fits(several: Sequence[Along], what: str) -> None:
    """Raise :class:`DimError` where windows give no result at all."""
    faults = [
        f"{what}: dim {one.dim.name!r} (size {one.dim.size}) gives no result for "
        f"{_window_text(one)}. "
        + (
            "Cut off less: the pair says how many rows of the result go."
            if one.flipped
            else "Pad it (padding='SAME', or a pair of rows), or use a smaller window."
        )
        for one in several
        if one.results < 1
    ]
    if faults:
        raise DimError("\n".join(faults))


def laid_along(
    several: Sequence[Along], windows: Sequence[Dim], what: str, *, padded: bool = True
) -> tuple[Along, ...]:
    """The same, with the axes that the rules in force give; ``windows`` are the kernel's dims.

    Raises :class:`DivisibilityError` where the results do not divide; ``padded`` says that padding
    could be a way out.
    """
    bound = in_force()
    if bound is None:
        return tuple(several)
    placed, faults = [], []
    for one, window in zip(several, windows or [None] * len(several), strict=True):
        axis, pieces = _cut(bound, one.dim.name)
        if one.results % pieces:
            faults.append(_uneven(one, axis, pieces, what, padded))
        window_axis, window_pieces = _cut(bound, window.name) if window else (None, 1)
        placed.append(
            replace(one, axis=axis, pieces=pieces, window_axis=window_axis,
                    window_pieces=window_pieces)
        )  # fmt: skip
    if faults:
        raise DivisibilityError("\n".join(faults))
    return tuple(several if bound.only_check else placed)


def _cut(bound: BoundRules, name: str) -> tuple[str | None, int]:
    """The axis that splits dims of this name, and into how many pieces.

    Raises :class:`LayoutError` for several axes: devices exchange their borders along one.
    """
    axis = bound.rules.axis(name)
    return (None, 1) if axis is None or bound.mesh[axis] == 1 else (axis, bound.mesh[axis])


def _split(bound: BoundRules, name: str) -> tuple[str, ...] | None:
    """The axes that split dims of this name."""
    return tuple(axis for axis in bound.rules.axes(name) if bound.mesh[axis] > 1) or None


def _reach(one: Along) -> int:
    return (one.window.size - 1) * one.window.dilation + 1


def _uneven(one: Along, axis: str | None, pieces: int, what: str, padded: bool) -> str:
    name, window = one.dim.name, one.window
    ways = [f"rename {name!r} before, to a name that no rule splits"]
    if padded and (better := _better(one, pieces)):
        pair, results = better
        ways.insert(0, f"pad {name!r} by {pair}, which gives {results}")
    if padded and one.padding_text != "SAME":
        how = _stride(one), window.dilation, "SAME"
        same = along(one.dim, window.size, *how, transposed=one.flipped)
        if same.results % pieces == 0:
            ways.insert(0, f"use padding='SAME', which gives {same.results}")
    return (
        f"{what}: dim {name!r} (size {one.dim.size}) becomes {one.results} for "
        f"{_window_text(one)}, and does not divide over axis {axis!r} (size {pieces}) then. "
        f"Ways out: {'; or '.join(ways)}."
    )


def _window_text(one: Along) -> str:
    """A window as one reads it: ``a window of 3 (stride 1, padding VALID)``."""
    gaps = f", dilation {one.window.dilation}" if one.window.dilation > 1 else ""
    return (
        f"a window of {one.window.size} (stride {_stride(one)}{gaps}, padding {one.padding_text})"
    )


def _stride(one: Along) -> int:
    return one.window.base_dilation if one.flipped else one.window.stride


def _better(one: Along, pieces: int) -> tuple[tuple[int, int], int] | None:
    """Padding after that gives results which divide, where that takes less than a window."""
    window, reach = one.window, _reach(one)
    if one.flipped:
        low = reach - 1 - window.padding[0]
        results = one.results // pieces * pieces
        high = (one.dim.size - 1) * window.base_dilation + reach - low - results
    else:
        low = window.padding[0]
        results = -(-one.results // pieces) * pieces
        high = (results - 1) * window.stride + reach - one.dim.size - low
    return ((low, high), results) if 0 <= high < reach and results else None


# On every device


def by_device(
    function: Callable[..., Any],
    bound: BoundRules | None,
    ins: Sequence[Sequence[Dim]],
    out: Sequence[Dim],
) -> Callable[..., Any]:
    """The function of bare arrays, run by each device on its pieces; without rules, as it is."""
    if bound is None:
        return function
    specs = [PartitionSpec(*(_split(bound, dim.name) for dim in dims)) for dims in (*ins, out)]
    return jax.shard_map(
        function, mesh=bound.mesh.jax_mesh, in_specs=tuple(specs[:-1]), out_specs=specs[-1]
    )


def laying() -> BoundRules | None:
    """The rules in force, if there are devices that arrays can be laid out on."""
    bound = in_force()
    return None if bound is None or bound.only_check else bound


def reached(x: Any, place: int, one: Along, fill: Any) -> tuple[Any, tuple[int, int], int]:
    """The rows that this device's windows reach, what is yet to be put around and between them.

    Where a window reaches so far that devices would need each other's rows whole, they are
    gathered along this one dim. Where the kernel is split, the rows are those of its piece.
    """
    window, padding = one.window, one.window.padding
    need: Halo | None = None
    if one.axis is not None:
        need = halo(window, one.dim.size, one.results, one.pieces)
        if need is not None:
            x, padding = fetch_along(x, place, (one.axis,), need, fill), need.padding
        else:
            x = jax.lax.all_gather(x, one.axis, axis=place, tiled=True)
    whole = one.axis is not None and need is None
    if not whole and one.window_axis is None:
        return x, padding, window.base_dilation
    around = [(0, 0, 0)] * x.ndim
    around[place] = (*padding, window.base_dilation - 1)
    x = jax.lax.pad(x, fill, around)
    results, taps = one.results // one.pieces, window.size // one.window_pieces
    start = 0
    if whole:
        start = jax.lax.axis_index(one.axis) * (results * window.stride)
    if one.window_axis is not None:
        index = jax.lax.axis_index(one.window_axis)
        index = one.window_pieces - 1 - index if one.flipped else index
        start = start + index * (taps * window.dilation)
    rows = (results - 1) * window.stride + (taps - 1) * window.dilation + 1
    return jax.lax.dynamic_slice_in_dim(x, start, rows, place), (0, 0), 1
