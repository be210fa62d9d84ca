"""Moving runs of elements along a dim: what concat, slice, pad and shift have in common.

Each is an array whose element ``i`` comes to stand at ``i + at``. Where the dim is split, every
device sends to each other one just the run that it needs, by collective permutes. XLA does so by
itself for some sizes; for others, and for many gradients, it gathers the whole dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..layouts.dim_rules import Dim, Dims, as_dims
from .array import NamedArray, as_named, position
from .pieces import held_whole, on_pieces, split_of

Parts = Sequence[tuple[NamedArray, int]]  # arrays, and where the first element of each shall stand


def place(parts: Parts, name: str, out: Dim, fill: Any = 0) -> NamedArray:
    """An array of which dim ``name`` is ``out``, with these in it, each from its place on.

    The arrays have the same dims in the same order, but for the size of ``name``, and do not
    overlap; what would stand outside is left out, and what none covers is ``fill``.
    """
    first = parts[0][0]
    where = position(first.dims, name)
    dims = as_dims([out if dim.name == name else dim for dim in first.dims])
    fill = NamedArray(as_named(fill).array.astype(first.dtype), ())
    axes = {split_of(x.dims).get(name) for x, _ in parts}
    if len(axes) > 1:  # not every one divides
        parts, axes = [(held_whole(x, name), at) for x, at in parts], {None}
    (axis,) = axes
    if axis is None:
        return _whole(parts, where, dims, fill)
    xs = list({id(x): x for x, _ in parts}.values())
    at = tuple(tuple(begin for other, begin in parts if other is x) for x in xs)
    split = split_of(*(x.dims for x in xs))
    after = {dim.name: split[dim.name] for dim in dims if dim.name in split and dim != out}
    stays = split_of(dims).get(out.name) == axis
    local = _exchanged if stays else _summed
    after |= {out.name: axis} if stays else {}
    options = {"at": at, "where": where, "axis": axis, "size": out.size}
    (result,) = on_pieces(local, [fill, *xs], split, [dims], after, **options)
    return result


def _whole(parts: Parts, where: int, dims: Dims, fill: NamedArray) -> NamedArray:
    """Where every device has the whole dim, or nothing is laid out."""
    size, shape = dims[where].size, [dim.size for dim in dims]
    runs: list[Any] = []
    reached = 0

    def gap(until: int) -> None:
        if until > reached:
            shape[where] = until - reached
            runs.append(jnp.broadcast_to(fill.array, shape))

    for x, begin in sorted(parts, key=lambda part: part[1]):
        low, high = max(begin, 0), min(begin + x.array.shape[where], size)
        if low < high:
            gap(low)
            runs.append(jax.lax.slice_in_dim(x.array, low - begin, high - begin, axis=where))
            reached = high
    gap(size)
    array = jnp.concatenate(runs, where) if runs else jnp.zeros(shape, fill.dtype)
    return NamedArray(array, dims)


@dataclass(frozen=True)
class Run:
    """Elements of one piece, from ``source`` on, which another piece has from ``target`` on."""

    sender: int
    receiver: int
    source: int
    target: int
    length: int


def runs(piece: int, at: int, result: int, pieces: int) -> list[Run]:
    """What goes where, if ``pieces`` pieces of a dim are put into as many of another size.

    >>> runs(piece=2, at=1, result=2, pieces=2)
    [Run(sender=0, receiver=0, source=0, target=1, length=1),
     Run(sender=0, receiver=1, source=1, target=0, length=1),
     Run(sender=1, receiver=1, source=0, target=1, length=1)]
    """
    moves = []
    for sender in range(pieces):
        begin = sender * piece + at
        end = begin + piece
        for receiver in range(max(begin // result, 0), min(-(-end // result), pieces)):
            low, high = max(begin, receiver * result), min(end, (receiver + 1) * result)
            if low < high:
                target = low - receiver * result
                moves.append(Run(sender, receiver, low - begin, target, high - low))
    return moves


def rounds(some: Sequence[Run]) -> list[list[Run]]:
    """The same in rounds in which each piece sends once and receives once, longest runs first.

    What stays on its device is in rounds of its own.
    """
    together: list[list[Run]] = []
    for run in sorted(some, key=lambda run: -run.length):
        stays = run.sender == run.receiver
        for one_round in together:
            free = all(run.sender != o.sender and run.receiver != o.receiver for o in one_round)
            if free and stays == (one_round[0].sender == one_round[0].receiver):
                one_round.append(run)
                break
        else:
            together.append([run])
    return together


def _exchanged(fill: Any, *xs: Any, at: Any, where: int, axis: str, size: int) -> list[Any]:
    """On one device: its piece of the result, of runs that other devices have."""
    pieces = jax.lax.axis_size(axis)
    result, index = size // pieces, jax.lax.axis_index(axis)
    shape = [result if i == where else n for i, n in enumerate(xs[0].shape)]
    result_piece = jnp.broadcast_to(fill, shape)
    for x, begins in zip(xs, at, strict=True):
        every = [run for begin in begins for run in runs(x.shape[where], begin, result, pieces)]
        for one_round in rounds(every):
            result_piece = _after_round(result_piece, x, one_round, where, axis, index)
    return [result_piece]


def _after_round(
    result: Any, x: Any, one_round: list[Run], where: int, axis: str, index: Any
) -> Any:
    pieces, length = jax.lax.axis_size(axis), max(run.length for run in one_round)
    # A shorter run travels with neighbours of it, so that every device sends the same length.
    starts = {run.sender: min(run.source, x.shape[where] - length) for run in one_round}
    places = {run.receiver: run.target - run.source + starts[run.sender] for run in one_round}
    low = _table({run.receiver: run.target for run in one_round}, pieces, index, 0)
    high = _table({run.receiver: run.target + run.length for run in one_round}, pieces, index, 0)
    sent = jax.lax.dynamic_slice_in_dim(x, _table(starts, pieces, index), length, where)
    if one_round[0].sender != one_round[0].receiver:
        sent = jax.lax.ppermute(sent, axis, [(run.sender, run.receiver) for run in one_round])
    window = _window(sent, _table(places, pieces, index), result.shape[where], where)
    if isinstance(low, int) and isinstance(high, int) and high - low == result.shape[where]:
        return window
    place = jax.lax.broadcasted_iota(jnp.int32, result.shape, where)
    return jnp.where((low <= place) & (place < high), window, result)


def _table(of: dict[int, int], pieces: int, index: Any, other: int | None = None) -> Any:
    """A number that differs between devices; ``other`` is that of those that ``of`` has not."""
    if other is None:
        other = next(iter(of.values()))
    numbers = [of.get(i, other) for i in range(pieces)]
    return numbers[0] if len({*numbers}) == 1 else jnp.asarray(np.array(numbers, "int32"))[index]


def _window(x: Any, begin: Any, size: int, where: int) -> Any:
    """An array of this size with ``x`` in it from ``begin`` on, and else zeros."""
    zero = jnp.zeros((), x.dtype)
    if isinstance(begin, int):
        around = {where: (begin, size - begin - x.shape[where], 0)}
        return jax.lax.pad(x, zero, [around.get(i, (0, 0, 0)) for i in range(x.ndim)])
    around = [(size, size, 0) if i == where else (0, 0, 0) for i in range(x.ndim)]
    begin = jnp.clip(begin, -x.shape[where], size)
    return jax.lax.dynamic_slice_in_dim(jax.lax.pad(x, zero, around), size - begin, size, where)


def _summed(fill: Any, *xs: Any, at: Any, where: int, axis: str, size: int) -> list[Any]:
    """On one device: the whole result, to which each device adds what it has."""
    index, covered, windows = jax.lax.axis_index(axis), np.zeros(size, bool), []
    for x, begins in zip(xs, at, strict=True):
        piece = x.shape[where]
        for begin in begins:
            windows.append(_window(x, index * piece + begin, size, where))
            covered[max(begin, 0) : max(begin + piece * jax.lax.axis_size(axis), 0)] = True
    kind = jnp.int8 if xs[0].dtype == bool else xs[0].dtype
    whole = jax.lax.psum(sum(window.astype(kind) for window in windows), axis)
    shape = [size if i == where else 1 for i in range(whole.ndim)]
    return [jnp.where(covered.reshape(shape), whole.astype(xs[0].dtype), fill)]
