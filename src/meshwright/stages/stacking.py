"""How the weights of equal blocks are stored: stacked, so that each stage holds those of its own.

A :class:`jax.sharding.NamedSharding` cannot say "this array, on those devices only", but it can
split a dim. So the same weight of every block is one array with a dim of blocks in front, which is
split over the stages; slots likewise. Whatever else the model has is shared out over the stages
where it divides. Outside of a step every variable has its own path and its own dims again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..errors import PipelineError
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.params import ParamInfo, Placed
from ..layouts.placement import Placement
from ..layouts.zero import share_out
from ..program import Arrays, Program, TrainState, shapes_of
from .alike import Families, Places, alike
from .deal import Deal
from .loops import entry_path


@dataclass(frozen=True)
class Stack:
    """One weight, or slot, of all blocks: its paths by place, ``None`` in those left empty.

    ``info`` describes the stacked array, which ``is_whole`` if the model has it stacked itself: the
    paths are then those of its entries.
    """

    info: ParamInfo
    places: Places
    is_whole: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        """The paths that are stacked, in the order of their places."""
        return tuple(path for path in self.places if path is not None)

    @property
    def stored_paths(self) -> tuple[str, ...]:
        """The paths of the program's variables that it holds."""
        return (self.info.path,) if self.is_whole else self.members


@dataclass(frozen=True, eq=False)
class Stacking:
    """The stacked parameters and slots of a program, and its other variables.

    ``infos`` describes the variables of a step, stacks among them, by the fields of the state.
    ``stored`` are their layouts by path, ``rest`` those of variables outside of a step.
    """

    params: tuple[Stack, ...]
    slots: tuple[Stack, ...]
    infos: tuple[tuple[ParamInfo, ...], ...]
    stored: TrainState
    rest: TrainState

    @classmethod
    def of(
        cls,
        program: Program,
        placement: Placement,
        axis: str,
        rows: Sequence[tuple[str | None, ...]],
        deal: Deal,
        wholes: Mapping[str, str] = MappingProxyType({}),
    ) -> Stacking:
        """Of parameters, by block, ``None`` for one that is frozen, which stays where it is;
        ``wholes`` are the paths of stacked arrays by those of entries.

        Raises :class:`PipelineError` where equal weights would lie differently.
        """
        stacker = _Stacker.of(program, placement, axis, deal)
        params, slots = list[Stack](), list[Stack]()
        for row in rows:
            if (path := wholes.get(row[0] or "")) is not None:
                params.append(stacker.as_it_is("params", path))
                own_slots = (slot for (slot,) in _slots_of(program, [path]) if slot)
                slots += (stacker.as_it_is("slots", slot) for slot in own_slots)
            else:
                params.append(stacker.stacked("params", row, None))
                owner = params[-1].info.path
                own_slots = _slots_of(program, row)
                slots += (stacker.stacked("slots", paths, owner) for paths in own_slots)
        infos = infos_of_step(
            program,
            axis,
            stacker.layouts,
            ({path for stack in params for path in stack.stored_paths}, [s.info for s in params]),
            ({path for stack in slots for path in stack.stored_paths}, [s.info for s in slots]),
        )
        rest = by_part(program.parts, placement)
        return cls(tuple(params), tuple(slots), infos, by_part(infos, placement), rest)

    def bytes_by_stage(self, stages: int) -> list[int]:
        """Bytes of weights and slots that each stage has of its own, over all its devices."""
        sizes = [0] * stages
        for stack in (*self.params, *self.slots):
            of_one = stack.info.nbytes // len(stack.places)
            for number, path in enumerate(stack.places):
                sizes[number * stages // len(stack.places)] += of_one if path else 0
        return sizes

    def explained(self, placed: Sequence[Placed]) -> list[Placed]:
        """Placed variables of a step with the reasons that a reader knows."""
        stacks = {stack.info: stack for stack in (*self.params, *self.slots)}
        result = []
        for entry in placed:
            why = entry.reason
            if (stack := stacks.get(entry.info)) is not None:
                pieces, places = entry.layout.num_shards(0), len(stack.places)
                count = len(stack.members)
                room = f" in {places} places" if places > count else ""
                why = f"{count} blocks{room}, {places // pieces} on each of {pieces} stages"
            elif entry.info.asked is not None:
                why = "beside the blocks"
            result.append(entry._replace(reason=why))
        return result

    # The interface of Storing: what a step stores, and what there is outside of it

    @property
    def parts(self) -> tuple[dict[str, Any], ...]:
        """Every variable, by path in the fields of a state: a step stores them in its own form."""
        return tuple(self.rest)

    def __bool__(self) -> bool:
        return bool(self.params)

    def store(self, state: TrainState) -> TrainState:
        """The state as a step takes it; parts may lack some arrays."""
        return self._moved("stack", state, self.stored)

    def restore(self, state: TrainState) -> TrainState:
        """The state with every array under its own path, in its own dims."""
        return self._moved("unstack", state, self.rest)

    def _moved(
        self, how: Literal["stack", "unstack"], state: TrainState, layouts: TrainState
    ) -> TrainState:
        """A state that is moved by a function that is compiled once for the arrays that it has."""
        key = how, *map(frozenset, state)
        if key not in self._movers:
            function = getattr(self, how)
            lies = TrainState(
                *(
                    {path: of[path].sharding for path in part}
                    for part, of in zip(jax.eval_shape(function, state), layouts, strict=True)
                )
            )
            self._movers[key] = jax.jit(function, out_shardings=lies)
        return self._movers[key](state)

    @functools.cached_property
    def _movers(self) -> dict[Any, Any]:
        return {}

    # Within traced functions

    def stack(self, state: TrainState) -> TrainState:
        """The state with stacks in place of their members; a stack whose members lack is left."""
        return state._replace(
            params=_stacked(state.params, self.params), slots=_stacked(state.slots, self.slots)
        )

    def unstack(self, state: TrainState) -> TrainState:
        """The state with members in place of their stacks."""
        return state._replace(
            params=_unstacked(state.params, self.params), slots=_unstacked(state.slots, self.slots)
        )

    def update(self, program: Program) -> Callable[..., tuple[Arrays, Arrays]]:
        """The optimizer's step over stacked arrays: each equation once for all blocks."""
        params, slots = _made_here(self.params), _made_here(self.slots)
        if not params:
            return program.update
        families = Families(
            tuple(_named(name, stack) for name in ("params", "grads") for stack in params)
            + tuple(_named("slots", stack) for stack in slots)
        )
        of_params = {own_stack.info.path: own_stack.places for own_stack in params}
        of_slots = {own_stack.info.path: own_stack.places for own_stack in slots}

        def update(params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
            values = {"params": params, "grads": grads, "slots": slots}
            shapes = shapes_of(program.params)
            args = shapes, shapes, shapes_of(program.update_slots)
            run = alike(program.update, ("params", "grads", "slots"), args, families)
            new, new_slots = run(values, (of_params, of_params, of_slots), (of_params, of_slots))
            return new, new_slots

        return update


@dataclass(frozen=True)
class _Stacker:
    """What makes stacks of variables; ``layouts`` are those of whole variables, without ZeRO."""

    axis: str
    mesh: Mesh
    layouts: TrainState
    infos: TrainState
    deal: Deal

    @classmethod
    def of(cls, program: Program, placement: Placement, axis: str, deal: Deal) -> _Stacker:
        layouts = by_part(program.parts, placement.with_zero(0))
        infos = TrainState(*({info.path: info for info in part} for part in program.parts))
        return cls(axis, placement.mesh, layouts, infos, deal)

    def stacked(self, field: str, row: Sequence[str | None], owner: str | None) -> Stack:
        """A stack of one variable of each block."""
        layouts: dict[str, Layout] = getattr(self.layouts, field)
        paths = [path for path in row if path is not None]
        if len({layouts[path] for path in paths}) > 1:
            listed = "\n".join(f"  {path}: {layouts[path].unbound()}" for path in paths)
            raise PipelineError(
                f"equal blocks must have the same layouts to be stages of one pipeline:\n{listed}"
            )
        alone = layouts[paths[0]]
        _check_free(self.axis, paths[0], alone.axes)
        first: ParamInfo = getattr(self.infos, field)[paths[0]]
        places = tuple(None if block is None else row[block] for block in self.deal.places)
        info = replace(
            asking(first, Layout([self.axis, *alone.specs], self.mesh)),
            path=_joined(paths),
            dims=(len(places), *first.dims),
            owner=owner,
            lasting=None,
        )
        return Stack(info, places)

    def as_it_is(self, field: str, path: str) -> Stack:
        """A stack that the model has itself."""
        _, *others = getattr(self.layouts, field)[path].specs
        _check_free(self.axis, path, Layout(others).axes)
        layout = Layout([self.axis, *others], self.mesh)
        info = asking(getattr(self.infos, field)[path], layout)
        places = tuple(entry_path(path, number) for number in range(info.dims[0]))
        return Stack(info, places, is_whole=True)


def infos_of_step(
    program: Program,
    axis: str,
    layouts: TrainState,
    params: tuple[Collection[str], Iterable[ParamInfo]],
    slots: tuple[Collection[str], Iterable[ParamInfo]],
) -> tuple[tuple[ParamInfo, ...], ...]:
    """The variables of a step, by the fields of the state.

    ``params`` and ``slots`` are the paths of those that are stored otherwise, and what they are
    stored in; the others are shared out over the stages.
    """

    def of_field(field: str, infos: Sequence[ParamInfo]) -> tuple[ParamInfo, ...]:
        if field not in ("params", "slots"):
            return tuple(infos)
        stored_paths, stored = params if field == "params" else slots
        own_layouts = getattr(layouts, field)
        beside = (info for info in infos if info.path not in stored_paths)
        return *(spread_over(axis, info, own_layouts) for info in beside), *stored

    return tuple(map(of_field, TrainState._fields, program.parts))


def _made_here(stacks: Iterable[Stack]) -> list[Stack]:
    """Those that the model does not have itself."""
    return [stack for stack in stacks if not stack.is_whole]


def _check_free(axis: str, path: str, axes: Collection[str | None]) -> None:
    if axis in axes:
        raise PipelineError(
            f"{path} is laid out over axis {axis!r}, which the stages take. Leave that axis out of "
            "the layouts."
        )


def _named(name: str, stack: Stack) -> tuple[tuple[str, str] | None, ...]:
    return tuple(None if path is None else (name, path) for path in stack.places)


def spread_over(axis: str, info: ParamInfo, layouts: dict[str, Layout]) -> ParamInfo:
    """A variable outside of all stages, shared out over the stages where it divides."""
    layout = layouts[info.path]
    return asking(info, share_out(layout, info.dims, (axis,)) or layout)


def asking(info: ParamInfo, layout: Layout) -> ParamInfo:
    """The variable with a layout of its own, which no pattern changes."""
    return replace(info, spellings=(), asked=layout, names=None, follows=None)


def by_part(parts: Sequence[Sequence[ParamInfo]], placement: Placement) -> TrainState:
    """The layouts of variables by path, in the fields of a state."""
    placed = iter(placement.place([info for part in parts for info in part]))
    return TrainState(*({info.path: next(placed).layout for info in part} for part in parts))


def _slots_of(program: Program, row: Sequence[str | None]) -> list[tuple[str | None, ...]]:
    """Paths of the slots of these parameters: of each kind of slot a row, with ``None`` for those
    that have none, as frozen ones do.

    Raises :class:`PipelineError` for slots of other dims, which do not lie as their weights do.
    """
    dims = {info.path: info.dims for info in program.params}
    of: dict[str, list[str]] = {path: [] for path in row if path is not None}
    for info in program.slots:
        if info.owner in of:
            if info.dims != dims[info.owner]:
                raise PipelineError(
                    f"slot {info.path} {info.dims} has other dims than its weight {info.owner} "
                    f"{dims[info.owner]}, which is not supported in a pipeline. Use an optimizer "
                    "with slots like its weights, such as Adam."
                )
            of[info.owner].append(info.path)
    counts = {len(paths): owner for owner, paths in of.items() if paths}
    if len(counts) > 1:
        listed = " and ".join(f"{owner} has {count}" for count, owner in counts.items())
        raise PipelineError(
            f"equal blocks must have as many slots for the same weight; {listed}. Use one "
            "optimizer for all of them."
        )
    none: list[str] = []
    return list(itertools.zip_longest(*(of.get(path or "", none) for path in row)))


def _stacked(values: Arrays, stacks: Sequence[Stack]) -> Arrays:
    values = dict(values)
    for stack in _made_here(stacks):
        if all(member in values for member in stack.members):
            arrays = {member: values.pop(member) for member in stack.members}
            empty = jnp.zeros_like(arrays[stack.members[0]])
            values[stack.info.path] = jnp.stack([arrays[p] if p else empty for p in stack.places])
    return values


def _unstacked(values: Arrays, stacks: Sequence[Stack]) -> Arrays:
    values = dict(values)
    for stack in _made_here(stacks):
        if stack.info.path in values:
            stacked = values.pop(stack.info.path)
            values |= {p: stacked[n] for n, p in enumerate(stack.places) if p is not None}
    return values


def _joined(paths: Sequence[str]) -> str:
    """One name for the same weight of all blocks: where they differ, the first and the last.

    >>> _joined(["net/block_0/kernel", "net/block_1/kernel", "net/block_2/kernel"])
    'net/{block_0..block_2}/kernel'
    """
    first, last = (path.split("/") for path in (paths[0], paths[-1]))
    if len(first) != len(last):
        return f"{{{paths[0]}..{paths[-1]}}}"
    pairs = zip(first, last, strict=True)
    return "/".join(one if one == other else f"{{{one}..{other}}}" for one, other in pairs)
