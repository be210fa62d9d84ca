"""What a model is as stages, for the search: its equal blocks, and what they pass on."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax

from ...equal_layers import short_list
from ...errors import BatchError, PipelineError
from ...layouts.mesh import Mesh
from ...layouts.placement import Placement
from ...program import Batch, Program
from ...stages.deal import Deal
from ...stages.pipeline import Pipeline
from ...stages.staged import Staged, leaves_of, looped_over
from ..abstract_step import AbstractStep
from ..blocks import reduced
from ..search.staged import AXIS, PipelinesOf
from ..traced_graph import graph_of_step
from .searching import Cut, Short, pipelines


def pipelines_of(described: AbstractStep, batch: Batch) -> tuple[PipelinesOf | None, str]:
    """The search among the pipelines of a step on one device; else ``None`` and why there is none.

    The reason is empty for a model without equal blocks.
    """
    try:
        leaves_of(batch)
    except BatchError as error:
        return None, str(error)
    program = replace(described.program, example=batch)
    # Two stages, whatever the search tries: what is read here is the same for any number of them.
    placement = Placement.of(Mesh({AXIS: 2}), batch=None, unmatched="replicate")
    repeats, _ = reduced(described, 2)
    if repeats is None:
        return None, _loop(program, placement)
    try:
        staged = Staged.of(program, placement, Pipeline(AXIS, 1))
    except PipelineError as error:
        return None, str(error)
    if not isinstance(staged.dealt, Deal):
        return None, "; ".join(staged.of_cut)
    rows = _rows(batch)
    row_bytes = tuple(math.prod(one.shape) * one.dtype.itemsize / rows for one in staged.sent)
    shorts: dict[int, Short] = {}

    def with_blocks(count: int) -> Short:
        if count not in shorts:
            paths = frozenset(path for paths in repeats.blocks[:count] for path in paths)
            shorts[count] = Short(graph_of_step(repeats.with_blocks(count)), paths)
        return shorts[count]

    total = min(repeats.count, staged.dealt.count)
    cut = Cut(total, with_blocks, row_bytes, staged.flops, staged.may_share_loss)
    return functools.partial(pipelines, cut), ""


def _loop(program: Program, placement: Placement) -> str:
    """Why nothing is cut of a model whose layers are a loop; empty for another."""
    wholes = () if program.own_step is not None else looped_over(program, placement)
    if not wholes:
        return ""
    return (
        f"the layers are a loop over stacked weights ({short_list(wholes)}). mw.Pipeline cuts it, "
        "but it is not planned; write the layers one after the other to have pipelines planned"
    )


def _rows(batch: Batch) -> int:
    return jax.tree.leaves(batch)[0].shape[0]
