"""Which arrays of a step XLA for TPU writes to memory.

Read from the programs that it makes (libtpu 0.0.51). A product computes its operands as it goes,
from whatever elementwise work they are made by. Elementwise work on its result, up to the next
array that several read, is done before it is written; so is a softmax's search for the largest, and
its subtraction. All other elementwise work is done again by all that read it, unless it is made of
more than two large arrays, or is an error function.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from ..graph import Graph
from .facts import Facts, facts_of
from .fused import Fused

_LONG = ("erf", "erfc", "erf_inv")  # dozens of steps for each element
_MOST = 64  # operations that are followed from a product


@dataclass
class Tile:
    """An array that is written, when, and by which operations it is read, through what is fused.

    ``is_half`` says that it is kept in two bytes for four, as only products read it, which round
    what they take to bfloat16.
    """

    tensor: int
    made: int
    reads: list[int] = field(default_factory=list)
    is_half: bool = False


@functools.lru_cache(maxsize=8)
def tiled(graph: Graph, keeps: bool) -> tuple[Tile, ...]:
    """What XLA for TPU writes of a step.

    ``keeps`` is for level 3 of ZeRO, whose step keeps what a product with weights reads: there a
    parameter is gathered, and waits for it (``step/gathering.py``).
    """
    writer = _Writer(Fused(graph, twins=False), facts_of(graph), keeps)
    return tuple(writer.all().values())


class _Writer:
    def __init__(self, fused: Fused, facts: Facts, keeps: bool) -> None:
        self._fused = fused
        self._facts = facts
        self._keeps = keeps
        self._ends: dict[int, int] = {}  # products -> the array that is written in the end
        self._within: set[int] = set()  # operations done within a product
        self._tiles: dict[int, Tile] = {}
        self._known: dict[int, frozenset[int]] = {}

    def all(self) -> dict[int, Tile]:
        fused = self._fused
        for place in fused.places:
            if self._is_product(place) and fused.op(place).results:  # one element is no array
                self._end(place)
        for place in fused.places:
            if fused.is_view(place):
                continue
            for t in self._results(place):
                self._tiles[t] = Tile(t, place)
        for place in fused.places:
            if not fused.is_view(place):
                self._tell(place)
        for tile in self._tiles.values():
            tile.is_half = self._is_half(tile.tensor)
        return self._tiles

    def _is_product(self, place: int) -> bool:
        return self._fused.op(place).kind in ("dot_general", "conv_general_dilated")

    def _loops(self, place: int) -> bool:
        """Whether it is elementwise; a scatter of constants is, each asks if it is meant."""
        fused, op = self._fused, self._fused.op(place)
        if op.kind.startswith("scatter") and len(op.operands) == 1:
            return True
        if op.kind == "random_bits":
            return True
        return op.kind != "gather" and (fused.is_loop(place) or place in fused.ended)

    def _end(self, place: int) -> None:
        """Follow the elementwise work that is done before a product is written.

        It ends where devices sum a gradient, and where a wider type is all that is left to do.
        """
        fused, (t,) = self._fused, self._fused.op(place).results
        self._ends[place] = t
        if self._facts.batch in fused.op(place).summed:
            return
        inside: list[int] = []
        while not (self._keeps and self._is_kept(t)):
            more = self._until_one(t, place)
            if more is None:
                break
            inside += more
            t = fused.op(more[-1]).results[0]
        while inside and self._widens(inside[-1]):
            inside.pop()
        if inside:
            self._ends[place] = fused.op(inside[-1]).results[0]
            self._within.update(inside)

    def _until_one(self, t: int, product: int) -> list[int] | None:
        """The work on an array up to the next one that alone is read by others."""
        fused, shared = self._fused, self._is_shared(product)
        values, ops = {t}, set[int]()
        for _ in range(_MOST):
            left = {use for value in values for use in fused.uses(value)} - ops
            if not left:
                return None
            place = min(left)
            allowed = self._loops(place) or (shared and fused.op(place).kind == "reduce_max")
            if not allowed or len(fused.op(place).results) != 1:
                return None
            if not all(self._is_ready(o, product, values) for o in fused.operands(place)):
                return None
            ops.add(place)
            values.add(fused.op(place).results[0])
            is_open = [value for value in values if not fused.uses(value) <= ops]
            if len(is_open) == 1 and is_open[0] == fused.op(place).results[0]:
                return sorted(ops)
        return None

    def _is_ready(self, t: int, product: int, values: set[int]) -> bool:
        """Whether an array is there when a product is made, or can be made then."""
        fused = self._fused
        todo, seen = [t], {t}
        while todo:
            one = todo.pop()
            made = fused.made.get(one)
            if one in values or made is None or made < product:
                continue
            if not self._loops(made):
                return False
            more = [o for o in fused.operands(made) if o not in seen]
            seen.update(more)
            todo += more
        return True

    def _widens(self, place: int) -> bool:
        op, tensors = self._fused.op(place), self._fused.tensor
        if op.kind != "convert_element_type":
            return False
        return tensors(op.results[0]).itemsize > tensors(op.operands[0]).itemsize

    def _is_small(self, t: int, beside: int) -> bool:
        return self._fused.size(t) < self._fused.size(beside)

    def _results(self, place: int) -> tuple[int, ...]:
        """What of an operation is written."""
        fused = self._fused
        if place in self._ends:
            return (self._ends[place],)
        if place in self._within:
            return ()
        if not self._loops(place):
            return fused.op(place).results
        return tuple(t for t in fused.op(place).results if self._is_written(place, t))

    def _is_written(self, place: int, t: int) -> bool:
        """Whether elementwise work is."""
        fused, uses = self._fused, self._fused.uses(t)
        if not uses or (self._keeps and self._is_kept(t)):
            return True
        if any(self._needs(use) for use in uses):
            return True
        if fused.op(place).kind in _LONG and len(uses) > 1:
            return True
        return len(self._leaves(t)) > 2 and len(uses) > 1

    def _leaves(self, t: int) -> frozenset[int]:
        """The large arrays in memory that an array can be made of again."""
        if t not in self._known:
            self._known[t] = self._leaves_of(t)
        return self._known[t]

    def _leaves_of(self, t: int) -> frozenset[int]:
        made = self._fused.made.get(t)
        if made is None or t in self._tiles or not self._loops(made) or made in self._within:
            return frozenset((t,))
        found: set[int] = set()
        for o in self._fused.operands(made):
            if not self._is_small(o, t):
                found |= self._leaves(o)
        return frozenset(found)

    def _is_kept(self, t: int) -> bool:
        """Whether a product with weights reads it, and the backward pass as well."""
        facts, made = self._facts, self._fused.made.get(t)
        if made is None or not facts.is_forward[made] or facts.kinds[t] != "activation":
            return False
        uses = self._fused.uses(t)
        read = any(facts.is_of_weights[use] and facts.is_forward[use] for use in uses)
        return read and any(not facts.is_forward[use] for use in uses)

    def _needs(self, place: int) -> bool:
        """Whether an operation reads memory alone."""
        fused, op = self._fused, self._fused.op(place)
        if self._loops(place) or fused.is_sum(place) or op.kind == "conv_general_dilated":
            return False
        return op.kind != "dot_general"

    def _is_shared(self, place: int) -> bool:
        """Whether it is a product for each of several heads or rows."""
        op = self._fused.op(place)
        dims = [self._fused.tensor(t).dims for t in op.operands]
        summed = set(op.summed)
        return len(dims) == 2 and any(
            d is not None and d in dims[1] and d not in summed for d in dims[0]
        )

    def _tell(self, place: int) -> None:
        """Tell what an operation reads that it does so."""
        fused = self._fused
        within = not self._loops(place) or place in self._within
        if not within and not any(t in self._tiles for t in fused.op(place).results):
            return
        todo, seen = [place], {place}
        while todo:
            for t in fused.operands(todo.pop()):
                if t in self._tiles:
                    self._tiles[t].reads.append(place)
                elif (before := fused.made.get(t)) is not None and before not in seen:
                    seen.add(before)
                    if self._loops(before) and before not in self._within:
                        todo.append(before)

    def _is_half(self, t: int) -> bool:
        uses = self._fused.uses(t)
        if self._fused.tensor(t).itemsize != 4 or not uses:
            return False
        return all(self._is_product(use) for use in uses)
