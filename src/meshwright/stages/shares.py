"""What each stage of a pipeline has: blocks, parameters, FLOPs, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from .deal import Deal
from .parts import Blocks
from .segments import Segments
from .stacking import Stacking


class StageShare(NamedTuple):
    """What one stage has: its blocks, or the parameters that it reads, its share of the forward
    pass's FLOPs, and the bytes of the weights and slots that no other stage has."""

    stage: int
    blocks: tuple[int, ...]
    before: bool  # whether it computes what comes before the blocks
    after: bool
    flops_share: float
    params: tuple[str, ...] = ()  # what a stage that differs reads
    kind: Literal["stage", "branches"] = "stage"
    held_bytes: int = 0


def unequal_shares(segments: Segments) -> tuple[StageShare, ...]:
    """Of stages that differ."""
    total = sum(segments.flops) or 1.0
    return tuple(
        StageShare(
            stage,
            (),
            stage == 0,
            stage == segments.count - 1,
            flops / total,
            tuple(segments.params[stage]),
        )
        for stage, flops in enumerate(segments.flops)
    )


def equal_shares(blocks: Blocks, deal: Deal) -> tuple[StageShare, ...]:
    """Of stages of equal blocks."""
    before, block, after = blocks.functions.flops
    total = before + block * blocks.count + after or 1.0
    shares = []
    for stage in range(deal.stages):
        is_first, is_last, own = stage == 0, stage == deal.stages - 1, deal.blocks_of(stage)
        flops = block * len(own) + before * is_first + after * is_last
        shares.append(StageShare(stage, own, is_first, is_last, flops / total))
    return tuple(shares)


def with_bytes(shares: Sequence[StageShare], stacking: Stacking) -> tuple[StageShare, ...]:
    """Stages with the bytes that each holds."""
    sizes = stacking.bytes_by_stage(len(shares))
    return tuple(
        share._replace(held_bytes=nbytes) for share, nbytes in zip(shares, sizes, strict=True)
    )
