"""The closed forms: what work and pieces cost, for many assignments of axes at once.

``Lay`` holds, for each unit, an array of sets of axes (see :class:`Setting`); every function
answers with an array of the same length, so that one assignment and a table of all are one code:
what the search ranks by is what the report of one layout says.

Work is divided by the devices along whose axes any of its dims lies, arrays by those of their own
dims. Dims that are summed and split leave partial sums, which are summed over devices; dims that an
operation needs whole are gathered (the rules of Mesh-TensorFlow: Shazeer et al. 2018).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...jaxprs.products import PRODUCTS, is_skinny
from ...layouts.zero import SMALL_ELEMENTS
from .choices import Choices
from .compact import Compact, Move, Piece, Work
from .setting import Setting

Values = np.ndarray


class Spent(NamedTuple):
    """Seconds of a term, and the bytes of its collectives."""

    compute_s: Values
    communication_s: Values
    bytes_per_device: Values


@dataclass(frozen=True, eq=False)
class Lay:
    """Assignments: ``masks`` per unit, each an array of sets of axes; others lie along none."""

    problem: Compact
    setting: Setting
    choices: Choices
    masks: Mapping[int, Values]
    rows: int
    memo: dict[object, Values] = field(default_factory=dict)  # the same is asked again and again

    def mask(self, unit: int) -> Values:
        """The axes of a unit."""
        result = self.masks.get(unit)
        return self.nothing if result is None else result

    @functools.cached_property
    def nothing(self) -> Values:
        """No axes."""
        return np.zeros(self.rows, np.int64)

    def along(self, unit: int) -> Values:
        """Into how many pieces a unit is cut."""
        if unit not in self.memo:
            self.memo[unit] = self.size(self.mask(unit))
        return self.memo[unit]

    def union(self, units: frozenset[int]) -> Values:
        """The axes that any of these units lies along."""
        return functools.reduce(np.bitwise_or, map(self.mask, units), self.nothing)

    def size(self, mask: Values) -> Values:
        return self.setting.size_of[mask]

    @property
    def batch(self) -> Values:
        """The axes of the batch's rows."""
        if self.problem.batch is None:
            return self.nothing
        return self.mask(self.problem.batch)

    def loops(self, piece: Piece) -> int:
        """Into how many micro-batches a piece is cut."""
        has_rows = self.problem.batch in piece.scope and piece.kind == "activation"
        return self.choices.accumulate if has_rows else 1


# Bytes


def shards(lay: Lay, piece: Piece) -> Values:
    """Into how many pieces an array is cut by the axes of its units."""
    key = ("shards", piece.units)
    if key not in lay.memo:
        lay.memo[key] = _shards(lay, piece)
    return lay.memo[key]


def _shards(lay: Lay, piece: Piece) -> Values:
    product = np.ones(lay.rows, np.int64)
    for unit in piece.units:
        if unit is not None:
            product = product * lay.along(unit)
    return product


def replicas_sharing(lay: Lay, piece: Piece) -> Values:
    """Among how many replicas ZeRO shares an array out; see :mod:`meshwright.layouts.zero`."""
    key = ("replicas", piece.units, piece.shape)
    if key not in lay.memo:
        lay.memo[key] = _replicas_sharing(lay, piece)
    return lay.memo[key]


def _replicas_sharing(lay: Lay, piece: Piece) -> Values:
    replicas = lay.size(lay.batch)
    elements = np.ones(lay.rows, np.int64)
    divides = np.zeros(lay.rows, bool)
    for unit, size in zip(piece.units, piece.shape, strict=True):
        local = size // lay.along(unit) if unit is not None else np.full(lay.rows, size)
        divides |= local % replicas == 0
        elements = elements * local
    free = (lay.union(piece.scope) & lay.batch) == 0
    return np.where(divides & free & (elements > SMALL_ELEMENTS), replicas, 1)


def is_shared(piece: Piece, zero: int) -> bool:
    """Whether this level of ZeRO shares such pieces out while they rest."""
    level = {"parameter": 3, "gradient": 2, "update": 1, "slot": 1, "accumulator": 2}
    return zero >= level.get(piece.kind, 4)


def resting_bytes(lay: Lay, piece: Piece) -> Values:
    """Bytes of one device's part of an array while it is not in use."""
    if piece.kind == "gathered":
        return np.where(replicas_sharing(lay, piece) > 1, piece.nbytes // shards(lay, piece), 0)
    divisor = shards(lay, piece) * lay.loops(piece)
    if is_shared(piece, lay.choices.zero):
        divisor = divisor * replicas_sharing(lay, piece)
    return -(-piece.nbytes // divisor)


def used_bytes(lay: Lay, piece: Piece, work: Work) -> Values:
    """Bytes of an array as an operation takes it: what it wants whole is gathered."""
    moves = tuple(move for move in work.moves if lay.problem.pieces[move.piece] == piece)
    key = ("used", piece, piece.scope & work.whole, moves)
    if key not in lay.memo:
        targets = {move.source: move.target for move in moves}
        divisor = np.full(lay.rows, lay.loops(piece), np.int64)
        for unit in piece.scope - work.whole:
            divisor = divisor * lay.along(targets.get(unit, unit))
        lay.memo[key] = -(-piece.nbytes // divisor)
    return lay.memo[key]


def room_bytes(lay: Lay, work: Work) -> Values:
    """Bytes of the copies that an operation holds while it runs."""
    total = np.zeros(lay.rows, np.int64)
    moved = {move.piece for move in work.moves}
    pieces = lay.problem.pieces
    for place in dict.fromkeys(work.operands):
        piece = pieces[place]
        copied = np.zeros(lay.rows, bool)
        if piece.scope & work.whole:
            copied |= lay.union(piece.scope & work.whole) != 0
        for move in work.moves:
            if place in moved and move.piece == place:
                copied |= (lay.mask(move.source) & ~lay.mask(move.target)) != 0
        if piece.kind in ("parameter", "cast") and _gathers(lay, work):
            copied |= replicas_sharing(lay, piece) > 1
        if copied.any():
            total = total + np.where(copied, used_bytes(lay, piece, work), 0)
    for place in work.writes:
        if pieces[place].kind != "gradient" or _is_by_layers(lay, work):
            continue
        if lay.choices.zero >= 2 and not (_follows(lay, work) or _stacks_sums(lay, work)):
            shared = replicas_sharing(lay, pieces[place]) > 1
            total = total + np.where(shared, used_bytes(lay, pieces[place], work), 0)
    return total


def _gathers(lay: Lay, work: Work) -> bool:
    """Whether level 3 gathers the parameters that an operation reads, for as long as it runs.

    On CPU all are there at once. A cast is made of the part that a device keeps.
    """
    kinds = {lay.problem.pieces[place].kind for place in work.results}
    apart = lay.problem.platform == "cpu" or kinds == {"cast"} or _updates(lay, work)
    return lay.choices.zero == 3 and not apart and not _is_by_layers(lay, work)


def _is_by_layers(lay: Lay, work: Work) -> bool:
    """Whether level 3 gathers, or scatters, one layer at a time of a stack that a loop reads."""
    return lay.choices.zero == 3 and work.kind == "scan"


def _stacks_sums(lay: Lay, work: Work) -> bool:
    """Whether level 3 puts gradients of single layers, which are summed, into their stack."""
    kinds = {lay.problem.pieces[place].kind for place in work.operands}
    is_simple = work.kind == "elementwise" and kinds <= {"gradient", "layer gradient"}
    return lay.choices.zero == 3 and lay.problem.platform != "cpu" and is_simple


def _follows(lay: Lay, work: Work) -> bool:
    """Whether it is done to the part of a gradient that a device keeps, after the sum."""
    kinds = [lay.problem.pieces[place].kind for place in work.operands]
    return kinds == ["gradient"] and not work.summed


# Seconds


def work_spent(lay: Lay, work: Work) -> Spent:
    """What all runs of one operation take in a step."""
    runs = runs_of(lay, work)
    flops, moved = work_done(lay, work)
    compute_s = np.maximum(arithmetic_s(lay, work, flops), moved * lay.setting.seconds_per_byte)
    talk_s, nbytes = _talk(lay, talks_of(lay, work))
    return Spent(runs * compute_s, runs * talk_s, runs * nbytes)


def runs_of(lay: Lay, work: Work) -> int:
    """How often an operation runs in a step, micro-batches apart."""
    return work.times * work.runs_with(lay.choices.remat)


def work_done(lay: Lay, work: Work) -> tuple[Values, Values]:
    """FLOPs of one run of an operation in one device, and the bytes that it reads and writes."""
    loops = lay.choices.accumulate if _has_rows(lay, work) else 1
    divisor = lay.size(lay.union(work.units)).astype(float)
    updates = _updates(lay, work)
    if updates:
        divisor = divisor * _pieces(lay, lay.problem.pieces[work.results[0]])
    moved, pieces = np.zeros(lay.rows), lay.problem.pieces
    for place, count in work.far_counts:
        cut = _pieces(lay, pieces[place]) if updates else 1
        moved = moved + count * loops * used_bytes(lay, pieces[place], work) / cut
    for place, count in work.near_counts:
        rest = used_bytes(lay, pieces[place], work) - lay.setting.kept_bytes
        moved = moved + count * loops * np.maximum(rest, 0.0)
    return work.flops / divisor, moved


def arithmetic_s(lay: Lay, work: Work, flops: Values) -> Values:
    """Seconds that FLOPs take, by the shape of what one device multiplies at once."""
    product, seconds = work.product, lay.setting.seconds_per_flop
    plain, skinny, transposed = (seconds[kind].get(work.dtype, 0.0) for kind in PRODUCTS)
    if product is None or plain == skinny == transposed:
        return flops * seconds[work.rate].get(work.dtype, 0.0)
    beside = _side_by_side(lay, work)
    sides = (product.rows, product.columns, product.depth)
    by_rows = np.where(
        is_skinny(*(_local_size(lay, work, s, beside) for s in sides)), skinny, plain
    )
    # Micro-batches side by side are laid beside each other for it, and no product is transposed.
    return flops * (np.where(beside, by_rows, transposed) if product.is_transposed else by_rows)


def least_seconds_per_flop(setting: Setting, work: Work) -> float:
    """The least that any layout comes to."""
    kinds = (work.rate,) if work.product is None else PRODUCTS
    return min(setting.seconds_per_flop[kind].get(work.dtype, 0.0) for kind in kinds)


def _side_by_side(lay: Lay, work: Work) -> Values:
    """Whether micro-batches are taken at once, as if they were one: on CPUs, where all that a loss
    computes takes no more than the parameters (``step/accumulate.py``)."""
    problem, count = lay.problem, lay.choices.accumulate
    if count == 1 or problem.batch not in work.units | work.summed or problem.has_state:
        return np.zeros(lay.rows, bool)
    others = problem.loss_bytes * (count - 1) / count
    return others <= lay.size(lay.batch) * problem.parameter_bytes


def _local_size(
    lay: Lay, work: Work, dims: tuple[tuple[int | None, int], ...], beside: Values
) -> Values:
    """How many rows, columns or the like of a product one device has at once."""
    result = np.ones(lay.rows, np.int64)
    for unit, size in dims:
        pieces = lay.along(unit) if unit is not None and unit in work.units else 1
        is_batch = unit is not None and unit == lay.problem.batch
        loops = np.where(beside, 1, lay.choices.accumulate) if is_batch else 1
        result = result * (size // (pieces * loops))
    return result


def parameter_spent(lay: Lay, piece: Piece) -> Spent:
    """What ZeRO gathers of one parameter in a step.

    Levels 1 and 2 gather the new value once; level 3 the parameter for the forward and again for
    the backward pass of each micro-batch (Rajbhandari et al. 2020).
    """
    return Spent(np.zeros(lay.rows), *_talk(lay, parameter_talks(lay, piece)))


# What devices tell each other


class Talk(NamedTuple):
    """A collective over the axes ``over``, ``times`` times; its bytes are those in one device.

    ``piece`` is what is summed, gathered or moved; the first, where it is several.
    """

    kind: str
    over: Values
    nbytes: Values
    times: int
    piece: Piece


def parameter_talks(lay: Lay, piece: Piece) -> list[Talk]:
    """What ZeRO gathers of one parameter; at level 3 in the type that products take."""
    zero = lay.choices.zero
    if zero == 0:
        return []
    times = 2 * lay.choices.accumulate if zero == 3 else 1
    over = np.where(replicas_sharing(lay, piece) > 1, lay.batch, 0)
    nbytes = piece.sent_nbytes if zero == 3 else piece.nbytes
    return [Talk("all-gather", over, nbytes / shards(lay, piece), times, piece)]


def talks_of(lay: Lay, work: Work) -> list[Talk]:
    """The collectives of one run of an operation."""
    loops = lay.choices.accumulate if _has_rows(lay, work) else 1
    result = [_moved(lay, move, loops) for move in work.moves]
    result += [
        _gathered(lay, work, place, loops)
        for place in dict.fromkeys(work.operands)
        if lay.problem.pieces[place].scope & work.whole
    ]
    return result + (_sums(lay, work, loops) if work.summed else [])


def _talk(lay: Lay, talks: list[Talk]) -> tuple[Values, Values]:
    """Seconds and bytes of collectives."""
    talk_s, nbytes = np.zeros(lay.rows), np.zeros(lay.rows)
    for talk in talks:
        rate, delay = lay.setting.rate_s_per_byte[talk.kind], lay.setting.delay_s[talk.kind]
        talk_s = talk_s + talk.times * (talk.nbytes * rate[talk.over] + delay[talk.over])
        nbytes = nbytes + talk.times * np.where(lay.size(talk.over) > 1, talk.nbytes, 0.0)
    return talk_s, nbytes


def _moved(lay: Lay, move: Move, loops: int) -> Talk:
    """From the axes of ``source`` to those of ``target``: what is lost is gathered, what is new is
    cut for nothing."""
    piece = lay.problem.pieces[move.piece]
    axes = lay.mask(move.source) & ~lay.mask(move.target)
    common = lay.size(lay.mask(move.source) & lay.mask(move.target))
    others = shards(lay, piece) // lay.size(lay.mask(move.source))
    nbytes = piece.nbytes / (others * common * lay.loops(piece))
    return Talk("all-gather", axes, nbytes, loops, piece)


def _gathered(lay: Lay, work: Work, place: int, loops: int) -> Talk:
    piece = lay.problem.pieces[place]
    axes = lay.union(piece.scope & work.whole)
    return Talk("all-gather", axes, used_bytes(lay, piece, work).astype(float), loops, piece)


def _sums(lay: Lay, work: Work, loops: int) -> list[Talk]:
    """Sums over devices; of gradients once per step, but for each micro-batch from level 2 on, and
    within loops.

    At any level of ZeRO they are summed to the pieces that are updated. That is what the step
    does, see ``step/sharing.py``, ``step/loop_scatters.py`` and ``step/accumulate.py``.
    """
    over, zero = lay.union(work.summed), lay.choices.zero
    plain, once, result = np.zeros(lay.rows), np.zeros(lay.rows), []
    for place in work.results:
        piece = lay.problem.pieces[place]
        nbytes = piece.nbytes / (shards(lay, piece) * lay.loops(piece))
        in_loop = piece.kind == "layer gradient"
        if "gradient" not in piece.kind or (zero == 0 and in_loop):
            plain = plain + nbytes
        elif zero == 0:
            once = once + nbytes
        else:
            rows = np.where(replicas_sharing(lay, piece) > 1, over & lay.batch, 0)
            times = loops if zero > 1 or in_loop else 1
            for kind, axes in (("reduce-scatter", rows), ("all-reduce", over & ~rows)):
                result.append(Talk(kind, axes, nbytes, times, piece))
    for times, nbytes in ((loops, plain), (1, once)):
        if np.any(nbytes):
            first = lay.problem.pieces[work.results[0]]
            result.append(Talk("all-reduce", over, nbytes, times, first))
    return result


def _pieces(lay: Lay, piece: Piece) -> Values | int:
    """Into how many pieces ZeRO, at any level, cuts what is updated."""
    shares = piece.is_shareable and lay.choices.zero
    return replicas_sharing(lay, piece) if shares else 1


def _has_rows(lay: Lay, work: Work) -> bool:
    batch = lay.problem.batch
    return batch in work.units or batch in work.whole or batch in work.summed


def _updates(lay: Lay, work: Work) -> bool:
    kinds = {lay.problem.pieces[place].kind for place in work.results}
    return bool(kinds) and kinds <= {"update", "parameter", "slot"}
