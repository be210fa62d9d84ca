"""The collectives of a compiled step: what each moves, over which axes, how often."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .groups import Axes, Groups, axes_of, groups_between_slices, parse_groups
from .loops import trip_count
from .origins import Sources, op_name_of, origins_of
from .text import Array, Computation, Instruction, Module, parse

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# How XLA's runtime calls what TPU slices tell each other through their hosts.
_BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled step.

    ``arrays`` are the values that it makes whole, or begins with whole: what is reduced, gathered
    or exchanged; XLA merges several into one operation. ``groups`` are positions in the mesh,
    ``axes`` those of our mesh along which a group lies. ``count`` says how often one step runs it,
    ``None`` where a loop does not tell. ``path`` is the name scope that it stems from, of one of
    its arrays; ``op_names`` has one per array. ``position`` is its place in the schedule of the
    step (that of the outermost loop which holds it), ``until`` the place where its result is read
    for the last time.

    ``arguments`` says of each array which argument of the step it is a copy of, counted from 0, or
    ``None``; ``result`` which result of the step it makes as it is. ``gathered_dim`` is the dim
    along which an all-gather puts pieces together. ``near`` is the argument, or the ``op_name``
    within a layer, nearest to one that has neither itself.
    """

    kind: str
    arrays: tuple[Array, ...]
    groups: Groups
    axes: tuple[str, ...]
    count: int | None
    path: str
    position: int
    until: int
    op_names: tuple[str, ...] = ()
    arguments: tuple[int | None, ...] = ()
    result: int | None = None
    gathered_dim: int | None = None
    near: tuple[int | None, str] = (None, "")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The element types that it moves, each once."""
        return tuple(dict.fromkeys(array.dtype for array in self.arrays))

    @property
    def elements(self) -> int:
        """Elements of all its arrays."""
        return sum(array.elements for array in self.arrays)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all its arrays in one device; each time that it runs."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def group_size(self) -> int:
        """How many devices talk to each other."""
        return max(map(len, self.groups))

    @property
    def reduces(self) -> bool:
        """Whether it adds numbers up, so that its element type decides how exactly."""
        return self.kind in ("all-reduce", "reduce-scatter")


@dataclass(frozen=True)
class Sighting:
    """A collective instruction and where the walk met it."""

    instruction: Instruction
    inside: Computation
    count: int | None
    position: int
    fusion: Instruction | None  # that it is part of
    is_outside_loops: bool

    @property
    def path(self) -> str:
        return op_name_of(self.instruction) or (op_name_of(self.fusion) if self.fusion else "")


def read_collectives(text: str, axes: Axes) -> tuple[Collective, ...]:
    """The collectives of optimized HLO for a mesh with these axes, in the order of the schedule.

    A start and its end count once. Between TPU slices a collective is a transfer to the host, which
    is sent and received. TPU programs repeat a collective in each fusion that it runs
    beside: those count once too. An all-reduce of which every device keeps a piece (TPU's
    ``all-reduce-scatter``) is a reduce-scatter.

    >>> text = '''
    ... ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %sum = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}
    ... }'''
    >>> [c] = read_collectives(text, (("batch", 2), ("model", 2)))
    >>> c.kind, c.axes, c.bytes_per_device, c.count
    ('all-reduce', ('model',), 16, 1)
    """
    module = parse(text)
    entry = module.computations[module.entry]
    repeated: dict[object, list[Sighting]] = {}
    for sighting in _walk(module, entry, 1):
        repeated.setdefault(identity_of(sighting), []).append(sighting)
    sources = Sources(module)
    return tuple(collective_of(sightings, entry, axes, sources) for sightings in repeated.values())


def most_bytes_at_once(collectives: Iterable[Collective]) -> int:
    """The most bytes that results of these collectives hold in one device at the same time.

    A result counts from where it is asked for to where it is read for the last time.
    """
    transfers = tuple(collectives)
    return max(
        (
            sum(c.bytes_per_device for c in transfers if c.position <= at <= c.until)
            for at in {c.position for c in transfers}
        ),
        default=0,
    )


def _walk(
    module: Module,
    inside: Computation,
    count: int | None,
    position: int | None = None,
    fusion: Instruction | None = None,
    is_outside_loops: bool = True,
) -> Iterator[Sighting]:
    for here, instruction in enumerate(inside.instructions):
        at = here if position is None else position
        if kind_of(instruction) is not None:
            yield Sighting(instruction, inside, count, at, fusion, is_outside_loops)
        elif not instruction.goes_on:
            times = count
            if instruction.opcode == "while" and times is not None:
                trips = trip_count(module, instruction, inside)
                times = None if trips is None else times * trips
            part_of = instruction if instruction.opcode == "fusion" else fusion
            outside = is_outside_loops and instruction.opcode != "while"
            for name in instruction.called:
                called = module.computations[name]
                yield from _walk(module, called, times, at, part_of, outside)


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction is or begins, if it is one."""
    if instruction.opcode == "send":
        transfer = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
        return _BETWEEN_SLICES.get(transfer or "")
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def identity_of(sighting: Sighting) -> object:
    """Equal for the repetitions of one collective, of which shard_map's share a channel."""
    instruction = sighting.instruction
    channel = instruction.attribute(r"channel_id=(\d+)")
    if sighting.fusion is None or channel is None or _keeps_a_piece(sighting):
        return object()
    chain = instruction.attribute(r'chain_id="(\w+)"') or sighting.path
    return instruction.opcode, channel, chain, instruction.results


def collective_of(
    repeated: list[Sighting], entry: Computation, axes: Axes, sources: Sources
) -> Collective:
    first = repeated[0]
    instruction = first.instruction
    kind = kind_of(instruction) or instruction.opcode
    groups = _groups(instruction, axes)
    is_send = instruction.opcode == "send"
    operands = instruction.operands[:1] if is_send else instruction.operands  # not its token
    joined = [piece for name in operands for piece in sources.joined(first.inside, name)]
    results = [(name, array) for name in joined for array in _results(first.inside, name)]
    arrays = tuple(array for _, array in results)
    origins = [sources.of(first.inside, name) for name, _ in results]
    # What is merged has one name for all of it, and what XLA adds itself has none.
    names = tuple((len(results) > 1 and name) or first.path or name for _, name in origins)
    result = sources.result(first.inside, instruction)
    is_known = result is not None or any(argument is not None for argument, _ in origins)
    is_known = is_known or any(origins_of(name)[0].path for name in names)
    dim = None
    if kind == "all-gather":
        dim = int(instruction.attribute(r"dimensions=\{(\d+)\}") or 0)
        arrays = tuple(_times(array, dim, max(map(len, groups))) for array in arrays)
    return Collective(
        kind="reduce-scatter" if _keeps_a_piece(first) else kind,
        arrays=arrays,
        groups=groups,
        axes=axes_of(groups, axes),
        count=first.count,
        path=first.path,
        position=first.position,
        until=entry.last_use(repeated[-1].position) if first.is_outside_loops else first.position,
        op_names=names,
        arguments=tuple(argument for argument, _ in origins),
        result=result,
        gathered_dim=dim,
        near=(None, "") if is_known else sources.near(first.inside, instruction),
    )


def _keeps_a_piece(sighting: Sighting) -> bool:
    reduces = sighting.instruction.opcode.startswith("all-reduce")
    return reduces and sighting.inside.name.startswith("all-reduce-scatter")


def _times(array: Array, dim: int, pieces: int) -> Array:
    dims = tuple(size * (pieces if i == dim else 1) for i, size in enumerate(array.dims))
    return replace(array, dims=dims)


def _results(inside: Computation, name: str) -> tuple[Array, ...]:
    return inside.by_name[name].results


def _groups(instruction: Instruction, axes: Axes) -> Groups:
    if instruction.opcode == "send":
        slices = instruction.attribute(r"_xla_megascale_target=(.*)") or ""
        return groups_between_slices(slices, axes)
    pairs = instruction.attribute(r"source_target_pairs=(\{(?:\{[\d,\s]*\},?\s*)*\})")
    text = pairs or instruction.attribute(r"replica_groups=(.*)") or "{}"
    return parse_groups(text, math.prod(size for _, size in axes))
