"""What each operation of a step does in one device, and tells the others, by the closed forms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ...hlo.collectives import Collective
from ...hlo.origins import Origin
from ...hlo.remedies import remedy
from ...hlo.text import Array
from ...hlo.traffic import Transfer
from ...layouts.params import Placed
from ...layouts.placement import Placement
from ..graph import Graph, Operation
from ..search.facts import facts_of
from ..search.terms import (
    Lay,
    Talk,
    arithmetic_s,
    parameter_talks,
    runs_of,
    shards,
    talks_of,
    work_done,
)
from .assignment import Assignment, UseGather, WeightGather

_OF_UPDATE = ("update", "parameter", "slot")


@dataclass(frozen=True)
class CollectiveCost:
    """A collective: the bytes of one device and the seconds are those of each time."""

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    count: int
    time_s: float


@dataclass(frozen=True)
class DeviceWork:
    """What all runs of an operation take in one step of one device."""

    count: int
    flops: float
    bytes: float
    flops_s: float
    bytes_s: float
    collectives: tuple[CollectiveCost, ...]

    @property
    def time_s(self) -> float:
        """The longer of arithmetic and memory traffic."""
        return max(self.flops_s, self.bytes_s)


@dataclass(frozen=True)
class OperationCost:
    """An operation in the words of the model, or what is gathered of a variable."""

    kind: str
    layer: str
    phase: str
    work: DeviceWork
    again: bool = False  # half of it is done for the backward pass
    variable: str = ""
    remedy: str = ""
    itemsize: int = 0
    whole_flops: float = 0.0  # of all devices, were nothing done twice


def operation_costs(assignment: Assignment, placement: Placement) -> tuple[OperationCost, ...]:
    """The operations of a step in the order of its trace, and what ZeRO and the layout gather."""
    of_zero = tuple(_shared(assignment))
    before = tuple(_before_use(assignment, gather) for gather in assignment.before_use)
    first = assignment.choices.zero == 3
    begin, end = (of_zero, ()) if first else ((), of_zero)
    gathers = [_gathered(assignment, tensor, placement) for tensor in assignment.gathers]
    return (*begin, *before, *_operations(assignment), *end, *gathers)


def _operations(assignment: Assignment) -> Iterator[OperationCost]:
    problem = assignment.problem
    graph, facts = problem.graph, facts_of(problem.graph)
    every = [device_work(assignment, place) for place in range(len(problem.works))]
    for place, operation in enumerate(graph.operations):
        work = problem.works[problem.work_of[place]]
        touched = (*operation.results, *operation.operands)
        yield OperationCost(
            kind=operation.kind,
            layer=operation.path,
            phase=_phase(graph, operation, facts.kinds, facts.is_forward[place]),
            work=every[problem.work_of[place]],
            again=work.runs_with(assignment.choices.remat) > 1,
            itemsize=graph.tensors[touched[0]].itemsize if touched else 0,
            whole_flops=operation.flops * operation.times,
        )


def _phase(graph: Graph, operation: Operation, kinds: tuple[str, ...], is_forward: bool) -> str:
    if is_forward:
        return "forward"
    results = operation.results
    if results and all(graph.tensors[place].twin is not None for place in results):
        return "recompute"
    return (
        "other" if results and all(kinds[place] in _OF_UPDATE for place in results) else "backward"
    )


def device_work(assignment: Assignment, place: int) -> DeviceWork:
    """What one kind of operation does under a layout."""
    lay, setting, work = assignment.lay, assignment.setting, assignment.problem.works[place]
    if work.is_free:
        return DeviceWork(runs_of(lay, work), 0.0, 0.0, 0.0, 0.0, ())
    runs = runs_of(lay, work)
    done, moved = work_done(lay, work)
    flops, moved = runs * float(done[0]), runs * float(moved[0])
    return DeviceWork(
        count=runs,
        flops=flops,
        bytes=moved,
        flops_s=runs * float(arithmetic_s(lay, work, done)[0]),
        bytes_s=moved * setting.seconds_per_byte,
        collectives=tuple(_collectives(assignment, lay, talks_of(lay, work), runs)),
    )


def _collectives(
    assignment: Assignment, lay: Lay, talks: Iterable[Talk], runs: int = 1
) -> Iterator[CollectiveCost]:
    """The collectives that more than one device take part in."""
    for talk in talks:
        mask, nbytes = int(np.asarray(talk.over)[0]), float(talk.nbytes[0])
        if mask and nbytes:
            time_s = nbytes * lay.setting.rate_s_per_byte[talk.kind][mask]
            time_s += lay.setting.delay_s[talk.kind][mask]
            yield CollectiveCost(
                talk.kind, assignment.named(mask), nbytes, runs * talk.times, float(time_s)
            )


def _shared(assignment: Assignment) -> Iterator[OperationCost]:
    """What ZeRO gathers of parameters."""
    problem = assignment.problem
    for place, tensor in enumerate(problem.graph.tensors):
        is_shared = assignment.shared is None or tensor.path in assignment.shared
        if tensor.role == "parameter" and assignment.choices.zero and is_shared:
            talks = parameter_talks(assignment.lay, problem.pieces[problem.piece_of[place]])
            if collectives := tuple(_collectives(assignment, assignment.lay, talks)):
                phase = "forward" if assignment.choices.zero == 3 else "other"
                yield _of_variable(tensor.path, phase, collectives, tensor.itemsize)


def _before_use(assignment: Assignment, gather: UseGather) -> OperationCost:
    """What is gathered, or moved between its dims, of a parameter that lies as its dims do not.

    As at level 3 of ZeRO that is done for the forward and again for the backward pass. A gradient
    goes the way back once; to a part of what a device holds it is cut for nothing.
    """
    lay, problem = assignment.lay, assignment.problem
    piece = problem.pieces[problem.piece_of[gather.tensor]]
    names = [name for name, _ in assignment.setting.axes]
    over, moved = (
        np.array([sum(1 << names.index(axis) for axis in axes)])
        for axes in (gather.grows, gather.moved)
    )
    nbytes, times = piece.nbytes / shards(lay, piece), 2 * assignment.choices.accumulate
    talks = [
        Talk("all-gather", over, nbytes, times, piece),
        Talk("all-to-all", moved, nbytes / lay.size(over), times + 1, piece),
    ]
    collectives = tuple(_collectives(assignment, lay, talks))
    tensor = problem.graph.tensors[gather.tensor]
    return _of_variable(tensor.path, "forward", collectives, tensor.itemsize)


def _gathered(assignment: Assignment, gather: WeightGather, placement: Placement) -> OperationCost:
    """What is new of a variable that lies in larger pieces than its dims."""
    info = gather.placed.info
    names = [name for name, _ in assignment.setting.axes]
    mask = sum(1 << names.index(axis) for axis in gather.axes)
    piece = assignment.problem.pieces[assignment.problem.piece_of[gather.tensor]]
    nbytes = piece.nbytes / shards(assignment.lay, piece) * assignment.setting.size_of[mask]
    collectives = tuple(
        _collectives(
            assignment, assignment.lay, [Talk("all-gather", np.array([mask]), nbytes, 1, piece)]
        )
    )
    array = Array(info.dtype, gather.placed.layout.local_dims(info.dims), 8 * info.itemsize)
    like = Collective("all-gather", (array,), (), gather.axes, 1, "", 0, 0, gathered_dim=gather.dim)
    words = remedy(like, Origin("", "other"), None, gather.placed, (), placement)
    return _of_variable(info.path, "other", collectives, info.itemsize, words)


def _of_variable(
    path: str, phase: str, collectives: tuple[CollectiveCost, ...], itemsize: int, remedy: str = ""
) -> OperationCost:
    work = DeviceWork(
        sum(collective.count for collective in collectives), 0.0, 0.0, 0.0, 0.0, collectives
    )
    return OperationCost("gather", "", phase, work, variable=path, remedy=remedy, itemsize=itemsize)


def transfers_of(costs: Iterable[OperationCost], placed: Iterable[Placed]) -> tuple[Transfer, ...]:
    """The collectives in the report's words; types of elements are those of the parameters."""
    parameters = (entry.info for entry in placed if entry.info.role == "parameter")
    dtypes = {info.itemsize: info.dtype for info in parameters}
    return tuple(
        Transfer(
            kind=collective.kind,
            axes=collective.axes,
            bytes_per_device=math.ceil(collective.nbytes),
            count=collective.count,
            paths=(cost.layer,) if cost.layer else (),
            phases=(cost.phase,),
            dtypes=(dtypes[cost.itemsize],) if cost.itemsize in dtypes else (),
            variables=(cost.variable,) if cost.variable else (),
            remedy=cost.remedy,
        )
        for cost in costs
        for collective in cost.work.collectives
    )
