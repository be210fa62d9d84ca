"""Which arrays of a step a compiler writes to memory: a few rules of fusion.

Elementwise work runs inside of the operation that reads its result, so that the result is not
written, unless several operations read it and to compute it again would cost more than to read it.
(The rule of XLA's instruction fusion; Chen et al., "TVM", 2018, name the kinds of operations so.)

* For CPU a product and a look-up read memory, and a reduction does alone what it alone reads. An
  array that several read is written if it is expensive, or is made of several large arrays. A block
  that is to be computed again is not: the compiler merges equal work.
* For TPU a product computes its operands as it goes, and does the elementwise work that follows on
  its result. An array that several read is written if more than two large arrays make it.
* For GPU, of which only the traffic is counted, it is as for CPU, but for what one kernel does
  between two products.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..graph import Graph, Operation
from .facts import Facts, facts_of, is_turn

_VIEWS = frozenset(
    (
        *("reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient", "name", "store"),
        *("sharding_constraint", "transpose", "cond", "pvary", "reduce_precision"),
        *("bitcast_convert_type", "random_wrap"),
    )
)
_IN_MEMORY = frozenset(  # they read what lies in memory, and write there
    (
        *("gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "cumsum", "cumprod"),
        *("cummax", "cummin", "cumlogsumexp", "scan", "while", "custom_call", "pallas_call"),
        *("reduce_window", "reduce_window_sum", "reduce_window_max", "select_and_scatter_add"),
        *("select_and_gather_add", "fft", "cholesky", "argmax", "argmin", "concatenate"),
        *("unstack", "ragged_dot_general", "dynamic_update_slice"),
    )
)
_SCARCE = ("v5e", "v6e")  # of memory bandwidth
_PRODUCTS = ("dot_general", "conv_general_dilated")
_SPREADS = ("broadcast_in_dim", "iota")  # as cheap to make as to read
_ERRORS = ("erf", "erfc", "erf_inv")  # dozens of steps for each element
_EXPENSIVE = frozenset(
    (
        *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "rsqrt", "sqrt", "cbrt"),
        *("pow", "sin", "cos", "tan", "atan2", "sinh", "cosh", *_ERRORS),
    )
)
# Two words are drawn for each; an error function keeps the exponential that its derivative reads.
_TWICE_ON_CPU = ("random_bits", *_ERRORS)


@dataclass
class Buffer:
    """An array that is written by one operation and read by others, through what is fused.

    ``copies`` of it are written. ``is_half`` says that two bytes of four are kept, as only products
    read it, which round to bfloat16 (TPU).
    """

    tensor: int
    start: int
    reads: list[int] = field(default_factory=list)
    copies: int = 1
    is_half: bool = False

    @property
    def last(self) -> int:
        """The operation that reads it last; the one that makes it, where none does."""
        return max(self.reads, default=self.start)


@functools.lru_cache(maxsize=8)
def buffers_on_cpu(graph: Graph) -> tuple[tuple[Buffer, ...], dict[int, int]]:
    """What XLA for CPU writes of a step, and how many operations come before each, at most.

    Only operations that are done have such a depth: equal work is done once.
    """
    step = _OnCpu(graph, facts_of(graph))
    return tuple(step.buffers()), step.depths()


@functools.lru_cache(maxsize=8)
def buffers_on_tpu(graph: Graph, keeps: bool, kind: str = "") -> tuple[Buffer, ...]:
    """What XLA for TPU writes of a step.

    ``keeps`` is for level 3 of ZeRO, whose step keeps what a product with weights reads: there a
    parameter is gathered, and waits for it (``step/sharing.py``). Nor is a softmax done again
    there, whose weights are bfloat16 for a product, nor the gradient that a parameter waits for;
    but on chips of ``kind`` v5e and v6e, which have less bandwidth for their FLOPs, both are.
    """
    return tuple(_OnTpu(graph, facts_of(graph), keeps, kind not in _SCARCE).buffers())


class Moved(NamedTuple):
    """The arrays that an operation reads from memory, and those that it writes there."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@functools.lru_cache(maxsize=8)
def moved_on_tpu(graph: Graph, kind: str) -> tuple[Moved, ...]:
    """What each operation reads from memory and writes there, below level 3 of ZeRO."""
    return tuple(_OnTpu(graph, facts_of(graph), False, kind not in _SCARCE).moved())


@functools.lru_cache(maxsize=8)
def moved_on_gpu(graph: Graph) -> tuple[Moved, ...]:
    """The same for GPUs."""
    return tuple(_OnGpu(graph, facts_of(graph)).moved())


def _begins_of_loops(graph: Graph) -> dict[int, int]:
    """Where the loops begin that stack results: an array is there from the first turn on."""
    begins, latest = dict[int, int](), dict[int, int]()
    for place, operation in enumerate(graph.operations):
        before = graph.operations[place - 1] if place else operation
        if is_turn(operation):
            if not (is_turn(before) and before.times == operation.times):
                latest[operation.times] = place
        elif operation.kind == "scan" and operation.operands:
            (operand, *_), (result, *_) = operation.operands, operation.results
            ranks = [len(graph.tensors[t].shape) for t in (operand, result)]
            if ranks[1] > ranks[0] and operation.times in latest:
                begins[place] = latest[operation.times]
    return begins


class _Fusion:
    """Who reads which array, with views of an array taken for the array itself."""

    merges_equal_work = False

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self._graph = graph
        self._facts = facts
        self._ops = graph.operations
        self._source = list(range(len(graph.tensors)))
        if self.merges_equal_work:
            for place, tensor in enumerate(graph.tensors):
                if tensor.twin is not None:
                    self._source[place] = self._source[tensor.twin]
        self._maker: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        self.places: list[int] = []  # of operations that are done, without views
        for place, op in enumerate(self._ops):
            if op.results and all(self._source[t] != t for t in op.results):
                continue  # equal work was done before
            if op.kind in _VIEWS and op.operands and len(op.results) == 1 and not op.whole:
                self._follow(op)
                continue
            self.places.append(place)
            for t in op.results:
                self._maker.setdefault(self._source[t], place)
            for t in dict.fromkeys(self._operands(place)):
                self._readers.setdefault(t, []).append(place)
        self.is_written = functools.cache(self._is_written)
        self.leaves = functools.cache(self._leaves)

    def _follow(self, view: Operation) -> None:
        (t,) = view.results
        if self._source[t] == t:
            self._source[t] = self._source[view.operands[0]]

    def _operands(self, place: int) -> list[int]:
        return [self._source[t] for t in self._ops[place].operands]

    def _large_operands(self, t: int) -> Iterator[int]:
        """What an array is made of that is as large as it is."""
        yield from (o for o in self._operands(self._maker[t]) if self._size(o) >= self._size(t))

    def _size(self, t: int) -> int:
        return math.prod(self._graph.tensors[t].shape)

    def _is_loop(self, place: int) -> bool:
        """Whether an operation is elementwise, or as good as that."""
        op = self._ops[place]
        if op.kind.startswith("scatter") and len(op.operands) == 1:  # into constants
            return True
        costs = op.flops or op.summed or op.whole
        return not costs and op.kind not in _IN_MEMORY and not op.kind.startswith("reduce_")

    def _is_sum(self, place: int) -> bool:
        return self._ops[place].kind.startswith("reduce_")

    def buffers(self) -> Iterator[Buffer]:
        """What is written, with all that reads it."""
        written = {
            self._source[t]: Buffer(t, place)
            for place in self.places
            for t in self._results(place)
            if self._source[t] == t
        }
        for place in self.places:
            if self._is_run(place) or any(t in written for t in self._ops[place].results):
                self._tell(place, written)
        begins = _begins_of_loops(self._graph)
        for buffer in written.values():
            self._finish(buffer)
            buffer.start = begins.get(buffer.start, buffer.start)
            yield buffer

    def moved(self) -> Iterator[Moved]:
        """What each operation reads and writes, arguments of the step included."""
        results = {place: tuple(self._results(place)) for place in self.places}
        written = {t for some in results.values() for t in some if self._source[t] == t}
        for place, operation in enumerate(self._ops):
            runs = place in results and (
                self._is_run(place) or not written.isdisjoint(operation.results)
            )
            reads = tuple(self._reads(place, written)) if runs else ()
            yield Moved(reads, tuple(t for t in results.get(place, ()) if t in written))

    def _tell(self, place: int, written: dict[int, Buffer]) -> None:
        for t in self._reads(place, written):
            if t in written:
                written[t].reads.append(place)

    def _reads(self, place: int, written: Container[int]) -> Iterator[int]:
        """What lies in memory that an operation reads, through the elementwise work that is fused
        into it."""
        todo = self._operands(place)
        visited = set(todo)
        for t in todo:  # which grows
            if t in written or t not in self._maker:
                yield t
            elif self._is_loop(self._maker[t]):
                more = [o for o in self._operands(self._maker[t]) if o not in visited]
                visited.update(more)
                todo += more

    def _results(self, place: int) -> Iterator[int]:
        yield from (t for t in self._ops[place].results if self.is_written(self._source[t]))

    def _is_run(self, place: int) -> bool:
        """Whether an operation runs even if nothing of its own is written."""
        return not self._is_loop(place)

    def _is_written(self, t: int) -> bool:
        raise NotImplementedError

    def _finish(self, buffer: Buffer) -> None:
        raise NotImplementedError

    def _leaves(self, t: int) -> frozenset[int]:
        """The large arrays in memory that an array can be made of again."""
        maker = self._maker.get(t)
        if maker is None or not self._is_loop(maker) or self.is_written(t):
            return frozenset((t,))
        return frozenset().union(*map(self.leaves, self._large_operands(t)))


class _OnCpu(_Fusion):
    merges_equal_work = True

    def __init__(self, graph: Graph, facts: Facts) -> None:
        super().__init__(graph, facts)
        self._in_sums: set[int] = set()  # operations that a reduction does, and reductions
        for place in self.places:
            if self._is_sum(place):
                self._take_in(place)

    def _is_loop(self, place: int) -> bool:
        return super()._is_loop(place) and self._ops[place].kind != "random_bits"

    def _take_in(self, place: int) -> None:
        self._in_sums.add(place)
        for t in self._operands(place):
            maker = self._maker.get(t)
            if maker is None or maker in self._in_sums or len(self._readers[t]) > 1:
                continue
            if self._is_loop(maker):
                self._take_in(maker)

    def _is_written(self, t: int) -> bool:
        place, readers = self._maker[t], self._readers.get(t, ())
        kind = self._ops[place].kind
        if not self._is_loop(place) or not readers:
            return True
        if kind in _SPREADS:
            return False
        if not all(self._is_loop(reader) or self._is_sum(reader) for reader in readers):
            return True
        if len(readers) == 1:
            return False
        if kind in _EXPENSIVE or any(reader in self._in_sums for reader in readers):
            return True
        return sum(not self._is_spread(o) for o in self._large_operands(t)) > 1

    def _is_spread(self, t: int) -> bool:
        return t in self._maker and self._ops[self._maker[t]].kind in _SPREADS

    def buffers(self) -> Iterator[Buffer]:
        yield from super().buffers()
        yield from self._statistics()

    def _statistics(self) -> Iterator[Buffer]:
        """Small arrays that several read in the shape of a large one, a reduction among them.

        So do the gradients of a normalization: the statistics of rows are written for each element.
        """
        wide: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for place in self.places:
            for t in self._ops[place].results if self._is_loop(place) else ():
                for o in map(self._unspread, self._operands(place)):
                    if self._size(o) < self._size(t) and o in self._maker:
                        wide.setdefault((o, self._graph.tensors[t].shape), []).append(place)
        for (o, _), places in wide.items():
            sums = [operand for operand in places if operand in self._in_sums]
            if sums and len(places) > 1:
                yield Buffer(self._ops[sums[-1]].results[0], self._maker[o], sums)

    def depths(self) -> dict[int, int]:
        """The length of the longest way to each operation; a loop begins after all before it."""
        depths: dict[int, int] = {}
        deepest = 0
        for place in self.places:
            before = [self._maker[t] for t in self._operands(place) if t in self._maker]
            depth = max((depths[earlier] + 1 for earlier in before), default=0)
            depths[place] = max(depth, deepest) if is_turn(self._ops[place]) else depth
            deepest = max(deepest, depths[place])
        return depths

    def _unspread(self, t: int) -> int:
        maker = self._maker.get(t)
        if (
            maker is not None
            and self._ops[maker].kind == "broadcast_in_dim"
            and self._operands(maker)
        ):
            return self._unspread(self._operands(maker)[0])
        return t

    def _finish(self, buffer: Buffer) -> None:
        if self._ops[buffer.start].kind in _TWICE_ON_CPU:
            buffer.copies = 2


class _OnGpu(_OnCpu):
    """A softmax or a normalization of rows is one kernel: between two products elementwise work and
    sums over a row write nothing for each other, and read an array once. A product that alone reads
    a parameter in another type converts it on the way."""

    merges_equal_work = False

    def moved(self) -> Iterator[Moved]:
        here: set[int] = set()  # what a kernel has read or written
        for place, (reads, writes) in enumerate(super().moved()):
            if not (self._is_loop(place) or self._is_sum(place)):
                here.clear()
                yield Moved(reads, writes)
                continue
            yield Moved(tuple(t for t in reads if t not in here), writes)
            is_of_columns = self._facts.batch in self._ops[place].summed
            here.update(writes if is_of_columns else (*reads, *writes))

    def _is_written(self, t: int) -> bool:
        place, readers = self._maker[t], self._readers.get(t, ())
        if not self._is_loop(place) or not readers:
            return super()._is_written(t)
        if len(readers) == 1 and self._is_converted(place):
            return False
        is_here = max(readers) < self._next_product(place)
        if is_here and all(self._is_loop(reader) or self._is_sum(reader) for reader in readers):
            return False
        return super()._is_written(t)

    def _is_converted(self, place: int) -> bool:
        """Whether an operation makes another type of a parameter, once or twice."""
        if self._ops[place].kind != "convert_element_type":
            return False
        (operand,) = self._operands(place)
        if operand in self._maker:
            return self._is_converted(self._maker[operand])
        return self._graph.tensors[operand].role == "parameter"

    def _next_product(self, place: int) -> int:
        at = bisect.bisect(self._products, place)
        return self._products[at] if at < len(self._products) else len(self._ops)

    @functools.cached_property
    def _products(self) -> list[int]:
        return [place for place in self.places if self._ops[place].kind in _PRODUCTS]


class _OnTpu(_Fusion):
    def __init__(self, graph: Graph, facts: Facts, keeps: bool, keeps_more: bool) -> None:
        super().__init__(graph, facts)
        self._keeps = keeps
        self._keeps_more = keeps and keeps_more
        self._ends: dict[int, int] = {}  # of products: the array that is written in the end
        self._inside: set[int] = set()  # operations done within a product
        for place in self.places:
            if self._ops[place].kind in _PRODUCTS and self._ops[place].results:
                self._end(place)

    def _end(self, product: int) -> None:
        """Follow the elementwise work that is done before a product is written.

        It ends where devices sum a gradient, and where a wider type is all that is left to do; but
        not at level 3 of ZeRO, whose gradients are written, and are made of the wider array.
        """
        if self._facts.batch in self._ops[product].summed:
            return
        chain: list[int] = []
        t = self._source[self._ops[product].results[0]]
        while (place := self._next(t, product)) is not None:
            chain.append(place)
            t = self._source[self._ops[place].results[0]]
        while chain and self._widens(chain[-1]) and not self._keeps:
            chain.pop()
        if chain:
            self._ends[product] = self._ops[chain[-1]].results[0]
            self._inside.update(chain)

    def _next(self, t: int, product: int) -> int | None:
        """The elementwise operation that alone reads an array, if its other operands are there."""
        readers = self._readers.get(t, ())
        if len(readers) != 1 or (self._keeps and self._is_kept(t)):
            return None
        (place,) = readers
        if not self._is_loop(place) or len(self._ops[place].results) != 1:
            return None
        others = [o for o in self._operands(place) if o != t]
        return place if all(self._is_ready(o, product) for o in others) else None

    def _is_ready(self, t: int, product: int) -> bool:
        """Whether an array is there when a product runs, or can be made then."""
        maker = self._maker.get(t)
        if maker is None or maker < product:
            return True
        return self._is_loop(maker) and all(
            self._is_ready(o, product) for o in self._operands(maker)
        )

    def _widens(self, place: int) -> bool:
        op, tensors = self._ops[place], self._graph.tensors
        is_cast = op.kind == "convert_element_type"
        return is_cast and tensors[op.results[0]].itemsize > tensors[op.operands[0]].itemsize

    def _results(self, place: int) -> Iterator[int]:
        if place in self._ends:
            yield self._ends[place]
        elif place not in self._inside:
            yield from super()._results(place)

    def _is_run(self, place: int) -> bool:
        return super()._is_run(place) or place in self._inside

    def _is_written(self, t: int) -> bool:
        place, readers = self._maker[t], self._readers.get(t, ())
        if place in self._ends:
            return False
        if place in self._inside:
            return t in self._ends.values()
        if not self._is_loop(place) or (self._keeps and self._is_kept(t)):
            return True
        if self._keeps_more and self._is_awaited(t):
            return True
        if self._ops[place].kind in _SPREADS:
            return False
        if not readers or any(self._needs_memory(reader) for reader in readers):
            return True
        if len(readers) < 2:
            return False
        if self._ops[place].kind in _ERRORS:
            return True
        return len(frozenset().union(*map(self.leaves, self._large_operands(t)))) > 2

    def _needs_memory(self, place: int) -> bool:
        is_product = self._ops[place].kind in _PRODUCTS
        return not (self._is_loop(place) or self._is_sum(place) or is_product)

    def _is_kept(self, t: int) -> bool:
        """Whether the backward pass reads what a product with weights does, or one of bfloat16."""
        facts, maker, readers = self._facts, self._maker.get(t), self._readers.get(t, ())
        if maker is None or not facts.is_forward[maker] or facts.kinds[t] != "activation":
            return False
        # Such as attention's weights.
        is_cast = self._keeps_more and self._ops[maker].kind == "convert_element_type"
        products = [
            reader
            for reader in readers
            if facts.is_of_weights[reader] or (is_cast and self._ops[reader].kind in _PRODUCTS)
        ]
        in_forward = any(facts.is_forward[product] for product in products)
        return in_forward and any(not facts.is_forward[reader] for reader in readers)

    def _is_awaited(self, t: int) -> bool:
        """Whether it is a gradient for which a parameter is gathered again when it is there."""
        facts, readers = self._facts, self._readers.get(t, ())
        if t not in self._maker or facts.kinds[t] != "activation":
            return False
        in_backward = not any(facts.is_forward[reader] for reader in readers)
        return in_backward and any(facts.is_of_weights[reader] for reader in readers)

    def _finish(self, buffer: Buffer) -> None:
        readers = self._readers.get(self._source[buffer.tensor], ())
        only_products = all(self._ops[reader].kind in _PRODUCTS for reader in readers)
        is_float32 = self._graph.tensors[buffer.tensor].itemsize == 4
        buffer.is_half = bool(readers) and only_products and is_float32
