"""A step whose equal blocks each have trained weights of their own, for its estimate.

Weights of blocks may be entries of stacked ones, or frozen in some blocks. A pipeline treats all
blocks alike, so what it costs is read of a step like this one. It is traced for shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    if program.own_step is not None:
        return None
    stacks = _stacks(described)
    if not stacks:
        return None
    counts = {info.path: info.dims[0] for info in program.params if info.path in stacks}
    count = max(counts.values())
    of_slots = _slots_of(program, stacks)
    turns = [
        _Turn(
            {path: _entry(path, number) for path in stacks},
            {path: _entry(path, number) for paths in of_slots.values() for path in paths},
        )
        for number in range(count)
    ]
    layouts = _layouts(described, stacks)

    def one(path: str, turn: _Turn, info: ParamInfo) -> ParamInfo:
        owner = None if info.owner is None else turn.params.get(info.owner)
        asked = None if info.role == "slot" else Layout(layouts[info.path].specs[1:])
        dims = info.dims[1:]
        return replace(_plain(info, path), dims=dims, owner=owner, asked=asked)

    def entries(infos: Iterable[ParamInfo], field: str) -> tuple[ParamInfo, ...]:
        result = []
        for info in infos:
            if info.path in getattr(turns[0], field):
                result += [one(getattr(turn, field)[info.path], turn, info) for turn in turns]
            else:
                result.append(info)
        return tuple(result)

    def by_stack(values: Arrays, infos: Iterable[ParamInfo], field: str) -> Arrays:
        """With entries as stacks."""
        return {
            info.path: Entries(tuple(values[getattr(turn, field)[info.path]] for turn in turns))
            if info.path in getattr(turns[0], field)
            else values[info.path]
            for info in infos
            if info.path in getattr(turns[0], field) or info.path in values
        }

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        import jax

        stacked = by_stack(params, program.params, "params")
        slots = by_stack(whole.slots, program.slots, "slots") if whole.slots else {}
        args = stacked, whole._replace(params={}, slots=slots), batch

        def whole_loss(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole._replace(params=params), batch, training)

        leaves, tree = jax.tree.flatten(args)
        shapes = [_shape_of(leaf) for leaf in leaves]
        closed, results = traced(whole_loss, *tree.unflatten(shapes))
        return jax.tree.unflatten(results, without_loops_over(closed, leaves))

    new = replace(
        program,
        params=entries(program.params, "params"),
        slots=entries(program.slots, "slots"),
        loss=loss,
        update=_in_turns(program, turns),
    )
    of = {_entry(path, number): (path, number) for path in stacks for number in range(count)}
    return ByEntry(_with(described, new), of)


def _stacks(described: AbstractStep) -> Paths:
    """Paths of the stacked weights that a step goes through in a loop."""
    program = described.program

    def loss(params: Arrays, whole: TrainState, batch: Batch) -> Any:
        return program.loss(params, whole._replace(params=params), batch, True)

    def trace() -> Any:
        import jax

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
    trained = {info.path for info in program.params}
    of_slots = _slots_of(program, trained)
    twins = _twins(rows, of_slots)
    if not twins:
        return None
    count = max(map(len, rows))
    turns = [_Turn({}, {})]
    for block in range(count):
        here = [row[block] for row in rows if block < len(row) and row[block] in twins]
        params = {twins[path]: path for path in here}
        slots = {slot: f"{slot}@{p}" for twin, p in params.items() for slot in of_slots[twin]}
        turns += [_Turn(params, slots)] if params else []
    layouts = _layouts(described, trained)
    frozen = [info for info in program.state if info.path in twins]
    were_state = {info.path for info in frozen}
    infos = {info.path: info for info in program.slots}

    def with_params(params: Arrays, whole: TrainState) -> tuple[Arrays, TrainState]:
        own = {path: value for path, value in params.items() if path in were_state}
        rest = {path: value for path, value in params.items() if path not in were_state}
        return rest, whole._replace(state={**whole.state, **own})

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        value, aux = program.loss(*with_params(params, whole), batch, training)
        return value, aux._replace(
            state={p: v for p, v in aux.state.items() if p not in were_state}
        )

    new_params = [
        replace(
            _plain(info, info.path),
            role="parameter",
            asked=Layout(layouts[twins[info.path]].specs),
        )
        for info in frozen
    ]
    new_slots = [
        replace(_plain(infos[slot], path), owner=turn.params[infos[slot].owner or ""])
        for turn in turns
        for slot, path in turn.slots.items()
    ]
    new = replace(
        program,
        params=(*program.params, *new_params),
        state=tuple(info for info in program.state if info.path not in were_state),
        slots=(*program.slots, *new_slots),
        loss=loss,
        update=_in_turns(program, turns),
    )
    return Thawed(_with(described, new), sum(info.nbytes for info in frozen))


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
        import jax
        from jax.extend.core import jaxpr_as_fun

        new: tuple[Arrays, Arrays] = ({}, {})
        step = results = None
        for turn in turns:
            names = turn.params, turn.params, turn.slots
            args = [
                {info.path: of[to.get(info.path, info.path)] for info in infos}
                for of, to, infos in zip(
                    (params, grads, slots),
                    names,
                    (program.params, program.params, program.slots),
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
    import jax

    if isinstance(value, Entries):
        one = value.values[0]
        return jax.ShapeDtypeStruct((len(value.values), *one.shape), one.dtype)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
