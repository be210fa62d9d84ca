"""A graph made small: equal pieces and equal work of repeated blocks are counted, not repeated."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..graph import Graph, Joint, Operation, Product
from .choices import EVERY_REMAT, Remat
from .facts import Facts, facts_of, is_layer
from .recompute import times_done
from .traffic import Traffic, traffic_of

_DTYPES = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64"}  # by bytes, as products run
_RESTING = (
    "gradient",
    "update",
    "parameter",
    "cast",
    "slot",
    "gathered",
)  # whose pieces ZeRO may share out
_LAID_OUT = ("parameter", "slot", "state", "input")  # what a placement has layouts for


@dataclass(frozen=True)
class Unit:
    """All dims of one family and size: they lie alike, along one choice of axes.

    Where a family has dims of several sizes, the size is part of its name here.
    """

    family: str
    size: int


@dataclass(frozen=True)
class Piece:
    """A kind of array: ``units`` are places of units, one per dim, ``None`` where never split.

    ``sent_nbytes`` are those of a parameter in the type in which the forward pass takes it, which
    is what level 3 of ZeRO gathers.
    """

    units: tuple[int | None, ...]
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    sent_nbytes: int = 0

    @functools.cached_property
    def scope(self) -> frozenset[int]:
        """The units that it has."""
        return frozenset(unit for unit in self.units if unit is not None)

    @property
    def is_shareable(self) -> bool:
        """Whether ZeRO may share it out."""
        return self.kind in _RESTING


@dataclass(frozen=True)
class Move:
    """A piece that an operation wants with another unit in the place of one it has."""

    piece: int
    source: int
    target: int


@dataclass(frozen=True)
class Work:
    """A kind of operation. ``far`` and ``near`` are what it reads from memory and writes there;
    near is what may stay in the chip. ``writes`` are the results that are written at all.

    All that neither sums, gathers nor multiplies is of the kind "elementwise", but for what a loop
    stacks or takes out of a stack, which is a "scan", as is a layer that is taken by its number.

    ``units`` are those that its work is divided by, where they are split. Of a ``product`` whose
    speed depends on its shape, that has units in place of dims; the compilers of accelerators
    choose shapes of their own. All other FLOPs run by the ``rate`` of their kind.
    """

    kind: str
    flops: float
    dtype: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    far: tuple[int, ...]
    near: tuple[int, ...]
    writes: tuple[int, ...]
    units: frozenset[int]
    summed: frozenset[int]
    whole: frozenset[int]
    moves: tuple[Move, ...]
    times: int
    runs: tuple[int, ...]  # with each kind of remat, for each of ``times``
    product: Product | None = None
    rate: str = "product"

    def runs_with(self, remat: Remat) -> int:
        """How often it is done where it is done once without remat."""
        return self.runs[EVERY_REMAT.index(remat)]

    @functools.cached_property
    def far_counts(self) -> tuple[tuple[int, int], ...]:
        """How often each piece is among ``far``: the norm of all gradients reads hundreds."""
        return tuple(Counter(self.far).items())

    @functools.cached_property
    def near_counts(self) -> tuple[tuple[int, int], ...]:
        """The same of ``near``."""
        return tuple(Counter(self.near).items())

    @property
    def is_free(self) -> bool:
        """Whether it takes no time whatever the layout, as fusion does it on the way."""
        costs = (self.flops, self.far, self.near, self.summed, self.whole, self.moves)
        return not any(costs)


@dataclass(frozen=True, eq=False)
class Compact:
    """Units, pieces and work of a graph, for a platform.

    ``clashes`` are pairs of units that meet in one array or one operation and so cannot share an
    axis; a pair of a unit with itself can never be split. ``piece_of`` has the piece of each tensor
    and ``work_of`` the work of each operation; ``gathered`` that of a parameter's piece as a device
    reads it that keeps but a part.
    """

    graph: Graph
    units: tuple[Unit, ...]
    unit_of: tuple[int, ...]
    batch: int | None
    pieces: tuple[Piece, ...]
    works: tuple[Work, ...]
    counts: tuple[int, ...]  # of works
    paths: tuple[str, ...]  # of works, the first of each
    parameters: tuple[tuple[int, int], ...]  # (piece, how many)
    clashes: frozenset[tuple[int, int]]
    platform: str
    kind: str  # of the devices, where that matters
    piece_of: tuple[int, ...]
    work_of: tuple[int, ...]
    gathered: dict[int, int]
    halves: dict[int, int]

    @functools.cached_property
    def is_spared_by_remat(self) -> bool:
        """Whether some work is not done with remat, so that this may save time as well."""
        return any(0 in work.runs for work in self.works)

    @functools.cached_property
    def has_state(self) -> bool:
        """Whether a batch may change what the next one reads."""
        return any(piece.kind == "state" for piece in self.pieces)

    @functools.cached_property
    def loss_bytes(self) -> int:
        """Bytes of all that the forward pass computes, were all of it kept."""
        is_forward, graph = facts_of(self.graph).is_forward, self.graph
        forward = (op for op, before in zip(graph.operations, is_forward, strict=True) if before)
        return sum(graph.tensors[t].nbytes for op in forward for t in op.results)

    @functools.cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(count * self.pieces[place].nbytes for place, count in self.parameters)

    @functools.cached_property
    def laid_out(self) -> frozenset[int]:
        """The units that parameters, state or inputs have. No layout says how the others lie, which
        activations alone have, so a plan cannot split them."""
        scopes = (piece.scope for piece in self.pieces if piece.kind in _LAID_OUT)
        return frozenset[int]().union(*scopes)


@functools.lru_cache(maxsize=8)
def compact(graph: Graph, platform: str = "", kind: str = "") -> Compact:
    """Make a graph small, once for all meshes of a platform and a kind of device."""
    facts = facts_of(graph)
    units, unit_of = _units(graph)
    sent = _sent(graph, facts, platform)
    pieces, piece_of = _pieces(graph, facts, unit_of, sent)
    runs = [*zip(*(times_done(graph, how) for how in EVERY_REMAT), strict=True)]
    traffic = traffic_of(graph, platform, kind)
    reader = _Reader(graph, facts, unit_of, pieces, piece_of, runs, traffic, platform == "cpu")
    all_work = [reader.work(place, op) for place, op in enumerate(graph.operations)]
    works = tuple(dict.fromkeys(all_work))
    place_of = {work: place for place, work in enumerate(works)}
    work_of = [place_of[work] for work in all_work]
    counted = Counter(work_of)
    first = {work: place for place, work in reversed(list(enumerate(work_of)))}
    parameters = Counter(piece_of[t] for t, kind in enumerate(facts.kinds) if kind == "parameter")
    gathered = _gathered(pieces) if platform == "cpu" else {}
    halves = _halves(pieces) if platform == "tpu" else {}
    return Compact(
        graph=graph,
        units=units,
        unit_of=unit_of,
        batch=None if facts.batch is None else unit_of[facts.batch],
        pieces=(*pieces, *(piece for piece, _ in (*gathered.values(), *halves.values()))),
        works=works,
        counts=tuple(counted[place] for place in range(len(works))),
        paths=tuple(graph.operations[first[place]].path for place in range(len(works))),
        parameters=tuple(parameters.items()),
        clashes=_clashes(pieces, works),
        platform=platform,
        kind=kind,
        piece_of=tuple(piece_of),
        work_of=tuple(work_of),
        gathered={place: where for place, (_, where) in gathered.items()},
        halves={place: where for place, (_, where) in halves.items()},
    )


def _halves(pieces: tuple[Piece, ...]) -> dict[int, tuple[Piece, int]]:
    """Of each piece that may be kept in half the bytes, that and its place after the others."""
    activations = [place for place, piece in enumerate(pieces) if piece.kind == "activation"]
    return {
        place: (replace(pieces[place], nbytes=pieces[place].nbytes // 2), len(pieces) + more)
        for more, place in enumerate(activations)
    }


def _gathered(pieces: tuple[Piece, ...]) -> dict[int, tuple[Piece, int]]:
    """Of each piece of a parameter, the same as gathered, and its place after the others."""
    parameters = [place for place, piece in enumerate(pieces) if piece.kind == "parameter"]
    return {
        place: (replace(pieces[place], kind="gathered"), len(pieces) + more)
        for more, place in enumerate(parameters)
    }


def _units(graph: Graph) -> tuple[tuple[Unit, ...], tuple[int, ...]]:
    sizes: dict[str, set[int]] = {}
    for dim in graph.dims:
        sizes.setdefault(dim.family, set()).add(dim.size)
    named = [
        Unit(dim.family if len(sizes[dim.family]) == 1 else f"{dim.family}[{dim.size}]", dim.size)
        for dim in graph.dims
    ]
    units = tuple(dict.fromkeys(named))
    places = {unit: place for place, unit in enumerate(units)}
    return units, tuple(places[unit] for unit in named)


def _pieces(
    graph: Graph, facts: Facts, unit_of: tuple[int, ...], sent: Mapping[int, int]
) -> tuple[tuple[Piece, ...], list[int]]:
    all_pieces = [
        Piece(
            tuple(None if dim is None else unit_of[dim] for dim in tensor.dims),
            tensor.shape,
            tensor.nbytes,
            facts.kinds[place],
            sent.get(place, 0),
        )
        for place, tensor in enumerate(graph.tensors)
    ]
    pieces = tuple(dict.fromkeys(all_pieces))
    places = {piece: place for place, piece in enumerate(pieces)}
    return pieces, [places[piece] for piece in all_pieces]


def _sent(graph: Graph, facts: Facts, platform: str) -> dict[int, int]:
    """Bytes of each parameter as the forward pass takes it, whole or layer by layer."""
    taken: dict[int, int] = {}  # the bytes of a number, at most
    parameter = {t: t for t, kind in enumerate(facts.kinds) if kind == "parameter"}
    for operation, is_forward in zip(graph.operations, facts.is_forward, strict=True):
        for t in parameter.keys() & set(operation.operands) if is_forward else ():
            if is_layer(graph, operation) or operation.kind in ("transpose", "squeeze"):
                parameter |= dict.fromkeys(operation.results, parameter[t])
            else:
                itemsize = _sent_itemsize(graph, operation, t, platform)
                taken[parameter[t]] = max(taken.get(parameter[t], 0), itemsize)
    tensors = {t: graph.tensors[t] for t in set(parameter.values())}
    return {
        t: tensor.nbytes * min(taken.get(t, tensor.itemsize), tensor.itemsize) // tensor.itemsize
        for t, tensor in tensors.items()
    }


def _sent_itemsize(graph: Graph, operation: Operation, operand: int, platform: str) -> int:
    """Bytes of a number of a parameter that is gathered for this operation.

    A conversion comes before it is sent; not on CPUs, which have no arithmetic in bfloat16 and
    convert back. TPUs multiply float32 as bfloat16, unless a higher precision is asked for.
    """
    itemsize = graph.tensors[operand].itemsize
    if operation.kind == "convert_element_type" and platform != "cpu":
        return graph.tensors[operation.results[0]].itemsize
    if platform == "tpu" and operation.kind in ("dot_general", "conv_general_dilated"):
        return min(itemsize, 2)
    return itemsize


@dataclass(frozen=True)
class _Reader:
    """Reads operations as work."""

    graph: Graph
    facts: Facts
    unit_of: tuple[int, ...]
    pieces: tuple[Piece, ...]
    piece_of: list[int]
    runs: Sequence[tuple[int, ...]]
    traffic: Sequence[Traffic]
    on_cpu: bool

    def work(self, place: int, operation: Operation) -> Work:
        fused, piece_of = self.facts.is_fused, self.piece_of
        moved = {joint.tensor: joint for joint in operation.joints}
        whole = self._units(operation.whole)
        summed = self._units(operation.summed)
        sizes = [self.graph.tensors[t].itemsize for t in operation.operands]
        by_number = operation.kind == "slice" and is_layer(self.graph, operation)
        read = operation.results if by_number else operation.operands
        reads = {piece_of[t] for t in read if not fused[t]}
        operands = {piece_of[t] for t in operation.operands}
        far, near = self.traffic[place]
        simple = not (operation.flops or summed or whole or moved)
        kind = "scan" if by_number else operation.kind
        return Work(
            kind="elementwise" if simple and kind != "scan" else kind,
            flops=operation.flops + (operation.between_groups if self.on_cpu else 0.0),
            dtype="" if simple else _DTYPES.get(max(sizes, default=4), "float32"),
            operands=tuple(sorted(reads if simple else operands)),
            results=tuple(piece_of[t] for t in operation.results),
            far=tuple(sorted(piece_of[t] for t in far)),
            near=tuple(sorted(piece_of[t] for t in near)),
            writes=tuple(piece_of[t] for t in operation.results if not fused[t]),
            units=(self._joint_clashes(operation, moved) | summed) - whole,
            summed=summed - whole,
            whole=whole,
            moves=tuple(
                Move(piece_of[j.tensor], self.unit_of[j.source], self.unit_of[j.target])
                for j in operation.joints
            ),
            times=operation.times,
            runs=self.runs[place],
            product=self._product(operation.product) if self.on_cpu else None,
            rate=operation.rate,
        )

    def _product(self, product: Product | None) -> Product | None:
        if product is None:
            return None
        rows, columns, depth = (
            tuple((None if dim is None else self.unit_of[dim], size) for dim, size in dims)
            for dims in (product.rows, product.columns, product.depth)
        )
        return Product(rows, columns, depth, product.is_transposed)

    def _joint_clashes(self, operation: Operation, moved: Mapping[int, Joint]) -> frozenset[int]:
        """The units of its arrays, after those that are moved have been."""
        result: set[int] = set()
        for tensor in (*operation.operands, *operation.results):
            scope = self.pieces[self.piece_of[tensor]].scope
            if tensor in moved:
                joint = moved[tensor]
                scope = scope - {self.unit_of[joint.source]} | {self.unit_of[joint.target]}
            result |= scope
        return frozenset(result)

    def _units(self, dims: Iterable[int]) -> frozenset[int]:
        return frozenset(self.unit_of[dim] for dim in dims)


def _clashes(pieces: Iterable[Piece], works: Iterable[Work]) -> frozenset[tuple[int, int]]:
    result: set[tuple[int, int]] = set()
    for piece in pieces:
        units = [unit for unit in piece.units if unit is not None]
        result |= {(u, u) for u in units if units.count(u) > 1}
        result |= {(u, v) for u in units for v in units if u != v}
    for work in works:
        result |= {(u, v) for u in work.units for v in work.units if u != v}
    return frozenset(result)
