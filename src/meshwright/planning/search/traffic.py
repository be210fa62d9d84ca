"""Which arrays each operation of a step reads from memory and writes there, to tell its time.

Elementwise work reads and writes nothing between what is fused, by the rules of ``buffers.py`` for
TPUs and GPUs. On TPUs, what is read again soon may stay in a chip's own memory, where it fits: the
memory space assignment of XLA keeps it there. On CPUs, an array is written unless elementwise work
makes it for one reader.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..graph import Graph
from .buffers import Moved, moved_on_gpu, moved_on_tpu
from .facts import Facts, facts_of, is_layer, is_turn

_SOON = 64  # operations
_OWN = ("activation", "layer gradient")  # kinds of arrays that live within a step


class Traffic(NamedTuple):
    """The arrays that one operation reads and writes, ``near`` those that may stay in the chip."""

    far: tuple[int, ...]
    near: tuple[int, ...] = ()


@functools.lru_cache(maxsize=8)
def traffic_of(graph: Graph, platform: str, kind: str) -> tuple[Traffic, ...]:
    """The arrays of each operation, an array as often as it is read or written."""
    facts = facts_of(graph)
    if platform == "cpu":
        return tuple(_unfused(graph, facts))
    fused = moved_on_tpu(graph, kind) if platform == "tpu" else moved_on_gpu(graph)
    moved = _without_copies(graph, facts, fused)
    last = {t: place for place, arrays in enumerate(moved) for t in arrays}
    first: dict[int, int] = {}
    for place, arrays in enumerate(moved):
        for t in arrays:
            first.setdefault(t, place)

    def is_near(t: int) -> bool:
        is_own = facts.kinds[t] in _OWN and last[t] - first[t] <= _SOON
        return is_own and facts.is_forward[first[t]] == facts.is_forward[last[t]]

    return tuple(
        Traffic(tuple(t for t in arrays if not is_near(t)), tuple(t for t in arrays if is_near(t)))
        for arrays in moved
    )


def _unfused(graph: Graph, facts: Facts) -> Iterator[Traffic]:
    """All operands and results but those that are fused; of a layer that is taken by its number,
    what it takes."""
    for operation in graph.operations:
        by_number = operation.kind == "slice" and is_layer(graph, operation)
        read = operation.results if by_number else operation.operands
        yield Traffic(tuple(t for t in (*read, *operation.results) if not facts.is_fused[t]))


def _without_copies(graph: Graph, facts: Facts, moved: Sequence[Moved]) -> list[tuple[int, ...]]:
    """What is moved, without what XLA does on the way: it takes layers out of stacks where they
    are read, puts results into stacks where they are made, and updates a parameter with its slots
    in one run."""
    layers = {t for op in graph.operations if is_turn(op) for t in op.results}
    result: list[tuple[int, ...]] = []
    updating: set[int] = set()  # gradients and the like that a run has read
    for operation, (reads, writes) in zip(graph.operations, moved, strict=True):
        read = [t for t in reads if t not in layers]
        if is_turn(operation):
            result.append(tuple(read))
            continue
        if operation.kind == "scan":
            read = []
        elif operation.results and all(facts.kinds[t] == "update" for t in operation.results):
            read = [t for t in read if facts.kinds[t] != "update" and t not in updating]
            updating.update(read)
            read += [t for t in read if facts.kinds[t] == "slot"]  # which are written, too
        result.append((*read, *writes))
    return result
