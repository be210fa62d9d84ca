"""A Program with fewer of its equal blocks: the same in all else, and quick to compile.

The loss is traced whole. What reads the last block is made to read an earlier one, and what is
no longer read is left out; gradients, ZeRO, accumulation, recompute and the optimizer's update are
then made of what is left, as of any Program.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from ...jaxprs.edits import traced
from ...jaxprs.repeats import LEAST, NO_RUN, Repeated, Run, repeated
from ...jaxprs.scopes import layer_of
from ...layouts.params import ParamInfo, Placed
from ...program import Arrays, Aux, Batch, Program, TrainState, shapes_of
from ..abstract_step import AbstractStep
from .traced import TracedLoss, evaluated, shortened

Paths = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Reduced:
    """The equal blocks of a step, and the step with fewer of them.

    ``blocks`` has the paths of the variables of each, in one order, and ``layers`` the name scopes.
    ``with_blocks`` describes the step with the first few.
    """

    blocks: tuple[Paths, ...]
    layers: tuple[Paths, ...] = field(repr=False)
    with_blocks: Callable[[int], AbstractStep] = field(repr=False)

    @property
    def count(self) -> int:
        return len(self.blocks)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each block: what the paths of its variables begin with, or the first path."""
        return tuple(_shared_path(paths) for paths in self.blocks)

    def renaming(self, block: int, other: int) -> Callable[[str], str]:
        """Turns paths of variables and layers of one block into those of another."""
        both = zip(self.layers[block], self.layers[other], strict=True)
        renames = dict([*both, *zip(self.blocks[block], self.blocks[other], strict=True)])
        renames.pop("", None)

        def renamed(path: str) -> str:
            begin = path
            while begin and begin not in renames:
                begin = begin.rpartition("/")[0]
            return renames[begin] + path[len(begin) :] if begin else path

        return renamed


def reduced(described: AbstractStep, least: int = LEAST) -> tuple[Reduced | None, str]:
    """The equal blocks of a step, or ``None`` and why it is not made smaller.

    The reason is empty where nothing repeats itself ``least`` times.
    """
    repeated_blocks, reason = repeated_in(described, least)
    return (None, reason) if repeated_blocks is None else repeated_blocks.reduced(described)


class RepeatedBlocks(NamedTuple):
    """Equal blocks in the trace of a step: the paths of each of their variables by block, trained
    or not, and the name scopes of each block. ``form`` is the number of the form of the loss in
    which they are equal."""

    run: Run
    rows: tuple[Paths, ...]
    layers: tuple[Paths, ...]
    form: int

    def reduced(self, described: AbstractStep) -> tuple[Reduced | None, str]:
        """What makes that step smaller, or ``None`` and why the blocks do not train alike."""
        program, rows = described.program, self.rows
        if differ := _differ(program, rows):
            return None, differ
        twins = _Twins.of(program, rows)
        if not twins.lie_alike(described.placed):
            return None, "equal blocks are laid out differently"

        def with_blocks(count: int) -> AbstractStep:
            return replace(described, program=_shorter(program, twins, self, count))

        return Reduced(tuple(zip(*rows, strict=True)), self.layers, with_blocks), ""


def repeated_in(described: AbstractStep, least: int) -> tuple[RepeatedBlocks | None, str]:
    """The blocks of a step that repeat themselves; or ``None`` and why there are none."""
    program = described.program
    if program.own_step is not None:
        return None, "the model brings its own training step"
    if described.staged is not None:
        return None, "its blocks are cut into the stages of a pipeline"
    batch = described.batch[0] if described.how.batches > 1 else described.batch
    trace = program.under(described.placement, functools.partial(TracedLoss.of, program))
    loss: TracedLoss = trace(TrainState(*map(shapes_of, program.parts)), _shapes(batch))
    reasons = list[str]()
    for number, form in enumerate(loss.forms()):
        repeats, reason = repeated(form.closed.jaxpr, form.params, form.changed)
        reasons.append(reason)
        if repeats is not None and repeats.run.count >= least:
            return _of_form(form, number, repeats)
    return None, reasons[0]


def _of_form(loss: TracedLoss, number: int, repeats: Repeated) -> tuple[RepeatedBlocks | None, str]:
    rows = [[loss.paths.get(var) for var in row] for row in repeats.own]
    named = [tuple(path for path in row if path is not None) for row in rows]
    of_all = tuple(row for row in named if len(row) == repeats.run.count)  # others are constants
    if not of_all:
        return None, "equal blocks have no variables of their own"
    layers = _layers(loss.closed.jaxpr, repeats.run)
    return RepeatedBlocks(repeats.run, of_all, layers, number), ""


def _differ(program: Program, rows: Sequence[Paths]) -> str:
    """Why blocks of equal equations do not train alike; empty where they do."""
    trained = {info.path for info in program.params}
    if any(len({path in trained for path in row}) > 1 for row in rows):
        return "some of its equal blocks are frozen"
    slots = Counter(info.owner for info in program.slots)
    if any(len({slots[path] for path in row}) > 1 for row in rows):
        return "some of its equal blocks have slots that others have not"
    return ""


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@dataclass(frozen=True)
class _Twins:
    """The variables of equal blocks, by path and block, those of the optimizer included."""

    rows: tuple[Paths, ...]  # one per variable of a block: its path in each block

    @classmethod
    def of(cls, program: Program, rows: Sequence[Paths]) -> _Twins:
        slots: dict[str, list[str]] = {}
        for info in program.slots:
            if info.owner is not None:
                slots.setdefault(info.owner, []).append(info.path)
        of_slots = [zip(*(slots.get(path, ()) for path in row), strict=True) for row in rows]
        return cls((*rows, *itertools.chain.from_iterable(of_slots)))

    def lie_alike(self, placed: Sequence[Placed]) -> bool:
        """Whether the variables at one place in each block are laid out alike."""
        by_path = {entry.info.path: entry for entry in placed}

        def model_path(path: str) -> Any:
            entry = by_path[path]
            return entry.layout.unbound(), entry.info.dims, entry.info.dtype

        return all(len({model_path(path) for path in row}) == 1 for row in self.rows)

    def left_out(self, count: int) -> dict[str, str]:
        """The variables of all blocks but the first ``count``, and those that stand for them."""
        return {path: row[count - 1] for row in self.rows for path in row[count:]}


def _shorter(program: Program, twins: _Twins, blocks: RepeatedBlocks, count: int) -> Program:
    """The Program with the first ``count`` of its blocks.

    Functions of all variables get those of the last block that is there in place of each that is
    not; what is only computed for the latter is left out.
    """
    left_out = twins.left_out(count)

    def all_of(infos: Sequence[ParamInfo], values: Arrays) -> Arrays:
        paths = [info.path for info in infos]
        return {path: values[left_out.get(path, path)] for path in paths} if values else values

    def whole_of(whole: TrainState) -> TrainState:
        parts = (program.params, program.state, program.slots, program.metrics)
        return TrainState(*map(all_of, parts, whole))

    def fewer(values: Arrays) -> Arrays:
        return {path: value for path, value in values.items() if path not in left_out}

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        state = whole_of(whole)._replace(params=all_of(program.params, params))
        forms = TracedLoss.of(program, state, batch, training).forms()
        trace = next(itertools.islice(forms, blocks.form, None))
        closed = shortened(trace.closed, blocks.run, count)
        tree = jax.tree.structure(trace.results)
        value, aux = jax.tree.unflatten(tree, closed.jaxpr.outvars)
        shorter = value, aux._replace(state=fewer(aux.state))
        args = state.params, state._replace(params={}), batch
        results = evaluated(closed, jax.tree.leaves(shorter), args, blocks.run)
        return jax.tree.unflatten(jax.tree.structure(shorter), results)

    def update(params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        args = all_of(program.params, params), all_of(program.params, grads)
        args = *args, all_of(program.update_slots, slots)
        closed, tree = traced(program.update, *args)
        new_params, new_slots = jax.tree.unflatten(tree, closed.jaxpr.outvars)
        shorter = fewer(new_params), fewer(new_slots)
        results = evaluated(closed, jax.tree.leaves(shorter), args, NO_RUN)
        return jax.tree.unflatten(jax.tree.structure(shorter), results)

    def those(infos: tuple[ParamInfo, ...]) -> tuple[ParamInfo, ...]:
        return tuple(info for info in infos if info.path not in left_out)

    return replace(
        program,
        params=those(program.params),
        state=those(program.state),
        slots=those(program.slots),
        loss=loss,
        update=update,
    )


# Names


def _layers(jaxpr: Any, run: Run) -> tuple[Paths, ...]:
    """The name scopes of the equations of each copy, inner ones included, in one order."""
    matches = []
    for copy in range(run.count):
        start = run.start + copy * run.period
        eqns = jaxpr.eqns[start : start + run.period]
        scopes = [layer_of(f"{eqn.source_info.name_stack}/") for eqn in eqns]
        matches.append(tuple(scopes))
    return tuple(matches)


def _shared_path(paths: Paths) -> str:
    """What all paths begin with, or the first of them."""
    shared: list[str] = []
    for several in zip(*(path.split("/") for path in paths), strict=False):
        if len(set(several)) > 1:
            break
        shared.append(several[0])
    return "/".join(shared) or paths[0]
