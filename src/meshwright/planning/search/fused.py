"""Which work of a step XLA for CPU does on the way to other work, so that nothing of it is written.

Read from the programs that it makes (jaxlib 0.10): equal work is done once, even where a block is
asked to be computed again, as barriers are taken out; unused work is left out; what is
elementwise runs inside of what reads it, or is the end of a sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from ..graph import Graph, GraphTensor, Operation

_VIEWS = frozenset(
    (
        *("reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient", "name"),
        *("sharding_constraint", "transpose", "store", "cond", "pvary", "reduce_precision"),
    )
)
_EXPENSIVE = frozenset(
    (
        *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "erf_inv"),
        *("rsqrt", "sqrt", "cbrt", "pow", "sin", "cos", "tan", "atan2", "sinh", "cosh", "gather"),
    )
)
_SUMS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
)
_OF_ONE = (*_SUMS, "broadcast_in_dim")
_ALONE = frozenset(  # neither fused into others nor others into it
    (
        *("dot_general", "conv_general_dilated", "scatter", "scatter-add", "scatter_add", "sort"),
        *("top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "scan", "while"),
        *("custom_call", "pallas_call", "reduce_window", "reduce_window_sum", "reduce_window_max"),
        *("select_and_scatter_add", "select_and_gather_add", "fft", "cholesky", "argmax", "argmin"),
        *("random_bits", "unstack", "ragged_dot_general", "dynamic_update_slice", "reduce"),
    )
)
_ERRORS = ("erf", "erfc")
_MADE_ANEW = ("broadcast_in_dim", "iota", "convert_element_type")  # as cheap as to read it


class Fused:
    """A graph without what is done twice or never used, and what is fused in it.

    Arrays are numbers, those of the graph. A *root* is an array that is not a view of another.
    """

    def __init__(self, graph: Graph, twins: bool = True) -> None:
        self.graph = graph
        self.root = functools.cache(self._root)
        self.uses = functools.cache(self._uses)
        self.is_fused = functools.cache(self._is_fused)
        self._wide = functools.cache(self._spread_to)
        self._same = _first_of_twins(graph) if twins else list(range(len(graph.tensors)))
        self._every = self._readers_of(range(len(graph.operations)))
        self.places = self._needed()
        self.made = {
            t: place
            for place in reversed(self.places)
            for t in graph.operations[place].results
            if self._same[t] == t
        }
        self._readers = self._readers_of(self.places)
        self.endings: dict[int, list[int]] = {}  # by the last of them
        self.ended: set[int] = set()
        self._absorbed: set[int] = set()
        for place in self.places:
            if self.is_sum(place):
                self._absorb(place)
        for place in self.places:
            if self.is_sum(place):
                self._end(place)

    def _readers_of(self, places: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place in places:
            for t in self.graph.operations[place].operands:
                found.setdefault(self._same[t], []).append(place)
        return found

    def _needed(self) -> list[int]:
        """The operations that are done, by place."""
        read = {t for t, readers in self._every.items() if readers}
        left = {t: len(readers) for t, readers in self._every.items()}
        kept = []
        for place in range(len(self.graph.operations) - 1, -1, -1):
            op = self.graph.operations[place]
            if op.results and all(self._same[t] != t for t in op.results):
                done = False  # the same was done before
            else:
                done = not op.results or any(left.get(t, 0) or t not in read for t in op.results)
            if done:
                kept.append(place)
                continue
            for t in op.operands:
                left[self._same[t]] -= 1
        return kept[::-1]

    # Single operations

    def op(self, place: int) -> Operation:
        return self.graph.operations[place]

    def is_view(self, place: int) -> bool:
        op = self.op(place)
        if op.kind in _OF_ONE and op.operands and op.results:  # over dims of one element
            return self.size(op.operands[0]) == self.size(op.results[0])
        return op.kind in _VIEWS and bool(op.operands)

    def is_sum(self, place: int) -> bool:
        return self.op(place).kind in _SUMS and not self.is_view(place)

    def is_loop(self, place: int) -> bool:
        """Whether it is elementwise, and not the end of a sum."""
        op = self.op(place)
        if self.is_view(place) or op.kind in _SUMS or op.kind in _ALONE or op.flops:
            return False
        return place not in self.ended

    def operands(self, place: int) -> list[int]:
        """What an operation reads, by root."""
        op = self.op(place)
        found = [self._same[t] for t in op.operands]
        if op.kind in _ERRORS:
            found += self._shared(found[0])
        return [self.root(t)[0] for t in found]

    def _shared(self, t: int) -> list[int]:
        """An error function is made of the exponential that its derivative has."""
        found = [t]
        for kinds in (("square", "integer_pow"), ("neg",), ("exp",)):
            found = [
                self.op(place).results[0]
                for one in found
                for place in self._every.get(one, ())
                if self.op(place).kind in kinds
            ]
        return found[:1]

    # Arrays

    def tensor(self, t: int) -> GraphTensor:
        return self.graph.tensors[t]

    def size(self, t: int) -> int:
        return math.prod(self.graph.tensors[t].shape)

    def _root(self, t: int) -> tuple[int, tuple[int, ...]]:
        """What an array is a view of, and where each of its dims lies there."""
        t = self._same[t]
        place, own = self.made.get(t), tuple(range(len(self.tensor(t).shape)))
        if place is None or not self.is_view(place):
            return t, own
        before = self._same[self.op(place).operands[0]]
        root, order = self.root(before)
        if self.op(place).kind == "transpose":
            return root, tuple(order[i] for i in self._permutation(before, t))
        return root, order if len(order) == len(own) else own

    def _permutation(self, before: int, after: int) -> list[int]:
        one, other = self.tensor(before), self.tensor(after)
        left: list[object] = list(zip(one.dims, one.shape, strict=True))
        found = []
        for each in zip(other.dims, other.shape, strict=True):
            if each not in left:
                return list(range(len(other.shape)))
            found.append(left.index(each))
            left[found[-1]] = None
        return found

    def _uses(self, t: int) -> frozenset[int]:
        """The operations that read an array or a view of it."""
        found: set[int] = set()
        for place in self._readers.get(t, ()):
            if self.is_view(place):
                found.update(*(self.uses(each) for each in self.op(place).results))
            else:
                found.add(place)
        found.update(self._errors_with(t))
        return frozenset(found)

    def _errors_with(self, t: int) -> list[int]:
        """The error functions that an exponential is part of."""
        for kinds in (("exp",), ("neg",), ("square", "integer_pow")):
            place = self.made.get(t)
            if place is None or self.op(place).kind not in kinds:
                return []
            t = self._same[self.op(place).operands[0]]
        return [place for place in self._readers.get(t, ()) if self.op(place).kind in _ERRORS]

    # What is fused

    def _is_fused(self, root: int) -> bool:
        """Whether elementwise work that reads an array does its own work again.

        Not if that is expensive and would be done more than once, or takes several arrays of which
        some reader needs the result.
        """
        place = self.made.get(root)
        if place is None or not self.is_loop(place):
            return False
        op, uses = self.op(place), self.uses(root)
        if op.kind in _EXPENSIVE and (len(uses) > 1 or self._is_spread(root)):
            return False
        if len(uses) <= 1 or op.kind in _MADE_ANEW:
            return True
        taken = self.operands(place)
        if sum(self._is_large(t, root) for t in taken) <= 1:
            return True
        if sum(self.size(t) for t in taken) <= self.size(root):
            return True
        return all(self.is_loop(use) and use not in self._absorbed for use in uses)

    def _is_spread(self, root: int) -> bool:
        """Whether what reads an array is larger, and so would do its work several times."""
        made = (t for place in self.uses(root) for t in self.op(place).results)
        return any(self.size(t) > self.size(root) for t in made)

    def _is_large(self, t: int, beside: int) -> bool:
        place = self.made.get(t)
        if place is not None and self.op(place).kind in ("broadcast_in_dim", "iota"):
            return False
        return self._true_rank(t) >= self._true_rank(beside)

    def _true_rank(self, t: int) -> int:
        return sum(size > 1 for size in self.tensor(t).shape)

    def is_absorbed(self, root: int) -> bool:
        """Whether a sum does the work that an array is made by: it alone reads it."""
        place = self.made.get(root)
        if place is None or not self.is_loop(place):
            return False
        if self.op(place).kind in _EXPENSIVE and self._is_spread(root):
            return False
        return self.op(place).kind in _MADE_ANEW or len(self.uses(root)) == 1

    def _absorb(self, place: int) -> None:
        for root in self.operands(place):
            before = self.made.get(root)
            if before is not None and before not in self._absorbed and self.is_absorbed(root):
                self._absorbed.add(before)
                self._absorb(before)

    def _end(self, place: int) -> None:
        """Elementwise work on the rows of a sum that only this work reads is its end."""
        chain: list[int] = []
        while len(self.op(place).results) == 1:
            uses = self.uses(self.op(place).results[0])
            if len(uses) != 1:
                break
            (place,) = uses
            costly = self.op(place).kind in _EXPENSIVE and self.op(place).kind != "exp"
            if not self.is_loop(place) or place in self._absorbed or costly:
                break
            chain.append(place)
        if chain and self.op(chain[-1]).results:
            self.endings[chain[-1]] = chain
            self.ended.update(chain)

    # Small arrays in the shape of large ones

    def spread(self, t: int, like: int) -> int | None:
        """The smaller array that is read in the shape of a larger one, by several.

        Then it is written in that shape, for a sum that is one of them.
        """
        place = self.made.get(t)
        if place is not None and self.op(place).kind == "broadcast_in_dim":
            operands = self.operands(place)
            t = operands[0] if operands else t
        shape = self.tensor(like).shape
        if self.size(t) >= math.prod(shape) or len(self._wide(t, shape)) < 2:
            return None
        return t

    def _spread_to(self, t: int, shape: tuple[int, ...]) -> frozenset[int]:
        found: set[int] = set()
        for place in self._readers.get(t, ()):
            if self.is_view(place) or self.op(place).kind == "broadcast_in_dim":
                found.update(*(self._wide(each, shape) for each in self.op(place).results))
            elif any(self.tensor(each).shape == shape for each in self.op(place).results):
                found.add(place)
        return frozenset(found)

    def same(self, t: int) -> int:
        """The first array that has the same value."""
        return self._same[t]

    def only_reader(self, t: int) -> int | None:
        """The operation that alone reads an array."""
        readers = self._readers.get(t, ())
        return readers[0] if len(readers) == 1 else None


def _first_of_twins(graph: Graph) -> list[int]:
    same = list(range(len(graph.tensors)))
    for place, tensor in enumerate(graph.tensors):
        if tensor.twin is not None:
            same[place] = same[tensor.twin]
    return same
