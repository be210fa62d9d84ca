"""When each array of a graph is alive, in the order in which the step was traced."""

from __future__ import annotations

from ..graph import Graph
from .choices import Remat
from .facts import Facts

Spans = list[list[tuple[int, int]]]  # of each tensor: first and last operation, both included


def spans_of(graph: Graph, facts: Facts, remat: Remat) -> Spans:
    """When each tensor is alive; state and inputs always are, what is fused never is.

    What a block makes for itself and computes again is dropped after the forward pass, and lives
    again from where the block's backward pass begins (Chen et al. 2016).
    """
    end = len(graph.operations) - 1
    made, uses = _uses(graph)
    dropped = _dropped(facts, made, uses, remat)
    spans: Spans = []
    for place, first in enumerate(made):
        if facts.kinds[place] in ("parameter", "slot", "state", "input"):
            spans.append([(0, end)])
        elif first is None or facts.is_fused[place]:
            spans.append([])
        elif place in dropped:
            forward = [use for use in uses[place] if facts.is_forward[use]]
            again = (dropped[place], max(uses[place]))
            spans.append([(first, max(forward, default=first)), again])
        else:
            spans.append([(first, max(uses[place], default=first))])
    return spans


def _uses(graph: Graph) -> tuple[list[int | None], list[list[int]]]:
    made: list[int | None] = [None] * len(graph.tensors)
    uses: list[list[int]] = [[] for _ in graph.tensors]
    for place, operation in enumerate(graph.operations):
        for tensor in operation.results:
            made[tensor] = place
        for tensor in operation.operands:
            uses[tensor].append(place)
    return made, uses


def _dropped(
    facts: Facts, made: list[int | None], uses: list[list[int]], remat: Remat
) -> dict[int, int]:
    """Of tensors that recomputing drops: where they are made again."""
    inner: dict[int, str] = {}
    begins: dict[str, int] = {}
    for place, first in enumerate(made):
        if first is None or not is_computed_again(facts, first, remat):
            continue
        block = facts.blocks[first]
        later = [use for use in uses[place] if not facts.is_forward[use]]
        leaves = any(facts.blocks[use] != block for use in uses[place] if facts.is_forward[use])
        if later and not leaves:
            inner[place] = block
            begins[block] = min(begins.get(block, later[0]), later[0])
    return {place: begins[block] for place, block in inner.items()}


def is_computed_again(facts: Facts, operation: int, remat: Remat) -> bool:
    """Whether an operation is done twice: it is in a block of the forward pass.

    Selective remat spares products with weights (Korthikanti et al. 2022).
    """
    if remat == "none" or (remat == "selective" and facts.is_of_weights[operation]):
        return False
    in_block = facts.is_forward[operation] and bool(facts.blocks[operation])
    return in_block and facts.has_backward
