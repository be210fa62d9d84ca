"""How often a step does each of its operations where blocks are computed again.

A block of the forward pass is done twice (Chen et al. 2016); selective remat spares products with
weights (Korthikanti et al. 2022). Where turns of a loop are blocks, the loop stacks what the
backward pass reads of each; with remat only what it begins with, and for selective remat what its
products with weights yield. The rest is made again in a turn of the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ..graph import Graph, Operation
from .choices import Remat
from .facts import Facts, facts_of, is_turn


@functools.lru_cache(maxsize=16)
def times_done(graph: Graph, remat: Remat) -> tuple[int, ...]:
    """Of each operation: 2 if it is computed again, 0 if it only keeps what is, and 1 otherwise."""
    facts, left = facts_of(graph), dropped(graph, remat)
    is_kept = facts.is_of_weights if remat == "selective" else (False,) * len(graph.operations)
    in_loops = _made_again_in_loops(graph, left, is_kept)
    result = []
    for place, operation in enumerate(graph.operations):
        touched = (*operation.operands, *operation.results)
        if operation.kind == "scan" and not left.isdisjoint(touched):
            result.append(0)
        elif operation.block:
            result.append(2 if place in in_loops else 1)
        else:
            result.append(2 if is_computed_again(facts, place, remat) else 1)
    return tuple(result)


def is_computed_again(facts: Facts, place: int, remat: Remat) -> bool:
    """Whether an operation is in a block of the forward pass that is done twice."""
    if remat == "none" or (remat == "selective" and facts.is_of_weights[place]):
        return False
    return facts.has_backward and facts.is_forward[place] and bool(facts.blocks[place])


def _made_again_in_loops(graph: Graph, left: frozenset[int], is_kept: Sequence[bool]) -> set[int]:
    """The operations of loops that make again what these no longer stack, of what is kept."""
    wanted, kept, result = set[int](), set[int](), set[int]()
    for operation in graph.operations:
        if _stacks(operation):
            of = wanted if operation.results[0] in left else kept
            of.update(operation.operands)
    for place in range(len(graph.operations) - 1, -1, -1):
        operation = graph.operations[place]
        is_inside = operation.block and operation.kind != "scan" and not is_kept[place]
        if is_inside and not wanted.isdisjoint(set(operation.results) - kept):
            result.add(place)
            wanted.update(operation.operands)
    return result


@functools.lru_cache(maxsize=16)
def dropped(graph: Graph, remat: Remat) -> frozenset[int]:
    """What loops stack of their turns for the backward pass alone, and no longer do with remat."""
    if remat == "none":
        return frozenset()
    facts = facts_of(graph)
    read: dict[bool, set[int]] = {False: set(), True: set()}  # in turns of the backward pass?
    for place, operation in enumerate(graph.operations):
        read[is_turn(operation) and not facts.is_forward[place]].update(operation.operands)
    yields, result = _Yields(graph, facts), set[int]()
    for place, operation in enumerate(graph.operations):
        if not (_stacks(operation) and facts.is_forward[place]) or operation.is_kept:
            continue
        (operand,), (stack,) = operation.operands, operation.results
        is_left = stack in read[True] - read[False]
        if is_left and not (remat == "selective" and yields.takes(operand)):
            result.add(stack)
    return frozenset(result)


def _stacks(operation: Operation) -> bool:
    """Whether it puts what each turn of a loop of blocks makes beside that of the others."""
    is_scan = operation.kind == "scan" and bool(operation.block) and not is_turn(operation)
    return is_scan and len(operation.operands) == 1 == len(operation.results)


class _Yields:
    """Which arrays stand for what a product with weights yields: one for each product."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self._graph = graph
        self._is_of_weights = facts.is_of_weights
        self._maker = {
            t: place for place, operation in enumerate(graph.operations) for t in operation.results
        }
        self._taken: set[int] = set()

    def takes(self, t: int) -> bool:
        """Whether an array is the first that is made of one product and as large as its result."""
        size = self._size(t)
        todo, seen = [t], {t}
        for one in todo:  # which grows
            place = self._maker.get(one)
            if place is None or self._size(one) != size:
                continue
            if self._is_of_weights[place]:
                if place not in self._taken:
                    self._taken.add(place)
                    return True
                continue
            more = [o for o in self._graph.operations[place].operands if o not in seen]
            seen.update(more)
            todo += more
        return False

    def _size(self, t: int) -> int:
        return math.prod(self._graph.tensors[t].shape)
