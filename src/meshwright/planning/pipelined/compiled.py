"""What a compiled pipeline takes of the branches that its text has for every tick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...stages.deal import Deal
from ...stages.plan import TickPlan
from ...stages.staged import Staged
from ...stages.table import LATE_WEIGHTS, TickTable
from ..estimate import Turns
from .ticking import Passes, step_s, together


def turns_of(staged: Staged) -> tuple[Turns, ...]:
    """The share of its branches that each loop over ticks of a pipeline takes, where stages skip
    what they have no work for: a tick is as long as its busiest stage, by FLOPs. Empty where none
    is skipped.
    """
    table = staged.ticks
    if table is None or not staged.skips:
        return ()
    return tuple(_turns(staged, table))


def _turns(staged: Staged, table: TickTable) -> Iterator[Turns]:
    pipeline, passes = staged.pipeline, _passes(staged)
    plan = TickPlan.of(table, keeps_results=not pipeline.does_remat)
    for loop in plan.loops(skips=True):
        part = replace(table, ticks=table.ticks[loop.first : loop.end])
        every = len(part.ticks) * _written(part, passes)
        yield Turns(len(part.ticks), step_s(part, passes).work / every if every else 1.0)


def _written(part: TickTable, passes: Passes) -> float:
    """FLOPs in the text of one tick: where some gradients of weights wait, it has a backward pass
    with them and one without, and those that waited."""
    every = sum(together(part, {work.kind for _, _, work in part.works()}, passes))
    if not part.splits_backward:
        return every
    alone = passes.blocks_backward + passes.recomputes * passes.blocks_forward
    return every + alone + LATE_WEIGHTS * passes.blocks_weights


def _passes(staged: Staged) -> Passes:
    """FLOPs of the passes through a stage."""
    before, block, after = staged.flops
    most, filled = 1, tuple[float, ...]()
    if isinstance(deal := staged.dealt, Deal):
        most, filled = deal.most * deal.repeats, tuple(size / deal.most for size in deal.sizes)
    run = block * most
    return Passes(
        enter=before,
        blocks_forward=run,
        blocks_backward=run,
        blocks_weights=run,
        at_loss=3 * after,
        at_input=3 * before,
        send=0.0,
        recomputes=staged.pipeline.does_remat + staged.recompute_blocks,
        waits_for_loss=staged.pipeline.does_remat and not staged.shares_loss,
        skips=True,
        filled=filled,
        shares_loss=staged.shares_loss,
    )
