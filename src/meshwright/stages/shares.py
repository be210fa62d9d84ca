"""What each stage of a pipeline has: blocks, parameters, FLOPs, bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .deal import Deal
from .parts import Blocks
from .segments import Segments
from .stacking import Stacking


class StageShare(NamedTuple):
    """What one stage has: its blocks, or the parameters that it reads, its share of the forward
    pass's FLOPs, and the bytes of the weights and slots that no other stage has; of branches,
    ``spans`` names the layers of each."""

    stage: int
    blocks: tuple[int, ...]
    before: bool  # whether it computes what comes before the blocks
    after: bool
    flops_share: float
    params: tuple[str, ...] = ()  # what a stage that differs reads
    kind: Literal["stage", "branches"] = "stage"
    held_bytes: int = 0
    after_of: int = 1  # stages that compute what comes after, each for its micro-batches
    spans: tuple[str, ...] = ()


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
        is_first, own = stage == 0, deal.blocks_of(stage)
        has_after = stage == deal.stages - 1 or deal.shares_loss
        of = deal.stages if deal.shares_loss else 1
        flops = block * len(own) + before * is_first + after / of * has_after
        share = StageShare(stage, own, is_first, has_after, flops / total)
        shares.append(share._replace(after_of=of))
    return tuple(shares)


def with_bytes(shares: Sequence[StageShare], stacking: Stacking) -> tuple[StageShare, ...]:
    """Stages with the bytes that each holds."""
    sizes = stacking.bytes_by_stage(len(shares))
    return tuple(
        share._replace(held_bytes=nbytes) for share, nbytes in zip(shares, sizes, strict=True)
    )


class LayerStages(NamedTuple):
    """A layer, or several that follow each other, and which stages have its weights."""

    layers: str
    stages: str


def layers_of_blocks(blocks: Blocks, deal: Deal) -> tuple[LayerStages, ...]:
    """Of stages of equal blocks: a row for each layer of a block, over all blocks."""
    functions, last = blocks.functions, str(deal.stages - 1)
    every = ", ".join(map(str, range(deal.stages)))
    stage_of = {block: stage for stage in range(deal.stages) for block in deal.blocks_of(stage)}
    groups = itertools.groupby(stage_of[block] for block in range(deal.count))
    counts = [(stage, len(list(of))) for stage, of in groups]
    if max(many for _, many in counts) == 1:
        runs = [str(stage) for stage, _ in counts]
    else:
        runs = [f"{many} on {stage}" for stage, many in counts]
    by_block = dict.fromkeys(tuple(map(_layer_of, row)) for row in blocks.params)
    before = dict.fromkeys(map(_layer_of, functions.params_before), "0")
    after = dict.fromkeys(map(_layer_of, functions.params_after), last)
    both = {layer: f"0, {last}" for layer in before if layer in after and last != "0"}
    if deal.shares_loss:
        after, both = dict.fromkeys(after, every), dict.fromkeys(both, every)
    return (
        *(LayerStages(*item) for item in ({**before, **both}).items()),
        *(LayerStages(f"{row[0]} to {row[-1]}", ", ".join(runs)) for row in by_block),
        *(LayerStages(*item) for item in after.items() if item[0] not in before),
    )


def layers_of_parts(params: Sequence[Sequence[str]]) -> tuple[LayerStages, ...]:
    """Of stages that differ, by the parameters that each reads."""
    stages: dict[str, list[int]] = {}
    for stage, paths in enumerate(params):
        for layer in dict.fromkeys(map(_layer_of, paths)):
            stages.setdefault(layer, []).append(stage)
    result = []
    for of, group in itertools.groupby(stages, key=lambda layer: stages[layer]):
        result.append(LayerStages(_span(list(group)), ", ".join(map(str, of))))
    return tuple(result)


def layers_of_branches(spans: Sequence[Sequence[str]]) -> tuple[LayerStages, ...]:
    """Of branches, by the names of those that each device computes."""
    devices: dict[str, list[int]] = {}
    for device, names in enumerate(spans):
        for name in names:
            devices.setdefault(name, []).append(device)
    return tuple(LayerStages(name, ", ".join(map(str, of))) for name, of in devices.items())


def spans_of(parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A name for the layers of each part, by the parameters that it reads in its order.

    >>> spans_of([["one/kernel", "one/bias", "two/kernel"], ["head/kernel"]])
    ('one to two (2 layers)', 'head')
    """
    names = (_span(list(dict.fromkeys(map(_layer_of, paths)))) for paths in parts)
    return tuple(dict.fromkeys(names))


def _span(layers: Sequence[str]) -> str:
    if len(layers) == 1:
        return layers[0]
    return f"{layers[0]} to {layers[-1]} ({len(layers)} layers)"


def _layer_of(path: str) -> str:
    return path.rpartition("/")[0] or path
