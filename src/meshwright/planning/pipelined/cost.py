"""What one step of a pipeline takes in one device: time by its ticks, bytes by what is in flight.

The graph is that of the model with as many equal blocks as one stage has: all devices run one
program, which holds what comes before the blocks and after them, too.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...hlo.collectives import Collective
from ...hlo.links import collective_s, links_of
from ...hlo.text import Array
from ...layouts.zero import SMALL_ELEMENTS
from ...stages.pipeline import Pipeline
from ...stages.plan import Kept
from ...stages.table import TickTable
from ...targets.hardware import Hardware
from ...targets.target import Target
from ..analytic.assignment import Assignment
from ..analytic.operation_costs import CollectiveCost, DeviceWork, device_work
from ..graph import Graph, GraphTensor, Operation
from ..search.terms import parameter_talks, resting_bytes
from .sections import Name, Phase, Section, sections_of
from .ticking import Passes, busy_s, step_s

_RESTING = ("parameter", "slot", "state", "input")


@dataclass(frozen=True)
class Staging:
    """How a model is cut: the pipeline over ``stages``, each of ``blocks`` equal blocks, whose
    parameters in the graph have ``block_paths``.

    ``sent_bytes`` are those of each array that a stage passes on of a micro-batch, in one device.
    ``skips`` says whether a stage leaves out what it has no work for: else ticks in which stages
    have other kinds of work are loops of their own. ``filled`` is the share of its places for
    blocks that each run has, where not all are, and ``count`` says how many blocks all stages have.
    ``shares_loss`` says whether all stages compute what comes after the blocks. ``frozen_bytes``
    are of weights that some blocks have frozen, which lie on every device.
    """

    pipeline: Pipeline
    stages: int
    blocks: int
    block_paths: frozenset[str]
    sent_bytes: tuple[int, ...]
    skips: bool = True
    filled: tuple[float, ...] = ()
    count: int | None = None
    shares_loss: bool = False
    frozen_bytes: int = 0

    @functools.cached_property
    def table(self) -> TickTable:
        """What each stage does at each tick."""
        return self.pipeline.table(self.stages, self.shares_loss)

    @property
    def ticking(self) -> Ticking:
        """The buffers and transfers of a step."""
        return _ticking(self.pipeline, self.stages, self.shares_loss)

    @property
    def permutes(self) -> int:
        """How many transfers to a neighbour one device takes part in, of each array that is passed
        on: in every tick of a loop one in each direction in which its stages work, and one more
        where results and their gradients go around to the stages that compute the loss."""
        if self.stages == 1:
            return 0
        return (1 + self.shares_loss) * self.ticking.transfers[self.skips]


class Ticking(NamedTuple):
    """What a tick table says of a step: how many buffers it has, and in how many ticks of its loops
    (:meth:`TickPlan.loops`) neighbours exchange something, counted in each direction, by whether
    stages skip what they have no work for."""

    slots: int
    gradient_slots: int
    cut_slots: int
    loss_slots: int
    transfers: Mapping[bool, int]


@functools.lru_cache(maxsize=1024)
def _ticking(pipeline: Pipeline, stages: int, shares_loss: bool) -> Ticking:
    """Kept, because a search asks for the same few hundred with every layout, and a plan of a
    thousand micro-batches in 64 stages takes a second."""
    table = pipeline.table(stages, shares_loss)
    buffers = Kept.of(table, keeps_results=not pipeline.does_remat).buffers()
    forward, backward = (table.counts[kind].any((1, 2)) for kind in ("forward", "backward"))
    apart = int(forward.sum() + backward.sum())
    together = 2 * len(table.ticks) if (forward & backward).any() else apart  # in one loop
    return Ticking(*buffers, {False: apart, True: together})


@dataclass
class SectionCost:
    """What a section takes: seconds of a micro-batch, and of what is done once a step."""

    flops: float = 0.0
    compute_s: float = 0.0
    talk_s: float = 0.0
    once_s: float = 0.0

    @property
    def pass_s(self) -> float:
        return self.compute_s + self.talk_s


@dataclass(frozen=True)
class StageWork:
    """What one stage has to do, whatever the schedule: ``costs`` by section, seconds to gather what
    lies in pieces over the stages, and bytes of one device: at rest, of the blocks' parameters, of
    the others whole, and of those whose gradients take the room of other ones; and of one
    micro-batch, see :func:`_activations`."""

    costs: Mapping[Section, SectionCost]
    gathered_s: float
    resting_bytes: int
    own_bytes: int
    other_bytes: int
    shared_bytes: int
    products: int
    needed: int
    at_loss: int

    @classmethod
    def of(
        cls, assignment: Assignment, staging: Staging, sections: Sequence[Section] = ()
    ) -> StageWork:
        """That of a layout of the graph of one stage, whose ``sections`` may be known already."""
        own = sum(
            _bytes_on_device(assignment, place)
            for place, tensor in enumerate(assignment.problem.graph.tensors)
            if tensor.role == "parameter" and tensor.path in staging.block_paths
        )
        sections = sections or sections_of(assignment.problem.graph, staging.block_paths)
        return cls(
            section_costs(assignment, staging, sections),
            _gathered_s(assignment, staging),
            _resting(assignment, staging),
            own,
            sum(_others(assignment, staging)),
            _in_one_room(assignment, staging, sections),
            *_activations(assignment, sections),
        )


@dataclass(frozen=True)
class PipelineCost:
    """A step in one device: ``busy_s`` is what the busiest stage works, ``step_time_s`` what all
    ticks and what is done once take; ``temporary_bytes`` are held beside state and inputs."""

    step_time_s: float | None
    busy_s: float
    compute_s: float
    communication_s: float
    permute_s: float  # of one
    temporary_bytes: int
    state_bytes: int  # of state and inputs, as the planner's model has them
    passes: Passes

    @property
    def idle_share(self) -> float:
        """The share of the step in which the busiest stage does not compute."""
        return 1 - self.busy_s / self.step_time_s if self.step_time_s else 0.0

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + self.temporary_bytes


def pipeline_cost(
    assignment: Assignment,
    staging: Staging,
    target: Target,
    hardware: Hardware,
    recompute_blocks: bool = False,
    work: StageWork | None = None,
) -> PipelineCost:
    """The cost of a layout of the graph of one stage; ``assignment`` is on the whole mesh.

    ``work`` is that of the same layout and number of micro-batches, if it is known already.
    """
    pipeline, table = staging.pipeline, staging.table
    work = work or StageWork.of(assignment, staging)
    costs = work.costs
    send_s = sum(permute_s(nbytes, assignment, staging, target, hardware)
                 for nbytes in staging.sent_bytes)  # fmt: skip

    def seconds(name: Name, *phases: Phase) -> float:
        return sum(costs[Section(name, phase)].pass_s for phase in phases)

    passes = Passes(
        enter=seconds("before", "forward"),
        blocks_forward=seconds("blocks", "forward"),
        blocks_backward=seconds("blocks", "backward"),
        blocks_weights=seconds("blocks", "weights"),
        at_loss=seconds("after", "forward", "backward", "weights"),
        at_input=seconds("before", "forward", "backward", "weights"),
        send=send_s * (1 + staging.shares_loss),
        recomputes=pipeline.does_remat + recompute_blocks,
        waits_for_loss=pipeline.does_remat and not staging.shares_loss,
        skips=staging.skips,
        overlaps=target.platform != "cpu",
        filled=staging.filled,
        shares_loss=staging.shares_loss,
    )
    ticks = step_s(table, passes)
    once_s = sum(cost.once_s for cost in costs.values()) + work.gathered_s
    total = ticks.work + ticks.waiting + once_s
    busiest_s = busy_s(table, passes)
    compute_s = _share(costs, "compute_s") * busiest_s
    return PipelineCost(
        step_time_s=None if assignment.setting.missing else total,
        busy_s=busiest_s + once_s,
        compute_s=compute_s,
        communication_s=busiest_s - compute_s + ticks.waiting + once_s,
        permute_s=send_s / max(1, len(staging.sent_bytes)),
        temporary_bytes=_temporary(work, staging, recompute_blocks),
        state_bytes=work.resting_bytes + staging.frozen_bytes,
        passes=passes,
    )


# Sections


def section_costs(
    assignment: Assignment, staging: Staging, sections: Sequence[Section]
) -> dict[Section, SectionCost]:
    """What each section takes; gradients of the blocks' weights are summed once a step, those of
    what comes before and after them for every micro-batch."""
    problem, count = assignment.problem, staging.pipeline.micro_batches
    works = [device_work(assignment, place) for place in range(len(problem.works))]
    result: dict[Section, SectionCost] = defaultdict(SectionCost)
    for section, place in zip(sections, problem.work_of, strict=True):
        _add(result[section], section, works[place], count, staging.stages)
    for piece, many in problem.parameters if assignment.choices.zero else ():
        for talk in parameter_talks(assignment.lay, problem.pieces[piece]):
            mask = int(np.asarray(talk.over)[0])
            setting = assignment.setting
            rate = float(setting.rate_s_per_byte[talk.kind][mask])
            delay = float(setting.delay_s[talk.kind][mask])
            if mask:
                took = many * (float(talk.nbytes[0]) * rate + delay)
                result[Section("blocks", "update")].once_s += took
    return result


def _add(cost: SectionCost, section: Section, work: DeviceWork, count: int, stages: int) -> None:
    if section.phase == "update":
        # What is not of a block lies in pieces over the stages.
        cut = 1 if section.name == "blocks" else stages
        cost.once_s += (work.time_s + sum(map(_talk_s, work.collectives))) / cut
        return
    cost.flops += work.flops
    cost.compute_s += work.time_s / count
    for collective in work.collectives:
        if section == ("blocks", "weights") and collective.count % count:
            cost.once_s += _talk_s(collective)
        elif collective.count % count:
            cost.talk_s += _talk_s(collective)
        else:
            cost.talk_s += _talk_s(collective) / count


def _talk_s(collective: CollectiveCost) -> float:
    return collective.count * collective.time_s


def _share(costs: Mapping[Section, SectionCost], what: str) -> float:
    every = [cost for section, cost in costs.items() if section.phase != "update"]
    whole = sum(cost.pass_s for cost in every)
    return sum(getattr(cost, what) for cost in every) / whole if whole else 0.0


# Between stages


def permute_s(
    nbytes: int, assignment: Assignment, staging: Staging, target: Target, hardware: Hardware
) -> float:
    """Seconds of one transfer from each stage to the next."""
    axes = assignment.setting.axes
    array = Array("uint8", (nbytes,), 8)
    group = tuple(range(staging.stages))
    axis = staging.pipeline.axis
    one = Collective("collective-permute", (array,), (group,), (axis,), 1, "", 0, 0)
    return collective_s(one, links_of(target, hardware, axes)) or 0.0


def _gathered_s(assignment: Assignment, staging: Staging) -> float:
    """What lies in pieces over the stages is gathered for a step, and its gradients are summed."""
    setting, stage = assignment.setting, _bit_of(assignment, staging.pipeline.axis)
    if not stage:
        return 0.0
    nbytes = sum(_others(assignment, staging))
    return sum(
        float(nbytes * setting.rate_s_per_byte[kind][stage] + setting.delay_s[kind][stage])
        for kind in ("all-gather", "all-reduce")
    )


def _bit_of(assignment: Assignment, axis: str) -> int:
    names = [name for name, _ in assignment.setting.axes]
    return 1 << names.index(axis) if axis in names else 0


def _others(assignment: Assignment, staging: Staging) -> list[int]:
    """Bytes in one device of each parameter that is not of a block, whole over the stages."""
    return [
        _bytes_on_device(assignment, place)
        for place, tensor in enumerate(assignment.problem.graph.tensors)
        if tensor.role == "parameter" and tensor.path not in staging.block_paths
    ]


def _in_one_room(assignment: Assignment, staging: Staging, sections: Sequence[Section]) -> int:
    """Bytes in one device of parameters that are read after the blocks alone, whose gradients take
    the room of one that is read before them alone: see :class:`meshwright.stages.rooms.Rooms`."""
    graph, least = assignment.problem.graph, sum(staging.sent_bytes)
    read: dict[str, set[int]] = {"before": set(), "after": set(), "blocks": set()}
    for section, operation in zip(sections, graph.operations, strict=True):
        if section.phase == "forward":
            read[section.name].update(operation.operands)

    def kinds(places: set[int]) -> Counter[tuple[tuple[int, ...], int, int]]:
        tensors = [(place, graph.tensors[place]) for place in places]
        return Counter(
            (tuple(sorted(tensor.shape)), tensor.itemsize, _bytes_on_device(assignment, place))
            for place, tensor in tensors
            if tensor.role == "parameter" and tensor.path not in staging.block_paths
        )

    both = kinds(read["before"] - read["after"]) & kinds(read["after"] - read["before"])
    return sum(count * nbytes for (_, _, nbytes), count in both.items() if nbytes >= least)


# Bytes


def _resting(assignment: Assignment, staging: Staging) -> int:
    """State and inputs of a device. What is not of a block lies in pieces over the stages."""
    whole = 0
    for place, tensor in enumerate(assignment.problem.graph.tensors):
        if tensor.role in _RESTING:
            nbytes = _bytes_on_device(assignment, place)
            whole += nbytes // staging.stages if _is_cut(tensor, nbytes, staging) else nbytes
    return whole


def _is_cut(tensor: GraphTensor, nbytes: int, staging: Staging) -> bool:
    """Whether an array, of which a device has ``nbytes``, lies in pieces over the stages."""
    of = {"parameter": tensor.path, "slot": tensor.owner}.get(tensor.role)
    if of is None or of in staging.block_paths:
        return False
    divides = any(size % staging.stages == 0 for size in tensor.shape)
    return divides and nbytes > SMALL_ELEMENTS * tensor.itemsize


def _bytes_on_device(assignment: Assignment, place: int) -> int:
    """Bytes of an array of the graph in one device; of a micro-batch, if it has rows."""
    piece = assignment.problem.piece_of[place]
    memo = assignment.lay.memo  # thousands of arrays are of some hundred pieces
    key = "held", piece
    if key not in memo:
        memo[key] = resting_bytes(assignment.lay, assignment.problem.pieces[piece])
    return int(memo[key][0])


def _temporary(work: StageWork, staging: Staging, by_block: bool) -> int:
    """What a step holds beside state and inputs, as its loop over ticks does.

    That is what is in flight, gradients, what is not of a block whole, with its gradients, of which
    some have one room where no stage makes both, and what one pass keeps; then either the loss, or
    the gradients of a block before they are added.
    """
    runs, blocks = staging.pipeline.repeats, staging.blocks
    own, needed = work.own_bytes, work.needed
    result_bytes = blocks * sum(staging.sent_bytes) + (0 if by_block else needed)
    in_flight = _bytes_in_flight(staging, result_bytes, work.products)
    if staging.pipeline.does_remat:
        in_flight += result_bytes // runs + (needed // blocks if by_block else 0)
    others = 2 * work.other_bytes
    if staging.stages > 1 and staging.skips and not staging.shares_loss:
        others -= work.shared_bytes
    at_peak = own + others + _buffers(staging) + in_flight
    return at_peak + max(own // blocks, work.at_loss)


def _buffers(staging: Staging) -> int:
    """Inputs in flight, gradients that arrived, and what is on its way; XLA has one room for a
    result that leaves and a gradient that does."""
    ticking = staging.ticking
    count = ticking.slots + 1 + ticking.gradient_slots + 1 + 1
    count += staging.shares_loss * (ticking.loss_slots + 2)
    return count * sum(staging.sent_bytes)


def _bytes_in_flight(staging: Staging, result_bytes: int, products: int) -> int:
    """What stages keep of passes in flight that they do not compute again: ``result_bytes`` of each
    pass, and gradients of the results of ``products`` where those of weights wait."""
    if staging.pipeline.does_remat:
        return 0
    ticking = staging.ticking
    cuts = products if staging.table.splits_backward else 0
    total = (ticking.slots + (not staging.skips)) * result_bytes + ticking.cut_slots * cuts
    return total // staging.pipeline.repeats


def _activations(assignment: Assignment, sections: Sequence[Section]) -> tuple[int, int, int]:
    """Bytes of one micro-batch: of all results of products in the blocks of a stage, of those that
    its backward pass needs, and of the operation after the blocks that reads and writes most.

    What the model's own checkpoints compute again is not needed, but what follows on it is.
    """
    graph = assignment.problem.graph
    products = needed = widest = 0
    readers = _readers(graph)
    again = {tensor.twin for tensor in graph.tensors} - {None}
    for section, operation in zip(sections, graph.operations, strict=True):
        result_bytes = sum(_bytes_on_device(assignment, place) for place in operation.results)
        if section == ("blocks", "forward"):
            products += result_bytes if operation.flops else 0
            of_again = not again.isdisjoint(operation.operands)
            is_needed = (operation.flops or of_again) and any(
                r not in again and _is_bent(graph, readers, r) for r in operation.results
            )
            needed += result_bytes if is_needed else 0
        elif section.name == "after" and section.phase != "update":
            widest = max(widest, result_bytes + sum(
                _bytes_on_device(assignment, place)
                for place in operation.operands
                if graph.tensors[place].role == "activation"
            ))  # fmt: skip
    return products, needed, widest


_LINEAR = frozenset(  # whose gradients need no operand
    ("add", "sub", "neg", "convert_element_type", "reshape", "transpose", "broadcast_in_dim",
     "squeeze", "slice", "concatenate", "copy", "name", "optimization_barrier", "reduce_precision")
)  # fmt: skip


def _readers(graph: Graph) -> dict[int, list[Operation]]:
    readers: dict[int, list[Operation]] = defaultdict(list)
    for operation in graph.operations:
        for place in operation.operands:
            readers[place].append(operation)
    return readers


def _is_bent(graph: Graph, readers: Mapping[int, list[Operation]], place: int) -> bool:
    """Whether something of the block that is not linear is computed from a result, before it is
    added to what passes the block by."""
    for operation in readers[place]:
        if operation.kind not in _LINEAR:
            return True
        activations = [t for t in operation.operands if graph.tensors[t].role == "activation"]
        wide = [t for t in activations if graph.tensors[t].shape == graph.tensors[place].shape]
        if len(wide) < 2 and any(_is_bent(graph, readers, r) for r in operation.results):
            return True
    return False


def sent_bytes(sent: Sequence[object], pieces: int) -> tuple[int, ...]:
    """Bytes in one device of arrays with their rows split into this many pieces."""
    return tuple(
        math.prod(array.shape) * np.dtype(array.dtype).itemsize // pieces  # type: ignore[attr-defined]
        for array in sent
    )
