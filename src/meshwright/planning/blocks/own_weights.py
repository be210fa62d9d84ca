"""A step whose equal blocks each have trained weights of their own, for its estimate.

Weights of blocks may be entries of stacked ones, or frozen in some blocks. A pipeline treats all
blocks alike, so what it costs is read of a step like this one. It is traced for shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from ...layouts.layout import Layout
from ...layouts.params import ParamInfo
from ...program import Arrays, Aux, Batch, Program, TrainState, shapes_of
from ...stages.loops import Entries, looped_weights, without_loops_over
from ...step.assemble import assemble
from ..abstract_step import AbstractStep, on_batch
from .traced import traced

Paths = tuple[str, ...]


@dataclass(frozen=True)
class _Turn:
    """Variables that take the places of others in one evaluation of the optimizer's step: new paths
    by those that the program has."""

    params: Mapping[str, str]
    slots: Mapping[str, str]


# Entries of stacked weights


@dataclass(frozen=True, eq=False)
class ByEntry:
    """A step whose stacked weights are entries, and which entry of which weight each is."""

    step: AbstractStep
    entries: Mapping[str, tuple[str, int]]


def by_entry(described: AbstractStep) -> ByEntry | None:
    """The step with its loop over the most weights written out; ``None`` where it has none."""
    program = described.program
    stacks = () if program.own_step is not None else _stacks(described)
    if not stacks:
        return None
    count = next(info.dims[0] for info in program.params if info.path in stacks)
    slots = [path for paths in _slots_of(program, stacks).values() for path in paths]
    turns = [
        _Turn(*({path: _entry(path, number) for path in paths} for paths in (stacks, slots)))
        for number in range(count)
    ]
    new = replace(
        program,
        params=_entries(program.params, turns, _layouts(described, stacks)),
        slots=_entries(program.slots, turns, {}),
        loss=_loss_by_entry(program, turns),
        update=_in_turns(program, turns),
    )
    of = {_entry(path, number): (path, number) for path in stacks for number in range(count)}
    return ByEntry(_with(described, new), of)


def _entries(
    infos: Iterable[ParamInfo], turns: Sequence[_Turn], layouts: Mapping[str, Layout]
) -> tuple[ParamInfo, ...]:
    """The variables with entries in place of stacks, which lie as these do, and slots likewise."""
    result = list[ParamInfo]()
    for info in infos:
        is_slot = info.role == "slot"
        for turn in turns:
            path = (turn.slots if is_slot else turn.params).get(info.path)
            if path is None:
                result.append(info)
                break
            owner = turn.params[info.owner] if is_slot and info.owner is not None else None
            asked = None if is_slot else Layout(layouts[info.path].specs[1:])
            dims = info.dims[1:]
            result.append(replace(_plain(info, path), dims=dims, owner=owner, asked=asked))
    return tuple(result)


def _loss_by_entry(program: Program, turns: Sequence[_Turn]) -> Callable[..., tuple[Any, Aux]]:
    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        def whole_loss(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole._replace(params=params), batch, training)

        slots = _by_stack(whole.slots, [turn.slots for turn in turns])
        stacked = _by_stack(params, [turn.params for turn in turns])
        leaves, tree = jax.tree.flatten((stacked, whole._replace(params={}, slots=slots), batch))
        closed, results = traced(whole_loss, *tree.unflatten(map(_shape_of, leaves)))
        return jax.tree.unflatten(results, without_loops_over(closed, leaves))

    return loss


def _by_stack(values: Arrays, turns: Sequence[Mapping[str, str]]) -> Arrays:
    """Values with entries together, under the path of their stack."""
    if not values:
        return values
    inside = {path for turn in turns for path in turn.values()}
    rest = {path: value for path, value in values.items() if path not in inside}
    return rest | {
        stack: Entries(tuple(values[turn[stack]] for turn in turns)) for stack in turns[0]
    }


def _stacks(described: AbstractStep) -> Paths:
    """Paths of the stacked weights that a step goes through in a loop."""
    program = described.program

    def loss(params: Arrays, whole: TrainState, batch: Batch) -> Any:
        return program.loss(params, whole._replace(params=params), batch, True)

    def trace() -> Any:
        params, *rest = map(shapes_of, program.parts)
        batch = described.batch[0] if described.how.batches > 1 else described.batch
        args = params, TrainState({}, *rest), jax.tree.map(_shape_of, batch)
        jaxpr = traced(loss, *args)[0].jaxpr
        paths = dict(zip(jaxpr.invars, sorted(params), strict=False))  # which come first
        found = looped_weights(jaxpr, list(paths))
        return tuple(path for var, path in paths.items() if var in found)

    stacks = program.under(described.placement, trace)()
    sizes = {info.dims[0] for info in program.params if info.path in stacks}
    return stacks if len(sizes) == 1 else ()


def _entry(path: str, number: int) -> str:
    """A path whose dims are named as those of a list of layers."""
    layer, _, name = path.rpartition("/")
    return f"{layer}/{number}/{name}" if layer else f"{name}/{number}"


# Frozen weights


@dataclass(frozen=True, eq=False)
class Thawed:
    """A step that trains the weights that it has frozen in some of its equal blocks, and how many
    bytes these have."""

    step: AbstractStep
    frozen_bytes: int


def thawed(described: AbstractStep, rows: Sequence[Paths]) -> Thawed | None:
    """The step with all weights trained of which some block has one that is, and with slots for all
    where some has them; ``rows`` are paths of the weights by block. ``None`` where all are alike.
    """
    program = described.program
    of_slots = _slots_of(program, [info.path for info in program.params])
    twins = _twins(rows, of_slots)
    if not twins:
        return None
    turns = [_Turn({}, {})]
    for block in range(max(map(len, rows))):
        here = [row[block] for row in rows if block < len(row) and row[block] in twins]
        params = {twins[path]: path for path in here}
        slots = {slot: f"{slot}@{p}" for twin, p in params.items() for slot in of_slots[twin]}
        turns += [_Turn(params, slots)] if params else []
    layouts = _layouts(described, of_slots)
    frozen = [info for info in program.state if info.path in twins]
    were_state = {info.path for info in frozen}
    lie = {info.path: Layout(layouts[twins[info.path]].specs) for info in frozen}
    more = (
        replace(_plain(info, info.path), role="parameter", asked=lie[info.path]) for info in frozen
    )
    new = replace(
        program,
        params=(*program.params, *more),
        state=tuple(info for info in program.state if info.path not in were_state),
        slots=(*program.slots, *_slots_of_turns(program, turns)),
        loss=_loss_with(program, were_state),
        update=_in_turns(program, turns),
    )
    return Thawed(_with(described, new), sum(info.nbytes for info in frozen))


def _slots_of_turns(program: Program, turns: Sequence[_Turn]) -> Iterator[ParamInfo]:
    infos = {info.path: info for info in program.slots}
    for turn in turns:
        for slot, path in turn.slots.items():
            owner = turn.params[infos[slot].owner or ""]
            yield replace(_plain(infos[slot], path), owner=owner)


def _loss_with(program: Program, were_state: Collection[str]) -> Callable[..., tuple[Any, Aux]]:
    """The loss where some of the state are parameters."""

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        own = {path: value for path, value in params.items() if path in were_state}
        rest = {path: value for path, value in params.items() if path not in were_state}
        whole = whole._replace(state={**whole.state, **own})
        value, aux = program.loss(rest, whole, batch, training)
        return value, aux._replace(
            state={p: v for p, v in aux.state.items() if p not in were_state}
        )

    return loss


def _twins(rows: Iterable[Paths], of_slots: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Of each weight that is frozen, or has no slots, one of another block that is not; slots are
    by the weights that are trained."""
    result: dict[str, str] = {}
    for row in rows:
        if trained := [path for path in row if path in of_slots]:
            twin = max(trained, key=lambda path: len(of_slots[path]))
            lacks = (p for p in row if p not in of_slots or (not of_slots[p] and of_slots[twin]))
            result |= dict.fromkeys(lacks, twin)
    return result


# Both


def _in_turns(program: Program, turns: Sequence[_Turn]) -> Callable[..., tuple[Arrays, Arrays]]:
    """The optimizer's step, of which each turn takes other variables; what all turns have is the
    first one's."""

    def update(params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        new: tuple[Arrays, Arrays] = ({}, {})
        step = results = None
        for turn in turns:
            names = turn.params, turn.params, turn.slots
            args = [
                {info.path: of[to.get(info.path, info.path)] for info in infos}
                for of, to, infos in zip(
                    (params, grads, slots),
                    names,
                    (program.params, program.params, program.update_slots),
                    strict=True,
                )
            ]
            leaves = jax.tree.leaves(args)
            if step is None:
                closed, results = traced(program.update, *args)
                step = jaxpr_as_fun(closed)
            both = jax.tree.unflatten(results, step(*leaves))
            for part, values, to in zip(new, both, (turn.params, turn.slots), strict=True):
                for path, value in values.items():
                    if path in to or turn is turns[0]:
                        part[to.get(path, path)] = value
        return new

    return update


def _with(described: AbstractStep, program: Program) -> AbstractStep:
    steps = assemble(program, described.placement, described.how, losses=described.losses)
    batch = described.batch[0] if described.how.batches > 1 else described.batch
    return on_batch(steps, batch)


def _slots_of(program: Program, paths: Iterable[str]) -> dict[str, list[str]]:
    """Paths of the slots of these parameters, which have dims as they do."""
    dims = {info.path: info.dims for info in program.params}
    result: dict[str, list[str]] = {path: [] for path in paths}
    for info in program.slots:
        if info.owner in result and info.dims == dims[info.owner]:
            result[info.owner].append(info.path)
    return result


def _layouts(described: AbstractStep, paths: Iterable[str]) -> dict[str, Layout]:
    """How parameters lie before ZeRO shares them out."""
    wanted = set(paths)
    placed = described.placement.with_zero(0).place(described.program.params)
    return {one.info.path: one.layout for one in placed if one.info.path in wanted}


def _plain(info: ParamInfo, path: str) -> ParamInfo:
    """A variable of this path that no pattern names."""
    return replace(
        info, path=path, spellings=(), asked=None, names=None, follows=None, lasting=None
    )


def _shape_of(value: Any) -> Any:
    """The shape of an array, or of the stack of its entries."""
    if isinstance(value, Entries):
        one = value.values[0]
        return jax.ShapeDtypeStruct((len(value.values), *one.shape), one.dtype)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
