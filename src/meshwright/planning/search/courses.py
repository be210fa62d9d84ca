"""Which arrays a step has and how long they live, as a platform's compiler writes and runs them.

* On CPU they are those that XLA writes (``written.py``), and run breadth first.
* On TPU those that it writes there (``tiled.py``), in the order of the trace.
* Elsewhere elementwise work is fused into an only reader (``facts.py``), which is cautious.

State and inputs are always there; new values are written where the old ones lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..graph import Graph
from .choices import Remat
from .facts import Facts, facts_of
from .spans import is_computed_again, spans_of
from .tiled import Tile, tiled
from .written import Node, breadth_first, written

if TYPE_CHECKING:
    from .compact import Compact

_RESTING = ("parameter", "slot", "state", "input")
_STEPS_OF_LOSS = 3


@dataclass(frozen=True)
class Life:
    """A piece that is alive from one operation to another, both included."""

    piece: int
    first: int
    last: int


@dataclass(frozen=True)
class Course:
    """The arrays of a step and when they are there; when each of its operations runs."""

    length: int
    lives: tuple[Life, ...]
    runs: tuple[tuple[int, int], ...]  # (operation, when)
    ahead: tuple[int, ...] = ()  # where micro-batches are that run beside this one


def course_of(problem: Compact, zero: int, remat: Remat) -> Course:
    """The course of a step on the platform that it was made small for."""
    return _COURSES.get(problem.platform, _traced)(problem, zero, remat)


def _traced(problem: Compact, zero: int, remat: Remat) -> Course:
    """In the order of the trace."""
    graph, facts = problem.graph, facts_of(problem.graph)
    spans = spans_of(graph, facts, remat)
    lives = [
        Life(problem.piece_of[tensor], first, last)
        for tensor, alive in enumerate(spans)
        if not _is_gathered(facts, tensor, zero)
        for first, last in alive
    ]
    count = len(graph.operations)
    return Course(count, tuple(lives), tuple((place, place) for place in range(count)))


def _on_tpu(problem: Compact, zero: int, remat: Remat) -> Course:
    """As XLA for TPU runs it: in the order of the trace, and last what only the logs need."""
    graph, facts = problem.graph, facts_of(problem.graph)
    at = _logs_last(graph, facts)
    end = max(len(at) - 1, 0)
    lives = [
        Life(problem.piece_of[t], 0, end) for t, kind in enumerate(facts.kinds) if kind in _RESTING
    ]
    tiles = tiled(graph, zero == 3)
    begins = _made_again(facts, tiles, remat)
    for tile in tiles:
        if facts.kinds[tile.tensor] == "update" or _is_gathered(facts, tile.tensor, zero):
            continue
        piece = problem.piece_of[tile.tensor]
        piece = problem.halves.get(piece, piece) if tile.is_half else piece
        made, again = at[tile.made], begins.get(tile.tensor)
        last = max((at[read] for read in tile.reads), default=made)
        if again is not None:
            forward = [at[read] for read in tile.reads if facts.is_forward[read]]
            lives.append(Life(piece, made, max(forward, default=made)))
            made = at[again]
        lives.append(Life(piece, made, last))
    return Course(len(at), tuple(lives), tuple(enumerate(at)))


def _is_gathered(facts: Facts, tensor: int, zero: int) -> bool:
    """Whether level 3 gathers it for each operation that reads it, and keeps it for none."""
    return zero == 3 and facts.kinds[tensor] == "cast"


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


def _made_again(facts: Facts, tiles: Iterable[Tile], remat: Remat) -> dict[int, int]:
    """Of arrays that recomputing drops: where they are made again."""
    inner: dict[int, str] = {}
    begins: dict[str, int] = {}
    for tile in tiles:
        if not is_computed_again(facts, tile.made, remat):
            continue
        block = facts.blocks[tile.made]
        later = [read for read in tile.reads if not facts.is_forward[read]]
        others = [read for read in tile.reads if facts.is_forward[read]]
        if later and all(facts.blocks[read] == block for read in others):
            inner[tile.tensor] = block
            begins[block] = min(begins.get(block, later[0]), *later)
    return {tensor: begins[block] for tensor, block in inner.items()}


def _on_cpu(problem: Compact, zero: int, remat: Remat) -> Course:
    """As XLA for CPU runs it, which takes out what asks it to compute anything again."""
    graph, kinds = problem.graph, facts_of(problem.graph).kinds
    step = written(graph)
    order = breadth_first(step.nodes)
    at = {place: when for when, place in enumerate(order)}
    end = max(len(order) - 1, 0)
    lives = [Life(problem.piece_of[t], 0, end) for t, kind in enumerate(kinds) if kind in _RESTING]
    for place, (first, last) in _lives(step.nodes, at).items():
        for t in step.nodes[place].tensors:
            if kinds[t] == "gradient" and zero < 2:
                last = end  # all are summed over devices at once
            if kinds[t] != "update":
                lives.append(Life(problem.piece_of[t], first, last))
    lives += _gathered(problem, step.nodes, at, zero)
    runs = [(operation, at[node]) for operation, node in step.node_of.items() if operation >= 0]
    return Course(len(order), tuple(lives), tuple(runs), _ahead(step.nodes, order))


def _ahead(nodes: Sequence[Node], order: Sequence[int]) -> tuple[int, ...]:
    """Where other micro-batches are meanwhile.

    All run beside each other, step by step. The loss of none but the last is asked for, so that the
    others go through it in fewer steps: subtraction, exponential and sum are one with its gradient.
    They hold what is there before as well as after.
    """
    steps = np.zeros(len(nodes), np.int64)
    for place in order:
        steps[place] = max((steps[read] + 1 for read in nodes[place].reads), default=0)
    taken = steps[list(order)]
    return tuple(np.searchsorted(taken, taken + _STEPS_OF_LOSS, side="right") - 1)


def _lives(nodes: Iterable[Node], at: dict[int, int]) -> dict[int, tuple[int, int]]:
    """When the results of each node are there.

    What shares writes over one array of its size that is read for the last time.
    """
    nodes = list(nodes)
    last = dict(at)
    for place, node in enumerate(nodes):
        for read in node.reads:
            last[read] = max(last[read], at[place])
    found = {place: (at[place], last[place]) for place in at}
    for place, node in enumerate(nodes):
        same = (
            read
            for read in node.reads
            if node.shares and last[read] == at[place] and nodes[read].tensors
            if found[read][1] == at[place] and _alike(nodes[read], node)
        )
        if (read := next(same, None)) is not None:
            found[read] = found[read][0], at[place] - 1
    return found


def _alike(one: Node, other: Node) -> bool:
    return one.nbytes == other.nbytes


def _gathered(
    problem: Compact, nodes: Sequence[Node], at: dict[int, int], zero: int
) -> Iterator[Life]:
    """Parameters of level 3 as each device reads them, beside the part that it keeps.

    They are gathered once for the forward and once for the backward pass, and all at the start, as
    nothing is to be waited for.
    """
    if zero < 3:
        return
    facts = facts_of(problem.graph)
    reads: dict[tuple[int, bool], int] = {}
    for place, node in enumerate(nodes):
        if all(facts.kinds[made] == "update" for made in node.tensors):
            continue
        is_forward = facts.is_forward[max(node.operation, 0)]
        for t in node.takes:
            if facts.kinds[t] == "parameter":
                reads[t, is_forward] = max(reads.get((t, is_forward), 0), at[place])
    for (t, _), last in reads.items():
        yield Life(problem.gathered[problem.piece_of[t]], 0, last)


_COURSES = {"cpu": _on_cpu, "tpu": _on_tpu}
