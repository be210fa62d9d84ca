"""What a compiled step computes and moves, instruction by instruction, from its optimized HLO.

The compiler's own ``cost_analysis()`` will not do: it counts the body of a loop once, and is empty
for some targets. FLOPs are those of products and convolutions, as is usual for "model FLOPs".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..jaxprs.lines import without_number
from ..jaxprs.scopes import PHASES, layer_of, phase_of
from .arithmetic import FREE, bytes_moved, work_of
from .collectives import Collective, Sighting, collective_of, identity_of, kind_of
from .groups import Axes
from .loops import trip_count
from .origins import Sources, op_name_of
from .text import Computation, Instruction, Module, parse


@dataclass(frozen=True)
class Operation:
    """One instruction of a compiled step, in one device, each time that it runs.

    ``dtype`` and ``precision`` are those of what its products take, and ``kind`` is theirs.
    ``elements`` counts results of elementwise work and what reductions take, ``transcendentals``
    those of them that are exponentials and the like. ``count`` says how often one step runs it,
    ``None`` where a loop does not tell. ``collectives`` begin with it. ``ends`` names the
    instruction that began what this one waits for. ``again`` is what the compiler itself runs a
    second time, to hold less. ``is_chosen`` is what stands in a branch of a conditional, and
    ``share`` the part of its runs in which a device takes that branch, where it is known.
    """

    name: str
    opcode: str
    path: str
    flops: float = 0.0
    dtype: str = ""
    precision: str = ""
    kind: str = "product"
    elements: int = 0
    transcendentals: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    count: int | None = 1
    collectives: tuple[Collective, ...] = ()
    ends: str = ""
    again: bool = False
    is_chosen: bool = False
    share: float = 1.0

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def times(self) -> float:
        """How often it counts: once, where it is unknown."""
        return self.share * (1 if self.count is None else self.count)

    @property
    def layer(self) -> str:
        return layer_of(self.path)

    @property
    def phase(self) -> str:
        return phase_of(self.path)


@dataclass(frozen=True)
class Loop:
    """A loop of a compiled step: what one run of its body does, in the order of the schedule.

    ``path`` is that of its instruction. ``is_chosen`` and ``share`` are as those of an operation;
    a share of the loop itself is that of the branches in its body.
    """

    name: str
    trips: int | None
    body: tuple[Operation | Loop, ...]
    path: str = ""
    is_chosen: bool = False
    share: float = 1.0

    def taking(self, share: float) -> Loop:
        """The loop with a share of what its body has in branches."""
        return replace(self, share=share, body=tuple(_shared(self.body, share)))


@dataclass(frozen=True)
class LayerCost:
    """What the instructions of one layer compute and move in one device in one step."""

    layer: str
    forward_flops: float
    backward_flops: float
    recompute_flops: float
    other_flops: float
    bytes: int

    @property
    def flops(self) -> float:
        return self.forward_flops + self.backward_flops + self.recompute_flops + self.other_flops


@dataclass(frozen=True)
class Costs:
    """The work of a compiled step in one device.

    ``program`` is its schedule. ``unknown_loops`` are counted once, since nothing says how often
    they run; ``uncounted`` are kernels written by hand of whose work nothing is known.
    """

    program: tuple[Operation | Loop, ...]
    unknown_loops: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @functools.cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Every instruction that does something, those of a loop once with their count."""
        return tuple(_flat(self.program))

    @property
    def flops(self) -> float:
        """FLOPs of one step in one device."""
        return sum(operation.times * operation.flops for operation in self.operations)

    @property
    def done_flops(self) -> float:
        """The same without what the compiler itself runs a second time, to hold less."""
        return sum(
            operation.times * operation.flops
            for operation in self.operations
            if not operation.again
        )

    @property
    def recompute_flops(self) -> float:
        """Those of them that the backward pass computes a second time."""
        return sum(e.times * e.flops for e in self.operations if e.phase == "recompute")

    @property
    def bytes(self) -> int:
        """Bytes that one step reads and writes in the memory of one device."""
        return round(sum(operation.times * operation.bytes for operation in self.operations))

    @functools.cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """The work of each layer, the heaviest first."""
        result: dict[str, dict[str, float]] = {}
        for operation in self.operations:
            layer = result.setdefault(operation.layer, dict.fromkeys((*PHASES, "bytes"), 0))
            layer[operation.phase] += operation.times * operation.flops
            layer["bytes"] += operation.times * operation.bytes
        rows = [
            LayerCost(layer, *(row[phase] for phase in PHASES), bytes=int(row["bytes"]))
            for layer, row in result.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.flops, -row.bytes, row.layer)))

    def replicated_share(self, model_flops: float, num_devices: int) -> float:
        """The share of all devices' FLOPs that one device, with all of the step, would not do.

        What the compiler runs again to hold less does not count. ``model_flops`` are those of the
        step before it was split: ``step.flops.model_flops`` of its trace. Zero where nothing is
        done twice; 1 - 1/n where n devices all do the same.

        >>> Costs((Operation("dot", "dot", "", flops=100.0),)).replicated_share(400.0, 8)
        0.5
        """
        flops = self.done_flops
        return max(0.0, 1.0 - model_flops / (num_devices * flops)) if flops else 0.0


@functools.lru_cache(maxsize=16)
def read_costs(text: str, axes: Axes = ()) -> Costs:
    """The work of optimized HLO for a mesh with these axes, loops multiplied out.

    Raises :class:`ValueError` for text that is not HLO.

    >>> costs = read_costs('''
    ... ENTRY %main (x: f32[8,4], w: f32[4,2]) -> f32[8,2] {
    ...   %x = f32[8,4]{1,0} parameter(0)
    ...   %w = f32[4,2]{1,0} parameter(1)
    ...   ROOT %dot = f32[8,2]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''')
    >>> costs.flops, costs.bytes
    (128.0, 224)
    """
    walk = _Walk(parse(text), axes)
    program = walk.program(walk.module.computations[walk.module.entry], 1)
    return Costs(program, tuple(walk.unknown_loops), tuple(dict.fromkeys(walk.uncounted)))


def _flat(program: Iterable[Operation | Loop]) -> Iterator[Operation]:
    for item in program:
        if isinstance(item, Loop):
            yield from _flat(item.body)
        else:
            yield item


class _Walk:
    """Goes through a program once."""

    def __init__(self, module: Module, axes: Axes) -> None:
        self.module = module
        self.axes = axes
        self.sources = Sources(module)
        self.base_names: set[str] = set()  # names, without what marks a copy of the compiler's own
        self.begun: dict[object, str] = {}  # a collective -> the operation that began it
        self.unknown_loops: list[str] = []
        self.uncounted: list[str] = []

    def program(self, inside: Computation, count: int | None) -> tuple[Operation | Loop, ...]:
        result: list[Operation | Loop] = []
        for instruction in inside.instructions:
            if instruction.opcode == "while":
                result.append(self._loop(instruction, inside, count))
            elif instruction.opcode == "conditional":
                branches = [self._called(name, count) for name in instruction.called]
                branch = max(branches, key=_weight, default=())
                result += (replace(item, is_chosen=True) for item in branch)
            elif instruction.opcode == "call":
                name = instruction.attribute(r"to_apply=%([\w.\-]+)") or instruction.called[0]
                result += self._called(name, count)
            elif instruction.opcode not in FREE:
                result.append(self._operation(instruction, inside, count))
        return _ending_last(result)

    def _called(self, name: str, count: int | None) -> tuple[Operation | Loop, ...]:
        return self.program(self.module.computations[name], count)

    def _loop(self, instruction: Instruction, inside: Computation, count: int | None) -> Loop:
        trips = trip_count(self.module, instruction, inside)
        if trips is None:
            self.unknown_loops.append(without_number(op_name_of(instruction)) or instruction.name)
        times = None if trips is None or count is None else count * trips
        body = instruction.attribute(r"body=%([\w.\-]+)") or ""
        path = op_name_of(instruction)
        return Loop(instruction.name, trips, self._called(body, times), path)

    def _operation(
        self, instruction: Instruction, inside: Computation, count: int | None
    ) -> Operation:
        path = op_name_of(instruction) or self.sources.of(inside, instruction.name)[1]
        bare = Operation(
            instruction.name,
            instruction.opcode,
            path,
            count=count,
            again=self._is_again(instruction.name),
        )
        if instruction.goes_on:
            return replace(bare, ends=instruction.operands[0])
        begins, ends = self._collectives(instruction, inside, count)
        if kind_of(instruction) is not None:
            return replace(bare, collectives=begins)
        work = work_of(instruction, inside, self.module)
        self.uncounted += work.uncounted
        read, written = bytes_moved(instruction, inside, self.module)
        return replace(
            bare,
            path=(op_name_of(work.heaviest) if work.heaviest else "") or bare.path,
            flops=work.flops,
            dtype=work.dtype,
            precision=_precision(work.heaviest),
            kind=work.kind,
            elements=work.elements,
            transcendentals=work.transcendentals,
            bytes_read=read,
            bytes_written=written,
            collectives=begins,
            ends=ends,
        )

    def _is_again(self, name: str) -> bool:
        """XLA names the copies of ``dot.8`` that it runs instead of keeping its result
        ``dot.8.remat``, ``dot.8.remat2``, of which the first may be all that is left of it."""
        base = re.sub(r"\.remat\d*(?=\.|$)", "", name)
        is_again = base != name and base in self.base_names
        self.base_names.add(base)
        return is_again

    def _collectives(
        self, instruction: Instruction, inside: Computation, count: int | None
    ) -> tuple[tuple[Collective, ...], str]:
        """What an instruction begins, and the name of what a fusion of a TPU goes on with."""
        begins, ends = [], ""
        for sighting in self._sightings(instruction, inside, count, None):
            identity = identity_of(sighting)
            if identity in self.begun:
                ends = self.begun[identity]
            else:
                self.begun[identity] = instruction.name
                begins.append(collective_of([sighting], inside, self.axes, self.sources))
        return tuple(begins), ends

    def _sightings(
        self,
        instruction: Instruction,
        inside: Computation,
        count: int | None,
        fusion: Instruction | None,
    ) -> Iterator[Sighting]:
        if kind_of(instruction) is not None:
            yield Sighting(instruction, inside, count, 0, fusion, is_outside_loops=False)
        elif instruction.opcode == "fusion" or instruction.opcode.endswith("-start"):
            for name in instruction.called:
                fused = self.module.computations[name]
                for part in fused.instructions:
                    yield from self._sightings(part, fused, count, fusion or instruction)


def _shared(
    program: Iterable[Operation | Loop], share: float, is_inside: bool = False
) -> Iterator[Operation | Loop]:
    """A body with a share of all that is in its branches."""
    for item in program:
        is_chosen = is_inside or item.is_chosen
        if isinstance(item, Loop):
            yield replace(item, body=tuple(_shared(item.body, share, is_chosen)))
        else:
            yield replace(item, share=share) if is_chosen else item


def _ending_last(result: list[Operation | Loop]) -> tuple[Operation | Loop, ...]:
    """Of the fusions that a collective runs beside, only the last waits for it."""
    last: dict[str, int] = {}
    for place, array in enumerate(result):
        if isinstance(array, Operation) and array.ends:
            last[array.ends] = place
    return tuple(
        replace(array, ends="")
        if isinstance(array, Operation) and array.ends and last[array.ends] != place
        else array
        for place, array in enumerate(result)
    )


def _weight(program: tuple[Operation | Loop, ...]) -> tuple[float, int]:
    return Costs(program).flops, Costs(program).bytes


def _precision(product: Instruction | None) -> str:
    """The highest precision that a product's operands are asked for; empty for the default."""
    spelled = r'operand_precision"?[=:][{\[]([^}\]]*)'  # the second way in calls of cuBLAS
    precisions = ((product.attribute(spelled) if product else None) or "").lower().replace('"', "")
    return next((word for word in ("highest", "high") if word in precisions.split(",")), "")
