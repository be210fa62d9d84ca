"""What a model is as stages, for the search: its equal blocks, and what they pass on."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
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
from ..graph import Graph
from ..search.staged import AXIS, PipelinesOf
from ..traced_graph import graph_of_step
from .equal import equal_blocks
from .searching import Cut, Short, pipelines

_NAMED = ("parameter", "input")


def pipelines_of(described: AbstractStep, batch: Batch) -> tuple[PipelinesOf | None, str]:
    """The search among the pipelines of a step on one device; else ``None`` and why there is none.

    The reason is empty for a model without equal blocks.
    """
    try:
        leaves_of(batch)
    except BatchError as error:
        return None, str(error)
    program = replace(described.program, example=batch)
    blocks, reason = equal_blocks(described)
    if blocks is None:
        return None, _loop(program, described.placement, reason)
    repeats, is_loop = blocks.repeats, blocks.are_of_loop
    # What is read here is the same for any number of stages; those of a loop divide its layers.
    stages = next(n for n in range(2, repeats.count + 1) if not is_loop or repeats.count % n == 0)
    placement = Placement.of(Mesh({AXIS: stages}), batch=None, unmatched="replicate")
    try:
        staged = Staged.of(program, placement, Pipeline(AXIS, 1))
    except PipelineError as error:
        return None, str(error)
    if not isinstance(staged.dealt, Deal):
        return None, "; ".join(staged.of_cut)
    if staged.is_of_loop != is_loop:
        return None, "the model has equal blocks both in a loop and outside of it"
    rows = _rows(batch)
    row_bytes = tuple(math.prod(one.shape) * one.dtype.itemsize / rows for one in staged.sent)
    whole = graph_of_step(described) if is_loop else None
    shorts: dict[int, Short] = {}

    def with_blocks(count: int) -> Short:
        if count not in shorts:
            paths = frozenset(path for paths in repeats.blocks[:count] for path in paths)
            graph = graph_of_step(repeats.with_blocks(count))
            if whole is not None:
                graph = in_families_of(whole, graph, blocks.entries)
            shorts[count] = Short(graph, paths)
        return shorts[count]

    cut = Cut(
        min(repeats.count, staged.dealt.count),
        with_blocks,
        row_bytes,
        staged.flops,
        staged.may_share_loss,
        is_even=is_loop,
        frozen_bytes=blocks.frozen_bytes,
    )
    return functools.partial(pipelines, cut), ""


def in_families_of(whole: Graph, graph: Graph, entries: Mapping[str, tuple[str, int]]) -> Graph:
    """The graph with the families that dims of its parameters and inputs have in another one, where
    ``entries`` of stacked weights are one array, with a dim of them in front."""
    paths = {tensor.path: tensor for tensor in whole.tensors if tensor.role in _NAMED}
    families: dict[tuple[str, int], str] = {}
    for tensor in graph.tensors:
        path = entries.get(tensor.path, (tensor.path, 0))[0]
        if tensor.role not in _NAMED or path not in paths:
            continue
        dims = paths[path].dims[-len(tensor.dims) :] if tensor.dims else ()
        for own, other in zip(tensor.dims, dims, strict=True):
            if own is not None and other is not None:
                dim = graph.dims[own]
                families.setdefault((dim.family, dim.size), whole.dims[other].family)
    named = (
        replace(dim, family=families.get((dim.family, dim.size), dim.family)) for dim in graph.dims
    )
    return replace(graph, dims=tuple(named))


def _loop(program: Program, placement: Placement, reason: str) -> str:
    """Why nothing is cut of a model whose layers are a loop; empty for another."""
    wholes = () if program.own_step is not None else looped_over(program, placement)
    if not wholes:
        return ""
    why = f": {reason}" if reason else ""
    return f"the layers are a loop over stacked weights ({short_list(wholes)}) that is not cut{why}"


def _rows(batch: Batch) -> int:
    return jax.tree.leaves(batch)[0].shape[0]
