"""What a compiled pipeline takes of the branches that its text has for every tick."""

from __future__ import annotations

from ...stages.staged import Staged
from ..estimate import Turns
from .ticking import Passes, step_s, together


def skips(staged: Staged) -> bool:
    """Whether stages leave out what they have no work for: where XLA splits rows alone."""
    placement = staged.placement
    split = {axis for axis, size in placement.mesh.axes if size > 1}
    return split <= {staged.pipeline.axis, *placement.batch_axes}


def turns_of(staged: Staged) -> Turns | None:
    """The share of its loop over ticks that a pipeline takes, where stages skip what they have no
    work for: each tick is as long as its busiest stage, by FLOPs. ``None`` where none is skipped.
    """
    table, pipeline = staged.ticks, staged.pipeline
    if table is None or not skips(staged):
        return None
    before, block, after = staged.flops
    run = block * max(1, *(len(share.blocks) for share in staged.shares))
    passes = Passes(
        enter=before,
        blocks_forward=run,
        blocks_backward=run,
        blocks_weights=run,
        at_loss=3 * after,
        at_input=3 * before,
        send=0.0,
        recomputes=pipeline.recomputes + staged.recompute_blocks,
        waits_for_loss=pipeline.recomputes,
        skips=True,
    )
    kinds = {work.kind for _, _, work in table.works()}
    every = len(table.ticks) * sum(together(table, kinds, passes))
    return Turns(len(table.ticks), step_s(table, passes).work / every if every else 1.0)
