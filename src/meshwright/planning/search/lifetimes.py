"""Which arrays a step has and when they are there, as a platform's compiler writes and runs them.

State and inputs are always there; new values are written where the old ones lie. On CPU and TPU
the other arrays are those of ``buffers.py``; elsewhere elementwise work is fused into its only
reader (``facts.py``), which is cautious.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..graph import Graph
from .buffers import Buffer, buffers_on_cpu, buffers_on_tpu
from .choices import Remat
from .facts import Facts, facts_of, is_layer, is_turn
from .layer_sums import SCATTERS, layer_sums
from .recompute import dropped, is_computed_again

if TYPE_CHECKING:
    from .compact import Compact

_RESTING = ("parameter", "slot", "state", "input")
_STEPS_OF_LOSS = 3
_VIEWS_OF_LAYERS = ("squeeze", "reshape", "transpose", "convert_element_type")


@dataclass(frozen=True)
class Lifetime:
    """A piece that is alive from one moment to another, both included."""

    piece: int
    first: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """The arrays of a step and when they are there; when each of its operations runs."""

    length: int
    lifetimes: tuple[Lifetime, ...]
    runs: tuple[tuple[int, int], ...]  # (operation, when)
    ahead: tuple[int, ...] = ()  # where micro-batches are that run beside this one


def timeline_of(problem: Compact, zero: int, remat: Remat, is_looped: bool = False) -> Timeline:
    """The timeline of a step on the platform that it was made small for.

    ``is_looped`` says that micro-batches are taken in turn, in a loop of the compiler's.
    """
    timeline = _TIMELINES.get(problem.platform, _elsewhere)(problem, zero, remat)
    if is_looped and problem.platform == "tpu" and zero < 3:
        return replace(timeline, lifetimes=(*timeline.lifetimes, *_before_the_loop(problem)))
    return timeline


def _before_the_loop(problem: Compact) -> Iterator[Lifetime]:
    """Parameters in another type, which no micro-batch changes: XLA makes them before the loop, so
    that they are there beside the parameters as long as it runs.

    A loop of one micro-batch converts each where it is read, and keeps none.
    """
    graph, kinds = problem.graph, facts_of(problem.graph).kinds
    source: dict[int, int] = {}
    casts: dict[tuple[int, int], int] = {}  # the cast of a parameter, by the bytes of an element
    for operation in graph.operations:
        for t in operation.results:
            if kinds[t] != "cast":
                continue
            (operand,) = operation.operands
            source[t] = source.get(operand, operand)
            itemsize = graph.tensors[t].itemsize
            if itemsize != graph.tensors[source[t]].itemsize:
                casts.setdefault((source[t], itemsize), t)
    end = max(len(graph.operations) - 1, 0)
    for t in casts.values():
        yield Lifetime(problem.piece_of[t], 0, end)


def _elsewhere(problem: Compact, zero: int, remat: Remat) -> Timeline:
    """In the order of the trace."""
    graph, facts = problem.graph, facts_of(problem.graph)
    return _traced(problem, _unfused(graph, facts), range(len(graph.operations)), zero, remat)


def _unfused(graph: Graph, facts: Facts) -> list[Buffer]:
    """Every array but those that are fused."""
    buffers: dict[int, Buffer] = {}
    for place, operation in enumerate(graph.operations):
        for t in operation.operands:
            if t in buffers:
                buffers[t].reads.append(place)
        for t in operation.results:
            if not facts.is_fused[t]:
                buffers[t] = Buffer(t, place)
    return list(buffers.values())


def _on_tpu(problem: Compact, zero: int, remat: Remat) -> Timeline:
    """In the order of the trace, and last what only the logs need."""
    graph = problem.graph
    order = _logs_last(graph, facts_of(graph))
    kinds = facts_of(graph).kinds
    written = buffers_on_tpu(graph, zero == 3, problem.kind)
    buffers = [b for b in written if kinds[b.tensor] != "update"]
    return _traced(problem, buffers, order, zero, remat)


def _traced(
    problem: Compact, buffers: Sequence[Buffer], at: Sequence[int], zero: int, remat: Remat
) -> Timeline:
    """With arrays that remat drops alive twice (Chen et al. 2016)."""
    facts, end = facts_of(problem.graph), max(len(at) - 1, 0)
    lifetimes = list(_resting(problem, facts, end))
    begins = _made_again(facts, buffers, remat)
    by_number = _by_number(problem.graph, facts) if zero == 3 else frozenset[int]()
    left = dropped(problem.graph, remat) | _scattered(problem.graph, by_number)
    lifetimes += _of_layers(problem, [b for b in buffers if b.tensor in by_number], at)
    for buffer in buffers:
        if buffer.tensor in left or buffer.tensor in by_number:
            continue
        kind = facts.kinds[buffer.tensor]
        # Level 3 gathers a cast for each operation that reads it, and keeps it for none.
        if kind in _RESTING or (zero == 3 and kind == "cast"):
            continue
        piece = problem.piece_of[buffer.tensor]
        piece = problem.halves.get(piece, piece) if buffer.is_half else piece
        begin, last = at[buffer.start], max((at[read] for read in buffer.reads), default=0)
        again = begins.get(buffer.tensor)
        if again is not None:
            forward = [at[read] for read in buffer.reads if facts.is_forward[read]]
            lifetimes.append(Lifetime(piece, begin, max(forward, default=begin)))
            begin = at[again]
        lifetimes.append(Lifetime(piece, begin, max(begin, last)))
    return Timeline(len(at), tuple(lifetimes), tuple(enumerate(at)))


def _by_number(graph: Graph, facts: Facts) -> frozenset[int]:
    """The layers that a step takes out of stacked parameters by their numbers, views of them, and
    their gradients; not those of loops."""
    result: set[int] = set()
    for operation in graph.operations:
        is_slice = operation.kind == "slice" and is_layer(graph, operation)
        is_taken = is_slice and facts.kinds[operation.operands[0]] == "parameter"
        is_view = operation.kind in _VIEWS_OF_LAYERS and operation.operands
        if is_taken or (is_view and result.issuperset(operation.operands)):
            result.update(operation.results)
        elif operation.times == 1:
            result.update(t for t in operation.results if facts.kinds[t] == "layer gradient")
    return frozenset(result)


def _scattered(graph: Graph, by_number: frozenset[int]) -> frozenset[int]:
    """Gradients of layers among zeros for the others, as ``jnp.take`` has them, which level 3 never
    makes."""
    scatters = (op for op in graph.operations if op.kind in SCATTERS and len(op.operands) == 1)
    return frozenset(t for op in scatters if by_number.issuperset(op.operands) for t in op.results)


def _of_layers(
    problem: Compact, buffers: Sequence[Buffer], at: Sequence[int]
) -> Iterator[Lifetime]:
    """Level 3 gathers a layer for the forward pass, and again for what reads it in the backward
    pass (``step/layer_gathers.py``). Its gradient is summed as soon as it is made; of the sums a
    device has its part of the stack from the first one on."""
    facts = facts_of(problem.graph)
    made: dict[int, list[int]] = {}  # when the gradients of each piece's layers are
    for buffer in buffers:
        piece, begin = problem.piece_of[buffer.tensor], at[buffer.start]
        if facts.kinds[buffer.tensor] == "layer gradient":
            made.setdefault(piece, []).append(begin)
            yield Lifetime(piece, begin, begin)
            continue
        forward = [at[read] for read in buffer.reads if facts.is_forward[read]]
        yield Lifetime(piece, begin, max(forward, default=begin))
        for read in buffer.reads:
            if not facts.is_forward[read]:
                yield Lifetime(piece, at[read], at[read])
    for layer, moments in made.items():
        for stack, piece in enumerate(problem.pieces):
            if piece.kind == "gradient" and piece.shape[1:] == problem.pieces[layer].shape:
                yield Lifetime(stack, min(moments), max(moments))


def _resting(problem: Compact, facts: Facts, end: int) -> Iterator[Lifetime]:
    for t, kind in enumerate(facts.kinds):
        if kind in _RESTING:
            yield Lifetime(problem.piece_of[t], 0, end)


def _logs_last(graph: Graph, facts: Facts) -> list[int]:
    """When each operation runs."""
    needed: set[int] = set()
    early: list[int] = []
    late: list[int] = []
    updates = {t for t, kind in enumerate(facts.kinds) if kind in ("update", "gradient")}
    for place in range(len(graph.operations) - 1, -1, -1):
        op = graph.operations[place]
        if any(t in needed or t in updates for t in op.results):
            early.append(place)
            needed.update(op.operands)
        else:
            late.append(place)
    at = [0] * len(graph.operations)
    for when, place in enumerate((*reversed(early), *reversed(late))):
        at[place] = when
    return at


def _made_again(facts: Facts, buffers: Iterable[Buffer], remat: Remat) -> dict[int, int]:
    """Of arrays that remat drops: where they are made again.

    They are made and read in the forward pass of one block alone.
    """
    inner: dict[int, str] = {}
    begins: dict[str, int] = {}
    for buffer in buffers:
        if not is_computed_again(facts, buffer.start, remat):
            continue
        block = facts.blocks[buffer.start]
        later = [read for read in buffer.reads if not facts.is_forward[read]]
        others = [read for read in buffer.reads if facts.is_forward[read]]
        if later and all(facts.blocks[other] == block for other in others):
            inner[buffer.tensor] = block
            begins[block] = min(begins.get(block, later[0]), *later)
    return {tensor: begins[block] for tensor, block in inner.items()}


def _on_cpu(problem: Compact, zero: int, remat: Remat) -> Timeline:
    """Breadth first: each operation as soon as what it reads is there."""
    graph, facts = problem.graph, facts_of(problem.graph)
    buffers, depths = buffers_on_cpu(graph)
    order = sorted(depths, key=lambda place: (depths[place], place))
    at = {place: when for when, place in enumerate(order)}
    end = max(len(order) - 1, 0)
    lifetimes = list(_resting(problem, facts, end))
    in_pieces = _cast_in_pieces(graph, facts) if zero == 3 else frozenset[int]()
    left = in_pieces | dropped(graph, remat)  # other remat is undone by the compiler
    for buffer in buffers:
        if buffer.tensor in left:
            continue
        kind, last = facts.kinds[buffer.tensor], max(map(at.__getitem__, buffer.reads), default=0)
        if kind == "gradient" and zero < 2:
            last = end  # all are summed over devices at once
        if kind not in ("update", *_RESTING):
            first = at[buffer.start]
            lifetime = Lifetime(problem.piece_of[buffer.tensor], first, max(first, last))
            is_stacked = kind == "gradient" and graph.operations[buffer.start].kind == "scan"
            moved = 2 if zero == 3 and is_stacked else 0  # from pieces of all layers to their own
            lifetimes += [lifetime] * (buffer.copies + moved)
    if zero == 0:
        lifetimes += _summed_by_layers(problem, facts, at)
    if zero == 3:
        lifetimes += _gathered(problem, facts, at, in_pieces)
    return Timeline(
        len(order),
        tuple(lifetimes),
        tuple(at.items()),
        _ahead([depths[operation] for operation in order]),
    )


def _summed_by_layers(problem: Compact, facts: Facts, at: Mapping[int, int]) -> Iterator[Lifetime]:
    """What is there beside the gradients of stacks whose layers are read by number; above level 0
    each layer's is summed to a piece."""
    end = max(len(at) - 1, 0)
    for stack in layer_sums(problem.graph, facts):
        first = at.get(stack.place, end)
        first, last = (min(first + 1, end), end) if stack.wait else (first, first)
        piece = problem.piece_of[stack.result]
        yield from (stack.terms - 1) * [Lifetime(piece, first, last)]


def _ahead(depths: Sequence[int]) -> tuple[int, ...]:
    """Where other micro-batches are meanwhile.

    All run beside each other, step by step. The loss of none but the last is asked for, so that the
    others go through it in fewer steps: subtraction, exponential and sum are one with its gradient.
    They hold what is there before as well as after.
    """
    steps = np.array(depths, np.int64)
    return tuple(np.searchsorted(steps, steps + _STEPS_OF_LOSS, side="right") - 1)


def _cast_in_pieces(graph: Graph, facts: Facts) -> frozenset[int]:
    """Casts of parameters that only loops over layers read: each device makes its piece."""
    casts = {t for t, kind in enumerate(facts.kinds) if kind == "cast"}
    others = {
        t for operation in graph.operations if not is_turn(operation) for t in operation.operands
    }
    return frozenset(casts - others)


def _gathered(
    problem: Compact, facts: Facts, at: Mapping[int, int], in_pieces: frozenset[int]
) -> Iterator[Lifetime]:
    """Parameters of level 3 as each device reads them, beside the part that it keeps.

    They are gathered once for the forward and once for the backward pass, and all at the start, as
    nothing is to be waited for. A loop over layers has a piece of every layer besides, and gathers
    one at a time.
    """
    last: dict[tuple[int, bool], int] = {}
    in_loops: dict[int, int] = {}
    for place, when in at.items():
        operation = problem.graph.operations[place]
        if all(facts.kinds[t] == "update" for t in operation.results):
            continue
        if is_turn(operation) or in_pieces.issuperset(operation.results):
            in_loops |= {t: when for t in operation.operands if facts.kinds[t] == "parameter"}
            continue
        for t in operation.operands:
            if facts.kinds[t] == "parameter":
                key = t, facts.is_forward[place]
                last[key] = max(last.get(key, 0), when)
    for t, when in in_loops.items():
        yield Lifetime(problem.piece_of[t], 0, when)
    for (t, _), when in last.items():
        yield Lifetime(problem.gathered[problem.piece_of[t]], 0, when)


_TIMELINES = {"cpu": _on_cpu, "tpu": _on_tpu}
