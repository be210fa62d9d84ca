"""Which operations of a step are of its equal blocks, of what comes before, and of what after."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from ..graph import Graph, Operation
from ..search.facts import Facts, facts_of

Name = Literal["before", "blocks", "after"]
Phase = Literal["forward", "backward", "weights", "update"]
_UPDATES = frozenset(("update", "parameter", "slot"))


class Section(NamedTuple):
    """A part of the model, and what is done to it: ``weights`` are gradients of weights."""

    name: Name
    phase: Phase


def sections_of(graph: Graph, block_paths: Collection[str]) -> tuple[Section, ...]:
    """The section of each operation; ``block_paths`` are the paths of the blocks' parameters.

    Operations are in the order of the trace: forward, what comes before the first that reads a
    weight of a block and something of the batch is before the blocks, what comes after the last is
    after them; backward the other way round. A cast of a weight goes with its weight.
    """
    return _Reader(graph, facts_of(graph), frozenset(block_paths)).sections()


class _Reader:
    def __init__(self, graph: Graph, facts: Facts, block_paths: frozenset[str]) -> None:
        self._graph, self._facts = graph, facts
        self._of_weights: dict[int, bool] = {  # made of parameters alone: whether of a block's
            place: tensor.path in block_paths
            for place, tensor in enumerate(graph.tensors)
            if tensor.role == "parameter"
        }
        own = [place for place, is_own in self._of_weights.items() if is_own]
        self._dims = {_dims(graph, place) for place in own}
        others = [place for place, is_own in self._of_weights.items() if not is_own]
        self._dims -= {_dims(graph, place) for place in others}

    def sections(self) -> tuple[Section, ...]:
        graph, facts = self._graph, self._facts
        touches: dict[bool, list[int]] = {True: [], False: []}  # forward and backward
        for place, operation in enumerate(graph.operations):
            is_forward = facts.is_forward[place]
            if self._touches(operation) and not self._updates(operation):
                touches[is_forward].append(place)
            if is_forward and operation.operands:
                made_of = [self._of_weights.get(t) for t in operation.operands]
                if None not in made_of:
                    self._of_weights |= dict.fromkeys(operation.results, any(made_of))
        spans = {way: (min(at, default=0), max(at, default=-1)) for way, at in touches.items()}
        return tuple(
            self._section(place, operation, *spans[facts.is_forward[place]])
            for place, operation in enumerate(graph.operations)
        )

    def _touches(self, operation: Operation) -> bool:
        made_of = [self._of_weights.get(t) for t in operation.operands]
        if True in made_of and None in made_of:
            return True
        return any(
            self._facts.kinds[t] == "gradient" and _dims(self._graph, t) in self._dims
            for t in operation.results
        )

    def _updates(self, operation: Operation) -> bool:
        kinds = {self._facts.kinds[t] for t in operation.results}
        return bool(kinds) and kinds <= _UPDATES

    def _section(self, place: int, operation: Operation, first: int, last: int) -> Section:
        if self._facts.is_forward[place]:
            own = [self._of_weights.get(t) for t in operation.operands]
            if own and None not in own and any(own):
                return Section("blocks", "forward")
            return Section(_where(place, first, last, ("before", "after")), "forward")
        batch, tensors = self._facts.batch, self._graph.tensors
        touched = (*operation.operands, *operation.results)
        has_rows = batch in operation.summed or any(batch in tensors[t].dims for t in touched)
        if self._updates(operation) or (place > last and not has_rows):
            is_own = any(_dims(self._graph, t) in self._dims for t in operation.results)
            return Section("blocks" if is_own else "before", "update")
        name = _where(place, first, last, ("after", "before"))
        kinds = {self._facts.kinds[t] for t in operation.results}
        return Section(name, "weights" if kinds == {"gradient"} else "backward")


def _where(place: int, first: int, last: int, outside: tuple[Name, Name]) -> Name:
    return outside[0] if place < first else outside[1] if place > last else "blocks"


def _dims(graph: Graph, place: int) -> tuple[tuple[int, int], ...]:
    """The dims of an array and their sizes, in no order."""
    tensor = graph.tensors[place]
    dims = [-1 if dim is None else dim for dim in tensor.dims]
    return tuple(sorted(zip(dims, tensor.shape, strict=True)))
