"""How the weights of stages that differ are stored: flat, one row per stage, split over the stages.

A :class:`jax.sharding.NamedSharding` cannot say "this array, on those devices only". So the arrays
of a stage are one flat row, as long as the longest, and the rows are split over the stages. Arrays
that several stages read are left as they are. Outside of a step every variable has its own path and
its own dims again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import PipelineError
from ..layouts.layout import UNSHARDED, Layout
from ..layouts.params import ParamInfo, Placed
from ..layouts.placement import Placement
from ..program import Arrays, Program, TrainState, shapes_of
from .by_stage import ByStage, Piece, from_row, packed_row
from .stacking import Stacking, asking, by_part, infos_of_step

_WEIGHTS = "weights"
_ALIGNED = 128  # elements that the length of a row is a multiple of


@dataclass(frozen=True)
class Pack:
    """Arrays of one kind and type, of all stages; ``info`` describes the packed array."""

    info: ParamInfo
    pieces: tuple[Piece, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """Paths of what is packed."""
        return tuple(piece.path for piece in self.pieces)

    def bytes_by_stage(self, stages: int) -> list[int]:
        """Bytes that each stage uses of its row."""
        sizes = [0] * stages
        for piece in self.pieces:
            sizes[piece.stage] += piece.size * self.info.itemsize
        return sizes


@dataclass(frozen=True, eq=False)
class Packing(Stacking):
    """The packed parameters and slots of a program, and its other variables."""

    packs: TrainState  # packs by path, of parameters and slots
    stages: int
    axis: str
    mesh: Any
    owner: Mapping[str, int]  # parameters to stages

    @classmethod
    def by_owner(
        cls, program: Program, placement: Placement, axis: str, owner: Mapping[str, int]
    ) -> Packing:
        """Of parameters, by the stage that each belongs to.

        Raises :class:`PipelineError` for those that a rule splits.
        """
        stages = placement.mesh[axis]
        layouts = by_part(program.parts, placement.with_zero(0))
        _check_whole(owner, layouts.params)
        packs = TrainState({}, {}, {}, {})
        groups = _grouped(program, owner)
        length = max((_longest(of, stages) for of in groups.values()), default=0)
        for (kind, dtype), of in groups.items():
            first = next(iter(packs.params), None)
            into = packs.params if kind == _WEIGHTS else packs.slots
            pack = _pack(of, f"{kind} {dtype} by {axis}", (stages, length), first)
            info = asking(pack.info, Layout([axis, UNSHARDED], placement.mesh))
            into[info.path] = replace(pack, info=info)
        slots = {info.path for info in program.slots if info.owner in owner}
        infos = infos_of_step(
            program,
            axis,
            layouts,
            (owner, [pack.info for pack in packs.params.values()]),
            (slots, [pack.info for pack in packs.slots.values()]),
        )
        stored, rest = by_part(infos, placement), by_part(program.parts, placement)
        mesh = placement.mesh.jax_mesh
        return cls((), (), infos, stored, rest, packs, stages, axis, mesh, owner)

    def __bool__(self) -> bool:
        return True

    def bytes_by_stage(self, stages: int) -> list[int]:
        """Bytes of weights and slots that each stage has of its own, over all its devices."""
        packs = [pack.bytes_by_stage(stages) for part in self.packs for pack in part.values()]
        return [sum(sizes[stage] for sizes in packs) for stage in range(stages)]

    def explained(self, placed: Sequence[Placed]) -> list[Placed]:
        """Placed variables of a step with the reasons that a reader knows."""
        packs = {p.info: p for part in self.packs for p in part.values()}
        result = []
        for entry in placed:
            why = entry.reason
            if (pack := packs.get(entry.info)) is not None:
                bytes_text = ", ".join(f"{size:,}" for size in pack.bytes_by_stage(self.stages))
                why = f"{len(pack.pieces)} arrays; bytes used in each row: {bytes_text}"
            elif entry.info.asked is not None:
                why = "in no row"
            result.append(entry._replace(reason=why))
        return result

    def stack(self, state: TrainState) -> TrainState:
        """The state with packs in place of their members; a pack whose members lack is left."""
        return TrainState(*map(self._packed, state, self.packs))

    def unstack(self, state: TrainState) -> TrainState:
        """The state with members in place of their packs."""
        return TrainState(*map(self._unpacked, state, self.packs))

    def _packed(self, values: Arrays, packs: Mapping[str, Pack]) -> Arrays:
        values = dict(values)
        for path, pack in packs.items():
            if all(member in values for member in pack.members):
                own = {member: values.pop(member) for member in pack.members}
                length, dtype = pack.info.dims[1], jnp.dtype(pack.info.dtype)
                values[path] = jnp.stack(
                    [
                        packed_row([p for p in pack.pieces if p.stage == s], own, length, dtype)
                        for s in range(self.stages)
                    ]
                )
        return values

    def _unpacked(self, values: Arrays, packs: Mapping[str, Pack]) -> Arrays:
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        values = dict(values)
        for path, pack in packs.items():
            if path in values:
                # Gathered once: XLA would move all rows again for each piece of them.
                rows = jax.lax.with_sharding_constraint(values.pop(path), whole)
                for piece in pack.pieces:
                    values |= from_row([piece], rows[piece.stage])
        return values

    def update(self, program: Program) -> Callable[..., tuple[Arrays, Arrays]]:
        """The optimizer's step, by each stage for its own arrays; where all arrays are shared, by
        all stages alike."""
        if not self.packs.params:
            return program.update
        of_params, of_slots = (
            {path: pack.pieces for path, pack in packs.items()}
            for packs in (self.packs.params, self.packs.slots)
        )
        shapes = tuple(map(shapes_of, (program.params, program.params, program.update_slots)))
        inputs, outputs = (of_params, of_params, of_slots), (of_params, of_slots)
        by_stage = ByStage(
            program.update, shapes, inputs, outputs, self.stages, self.axis, self.mesh
        )

        def update(params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
            new, new_slots = by_stage(params, grads, slots)
            return new, new_slots

        return update


def _check_whole(owner: Mapping[str, int], layouts: Mapping[str, Layout]) -> None:
    split = [path for path in owner if layouts[path].axes]
    if split:
        raise PipelineError(
            "stages that differ hold their weights as flat rows, which no layout splits; "
            f"{split[0]} is laid out as {layouts[split[0]].unbound()}. Leave it whole, or build "
            "the model of equal blocks."
        )


def _grouped(
    program: Program, owner: Mapping[str, int]
) -> dict[tuple[str, str], list[tuple[ParamInfo, int]]]:
    """What stages hold, with the stage of each array, by kind and type: weights, first slots..."""
    groups: dict[tuple[str, str], list[tuple[ParamInfo, int]]] = {}
    for info in program.params:
        if info.path in owner:
            groups.setdefault((_WEIGHTS, info.dtype), []).append((info, owner[info.path]))
    slots = Counter[str]()
    for info in program.slots:
        if info.owner is not None and info.owner in owner:
            kind = f"slot {slots[info.owner]}"
            slots[info.owner] += 1
            groups.setdefault((kind, info.dtype), []).append((info, owner[info.owner]))
    return groups


def _pack(
    of: Sequence[tuple[ParamInfo, int]], path: str, dims: tuple[int, int], owner: str | None
) -> Pack:
    """Of arrays with their stages; slots lie as the pack that owns them."""
    ends, pieces = [0] * dims[0], list[Piece]()
    for info, stage in of:
        piece = Piece(info.path, stage, ends[stage], info.dims)
        ends[stage] += piece.size
        pieces.append(piece)
    owner = None if of[0][0].role == "parameter" else owner
    return Pack(replace(of[0][0], path=path, dims=dims, owner=owner, lasting=None), tuple(pieces))


def _longest(of: Sequence[tuple[ParamInfo, int]], stages: int) -> int:
    """Elements of the longest row, rounded up."""
    sizes = [0] * stages
    for info, stage in of:
        sizes[stage] += math.prod(info.dims)
    return -(-max(sizes) // _ALIGNED) * _ALIGNED
