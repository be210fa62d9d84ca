"""A tick table as the numbers that a compiled step reads: which micro-batch, which buffer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .table import LATE_WEIGHTS, Chunk, Spans, TickTable, Work, most_at_once

NOTHING = -1


class Row(NamedTuple):
    """What one stage does at one tick, or arrays of it: micro-batch, repeat and buffer numbers.

    ``NOTHING`` where it does nothing; what arrives and is not needed goes into a buffer of its own.
    """

    forward: Any  # micro-batch
    forward_repeat: Any
    forward_slot: Any  # of its input
    result_slot: Any  # of its result, among the gradients, where the loss reads it
    backward: Any
    backward_repeat: Any
    backward_slot: Any
    gradient_slot: Any  # of the gradient of its result
    cut_slot: Any  # of what the gradients of weights need, if they wait; else NOTHING
    weights: Any  # those that waited, LATE_WEIGHTS in each tick
    weights_repeat: Any
    weights_slot: Any
    weights_cut_slot: Any
    loss: Any  # micro-batch of which what comes after the blocks is computed, where all stages do
    loss_slot: Any  # of its result, then of the gradient of that
    loss_begins: Any  # slot of the gradients that go around from this tick on
    stage: Any
    arriving: Any  # slot that the neighbour's result goes to
    arriving_gradient: Any


class Phase(NamedTuple):
    """Ticks from ``first`` to before ``end``, in which directions stages work there, and whether
    on gradients of weights that waited."""

    first: int
    end: int
    forward: bool
    backward: bool
    weights: bool = False


class Kept(NamedTuple):
    """What a step keeps between ticks, and how long; each but the losses by stage."""

    inputs: list[Spans]
    gradients: list[Spans]  # that arrived, and results that the loss reads
    cuts: list[Spans]  # what gradients of weights need, if they wait
    results: list[Spans]  # those among the gradients
    losses: Spans

    @classmethod
    def of(cls, table: TickTable, keeps_results: bool = False) -> Kept:
        """That of a table; ``keeps_results`` where what comes after the blocks is not computed
        again, but reads their results when it is differentiated."""
        stages = range(table.stages)
        keeps_results &= not table.shares_loss
        results = [table.kept_results(stage) if keeps_results else {} for stage in stages]
        return cls(
            [table.lifetimes(stage) for stage in stages],
            [table.kept_gradients(stage) | results[stage] for stage in stages],
            [table.kept_cuts(stage) for stage in stages],
            results,
            table.kept_losses(),
        )

    def buffers(self) -> tuple[int, int, int, int]:
        """How many buffers there are for inputs, gradients, cuts and losses.

        >>> from meshwright.stages.table import table_of
        >>> Kept.of(table_of("1f1b", stages=2, micro_batches=3)).buffers()
        (3, 1, 0, 0)
        """
        inputs, gradients, cuts = (
            max(map(most_at_once, spans)) for spans in (self.inputs, self.gradients, self.cuts)
        )
        return inputs, max(1, gradients), cuts, most_at_once(self.losses)


@dataclass(frozen=True, eq=False)
class TickPlan:
    """The rows of a table, each array of shape ``(ticks, stages)``, and how many buffers it takes.

    >>> from meshwright.stages.table import table_of
    >>> plan = TickPlan.of(table_of("1f1b", stages=2, micro_batches=3))
    >>> plan.slots, plan.gradient_slots, plan.rows.forward.tolist()
    (3, 1, [[0, -1], [1, 0], [2, 1], [-1, 2], [-1, -1]])
    """

    table: TickTable
    rows: Row
    slots: int
    gradient_slots: int
    cut_slots: int
    loss_slots: int = 0

    def phases(self) -> list[Phase]:
        """Runs of ticks in which any stage works forward, backward, or on gradients of weights.

        >>> from meshwright.stages.table import table_of
        >>> for phase in TickPlan.of(table_of("1f1b", stages=3, micro_batches=8)).phases():
        ...     print(phase)
        Phase(first=0, end=2, forward=True, backward=False, weights=False)
        Phase(first=2, end=10, forward=True, backward=True, weights=False)
        Phase(first=10, end=12, forward=False, backward=True, weights=False)
        """
        kinds = self.rows.forward, self.rows.backward, self.rows.weights
        works = [(of >= 0).reshape(len(of), -1).any(1).tolist() for of in kinds]
        phases, first = [], 0
        for kinds, ticks in itertools.groupby(zip(*works, strict=True)):
            end = first + len(list(ticks))
            phases.append(Phase(first, end, *kinds))
            first = end
        return phases

    def loops(self, skips: bool) -> list[Phase]:
        """The loops of a step: one where stages may skip what they have no work for and some tick
        has work in both directions, else one for each of :meth:`phases`."""
        phases = self.phases()
        if not skips or not any(phase.forward and phase.backward for phase in phases):
            return phases
        weights = any(phase.weights for phase in phases)
        return [Phase(0, len(self.table.ticks), forward=True, backward=True, weights=weights)]

    @classmethod
    def of(cls, table: TickTable, keeps_results: bool = False) -> TickPlan:
        """The plan of a table, which keeps what :meth:`Kept.of` says."""
        kept = Kept.of(table, keeps_results)
        slots, gradient_slots, cut_slots, loss_slots = kept.buffers()
        buffers = _Buffers.of(kept)
        rows = _empty_rows(table)
        rows.arriving[:] = slots
        rows.arriving_gradient[:] = rows.result_slot[:] = gradient_slots
        _add_works(rows, table, buffers, kept, gradient_slots)
        _add_arrivals(rows, table, buffers, kept)
        for group, (_, tick) in kept.losses.items():
            rows.loss_begins[tick] = buffers.losses[group]
        return cls(table, rows, slots, gradient_slots, cut_slots, loss_slots)


class _Buffers(NamedTuple):
    """The buffer in which each chunk is kept, by stage, and that of each group of losses."""

    inputs: list[dict[Chunk, int]]
    gradients: list[dict[Chunk, int]]
    cuts: list[dict[Chunk, int]]
    losses: dict[Chunk, int]

    @classmethod
    def of(cls, kept: Kept) -> _Buffers:
        inputs, gradients, cuts = (
            [_slots(spans) for spans in of] for of in (kept.inputs, kept.gradients, kept.cuts)
        )
        return cls(inputs, gradients, cuts, _slots(kept.losses))


def _empty_rows(table: TickTable) -> Row:
    """Rows of ticks by stages, all without work."""
    shape = (len(table.ticks), table.stages)
    late = {"weights", "weights_repeat", "weights_slot", "weights_cut_slot"}
    rows = Row(
        *(
            np.full((*shape, LATE_WEIGHTS) if name in late else shape, NOTHING, np.int32)
            for name in Row._fields
        )
    )
    rows.stage[:] = np.arange(table.stages)
    return rows


def _add_works(
    rows: Row, table: TickTable, buffers: _Buffers, kept: Kept, gradient_slots: int
) -> None:
    """What each stage computes at each tick, and with which buffers."""
    inputs, gradients, cuts, losses = buffers
    for tick, stage, work in table.works():
        chunk, at = work.chunk, (tick, stage)
        slot, cut = inputs[stage][chunk], cuts[stage].get(chunk, NOTHING)
        if work.kind == "forward":
            rows.forward[at], rows.forward_repeat[at], rows.forward_slot[at] = *chunk, slot
            if chunk in kept.results[stage]:
                rows.result_slot[at] = gradients[stage][chunk]
        elif work.kind == "backward":
            rows.backward[at], rows.backward_repeat[at], rows.backward_slot[at] = *chunk, slot
            rows.gradient_slot[at] = gradients[stage].get(chunk, gradient_slots)
            rows.cut_slot[at] = cut
        elif work.kind == "loss":
            rows.loss[at], rows.loss_slot[at] = work.micro_batch, losses[table.group_of(chunk)]
        elif cut != NOTHING:
            here = (*at, int((rows.weights[at] != NOTHING).sum()))
            rows.weights[here], rows.weights_repeat[here] = chunk
            rows.weights_slot[here], rows.weights_cut_slot[here] = slot, cut


def _add_arrivals(rows: Row, table: TickTable, buffers: _Buffers, kept: Kept) -> None:
    """Where each stage puts what arrives at each tick: one after the neighbour has computed it."""
    for stage in range(table.stages):
        for chunk, slot in buffers.inputs[stage].items():
            if (sender := table.before(stage, chunk)) is not None:
                at = table.when[sender[0], Work("forward", *sender[1])] + 1
                rows.arriving[at, stage] = slot
        for chunk in kept.gradients[stage]:
            if (sender := table.after(stage, chunk)) is None:
                continue  # a result, or no gradient arrives for it
            at = table.when[sender[0], Work("backward", *sender[1])] + 1
            rows.arriving_gradient[at, stage] = buffers.gradients[stage][chunk]


def _slots(spans: Spans) -> dict[Chunk, int]:
    """A buffer for each span of ticks, used again as soon as it is free: as many as overlap."""
    last_uses: list[int] = []  # the last tick at which each buffer is used
    slots: dict[Chunk, int] = {}
    for chunk, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        free = next((slot for slot, until in enumerate(last_uses) if until < first), len(last_uses))
        last_uses[free : free + 1] = [last]
        slots[chunk] = free
    return slots
