"""Which arrays of a step XLA for CPU writes to memory, and what each of them is made of.

Products, sums and other work that runs by itself read from memory and write to it. Of elementwise
results are written

* what such work reads, save what a sum alone reads and does itself;
* what is expensive (an exponential, a root, ...) and read more than once, rather than done again;
* what is made of several arrays and cannot be fused into all that read it.

A product wants its operands as matrices: rows times what is summed, and that times columns. One
that lies otherwise is written once more, but for a swap of the last two dims, which the product
does by itself. Elementwise work is done again for that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..graph import Graph, Operation
from .fused import Fused


@dataclass
class Node:
    """Something that runs, and the arrays that it writes, by tensors of the graph of their size.

    ``reads`` are nodes, by place, and ``takes`` are arguments of the step. ``shares`` says that it
    may write where something of its size lies that is not read afterwards.
    """

    operation: int
    tensors: tuple[int, ...]
    nbytes: int = 0
    reads: list[int] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)
    shares: bool = False


@dataclass(frozen=True)
class Written:
    """What a step writes. ``node_of`` tells of operations in which of the nodes they run."""

    nodes: tuple[Node, ...]
    node_of: dict[int, int]


@functools.lru_cache(maxsize=8)
def written(graph: Graph) -> Written:
    """What XLA for CPU writes of a step, in the order in which it was traced."""
    return _Writer(Fused(graph)).all()


class _Writer:
    def __init__(self, fused: Fused) -> None:
        self._fused = fused
        self._nodes: list[Node] = []
        self._known: dict[object, int] = {}
        self._node_of: dict[int, int] = {}

    def all(self) -> Written:
        fused = self._fused
        for place in fused.places:
            if fused.is_view(place) or (place in fused.ended and place not in fused.endings):
                continue
            read = any(fused.uses(t) for t in fused.op(place).results)
            if not fused.is_loop(place) or not read:
                self._run(place)
        return Written(tuple(self._nodes), self._node_of)

    def _run(self, place: int) -> int:
        """The node that an operation is; elementwise work that is written is one too."""
        if place in self._known:
            return self._known[place]
        fused, op = self._fused, self._fused.op(place)
        loops = fused.is_loop(place)
        node = self._new(Node(place, op.results, shares=loops), place)
        if loops:
            self._inputs(node, place)
        elif place in fused.endings:
            for each in fused.endings[place]:
                self._node_of[each] = node
                self._absorb(node, each, set(fused.endings[place]))
        elif fused.is_sum(place):
            self._absorb(node, place, set())
        elif op.kind == "dot_general":
            for t, wanted, folds in _matrices(fused, op):
                self._matrix(node, t, wanted, folds)
        else:
            for root in fused.operands(place):
                self._take(node, root)
        if op.kind == "random_bits":  # two words are drawn for each
            self._nodes[node].tensors *= 2
        if op.kind.startswith("scatter") and op.results:
            self._zeros(node, op)
        return node

    def _take(self, node: int, root: int) -> None:
        """A node reads an array from memory."""
        place = self._fused.made.get(root)
        if place is None:
            self._nodes[node].takes.append(root)
        else:
            self._depend(node, self._run(place))

    def _inputs(self, node: int, place: int) -> None:
        """What elementwise work reads, through all that is fused into it."""
        todo, seen = [place], {place}
        while todo:
            place = todo.pop()
            self._node_of.setdefault(place, node)
            for root in self._fused.operands(place):
                if not self._fused.is_fused(root):
                    self._take(node, root)
                elif (before := self._fused.made[root]) not in seen:
                    seen.add(before)
                    todo.append(before)

    def _absorb(self, node: int, place: int, among: set[int]) -> None:
        """What a sum reads, or the end of one, with the elementwise work that is for it alone."""
        self._node_of.setdefault(place, node)
        result = self._fused.op(place).results
        for root in self._fused.operands(place):
            before = self._fused.made.get(root)
            if before is not None and before in among:
                continue
            small = None
            if result and not among and not self._fused.is_sum(place):
                small = self._fused.spread(root, result[0])
            if small is not None:
                self._depend(node, self._spread(small, result[0]))
            elif before is not None and self._fused.is_absorbed(root):
                self._absorb(node, before, among)
            else:
                self._take(node, root)

    def _matrix(self, node: int, t: int, wanted: Sequence[int], folds: bool) -> None:
        """A product reads an array with its dims in this order."""
        root, order = self._fused.root(t)
        lies = [order[i] for i in wanted]
        swapped = [*lies[:-2], *lies[:-3:-1]]
        if lies == sorted(lies) or (folds and swapped == sorted(lies)):
            self._take(node, root)
        else:
            self._depend(node, self._again((root, *lies), root, root))

    def _spread(self, root: int, like: int) -> int:
        return self._again((root, self._fused.tensor(like).shape), root, like)

    def _again(self, key: object, root: int, like: int) -> int:
        """An array that is written once more, in another way."""
        if key not in self._known:
            place = self._fused.made.get(root, -1)
            node = self._new(Node(place, (like,), shares=True), key)
            if self._fused.is_fused(root):
                self._inputs(node, place)
            else:
                self._take(node, root)
        return self._known[key]

    def _zeros(self, node: int, op: Operation) -> None:
        """What a scatter adds to lies where its result will; if constant, from the start."""
        like = [self._fused.tensor(t).shape for t in op.operands[:1]]
        if self._fused.tensor(op.results[0]).shape not in like:
            zeros = self._new(Node(self._nodes[node].operation, op.results), ("zeros", node))
            self._depend(node, zeros)
        self._nodes[node].shares = True

    def _new(self, node: Node, key: object) -> int:
        node.nbytes = sum(self._fused.tensor(t).nbytes for t in node.tensors)
        self._nodes.append(node)
        self._known[key] = len(self._nodes) - 1
        self._node_of.setdefault(node.operation, len(self._nodes) - 1)
        return len(self._nodes) - 1

    def _depend(self, node: int, on: int) -> None:
        if on not in self._nodes[node].reads:
            self._nodes[node].reads.append(on)


def _matrices(fused: Fused, op: Operation) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    """The operands of a product, the order in which it wants their dims, and whether it can swap
    the last two."""
    operands = [fused.same(t) for t in op.operands]
    if len(operands) != 2 or not op.results:
        yield from ((t, (), False) for t in operands)
        return
    dims = [_named(fused, op, t) for t in operands]
    summed = set(op.summed)
    shared = {d for d in dims[0] if d in dims[1] and d not in summed and d is not None}
    swapped = _is_swapped(fused, op.results[0], dims[0], shared, summed)
    for side, t in enumerate(operands):
        each = [i for i, size in enumerate(fused.tensor(t).shape) if size > 1]
        first = [i for i in each if dims[side][i] in shared]
        inner = [i for i in each if dims[side][i] in summed]
        outer = [i for i in each if i not in first and i not in inner]
        ends = (outer, inner) if (side == 0) != swapped else (inner, outer)
        yield t, (*first, *ends[0], *ends[1]), len(inner) == 1 == len(outer)


def _named(fused: Fused, op: Operation, t: int) -> list[int | None]:
    """The dims of an operand, by the names that the operation has for them."""
    names = {joint.given: joint.wanted for joint in op.joints if fused.same(joint.tensor) == t}
    return [None if d is None else names.get(d, d) for d in fused.tensor(t).dims]


def _is_swapped(
    fused: Fused, t: int, left: list[int | None], shared: set[int], summed: set[int]
) -> bool:
    """Whether what is read of a product is its transpose: then the operands change places."""
    while (reader := fused.only_reader(t)) is not None and fused.is_view(reader):
        t = fused.op(reader).results[0]
    rest = [d for d in fused.tensor(t).dims if d not in shared and d is not None]
    return bool(rest) and rest[0] not in [d for d in left if d not in summed]


def breadth_first(nodes: Sequence[Node]) -> list[int]:
    """The order in which XLA for CPU runs nodes: each as soon as what it reads is there."""
    users: list[list[int]] = [[] for _ in nodes]
    missing = [len(node.reads) for node in nodes]
    for place, node in enumerate(nodes):
        for read in node.reads:
            users[read].append(place)
    queue = [place for place, count in enumerate(missing) if not count]
    for place in queue:  # which grows
        for user in users[place]:
            missing[user] -= 1
            if not missing[user]:
                queue.append(user)
    return queue
