"""How long a step would take by the planner's model: what its operations take, added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...hlo.costs import LayerCost
from ...hlo.links import links_of
from ...hlo.schedule import Clock, Times
from ...targets.hardware import Hardware
from ...targets.target import Target
from ..estimate import Estimate, Heavy, Sums, notes_of_groups, with_shares
from .assignment import Assignment
from .operation_costs import OperationCost

_HEAVIEST = 10
_ALWAYS = (
    "Nothing overlaps: collectives come on top of compute and memory traffic.",
    "Each operation takes the longer of its arithmetic and its memory traffic; elementwise work is "
    "taken to be done on the way where one operation alone reads it.",
    "Each array has a collective of its own, and a loss none; compilers send several together.",
)


def estimate_of(
    assignment: Assignment, costs: Sequence[OperationCost], target: Target, hardware: Hardware
) -> Estimate:
    """The estimate of a step, all of whose work is known."""
    links = links_of(target, hardware, assignment.setting.axes)
    clock = Clock(hardware, target.platform, links)
    missing, times = assignment.setting.missing, _times(costs)
    talk = _communication(costs)
    result = Estimate(
        target=target,
        hardware=hardware.name,
        flops=sum(cost.work.flops for cost in costs),
        recompute_flops=sum(map(_again, costs)),
        bytes=round(sum(cost.work.bytes for cost in costs)),
        compute_s=None if missing else sum(cost.work.flops_s for cost in costs),
        memory_s=None if missing else sum(cost.work.bytes_s for cost in costs),
        communication_s=tuple((axes, None if missing else time_s) for axes, time_s in talk),
        waiting_s=times.waiting,
        overlap_s=0.0,
        step_time_s=times.length,
        mfu=None,
        bound_by=None,
        replicated_share=None,
        heaviest=_heaviest(costs, bool(missing)),
        layers=_layers(costs),
        assumptions=(
            *(f"{link}." for link in links if link.size > 1),
            *_ALWAYS,
            *notes_of_groups((work.rate for work in assignment.problem.works), hardware),
        ),
        missing=missing,
        sums=_sums(costs, target.num_devices, times),
        peak_flops_per_s=clock.peak("bfloat16", "") or clock.peak("float32", ""),
    )
    return with_shares(result)


def _sums(costs: Iterable[OperationCost], count: int, times: Times) -> Sums:
    own = split = total = 0.0
    for cost in costs:
        own += 0.0 if cost.phase == "recompute" else cost.whole_flops
        split += (2 if cost.again else 1) * cost.whole_flops
        total += cost.work.flops
    return Sums(own / count, split / count, total, times)


def _times(costs: Iterable[OperationCost]) -> Times:
    """Where the time goes, one thing after the other."""
    times = Times()
    for cost in costs:
        of_flops = cost.work.flops_s >= cost.work.bytes_s
        times.compute += cost.work.time_s if of_flops else 0.0
        times.memory += 0.0 if of_flops else cost.work.time_s
        times.waiting += _talk_s(cost)
    times.length = times.compute + times.memory + times.waiting
    return times


def _talk_s(cost: OperationCost) -> float:
    return sum(collective.count * collective.time_s for collective in cost.work.collectives)


def _again(cost: OperationCost) -> float:
    """FLOPs that are done again for the backward pass."""
    if cost.phase == "recompute":
        return cost.work.flops
    return cost.work.flops / 2 if cost.again else 0.0


def _communication(costs: Iterable[OperationCost]) -> tuple[tuple[tuple[str, ...], float], ...]:
    """Seconds over each set of axes, the longest first."""
    result: dict[tuple[str, ...], float] = defaultdict(float)
    for cost in costs:
        for collective in cost.work.collectives:
            result[collective.axes] += collective.count * collective.time_s
    return tuple(sorted(result.items(), key=lambda pair: -pair[1]))


def _heaviest(costs: Iterable[OperationCost], is_timeless: bool) -> tuple[Heavy, ...]:
    every = [
        Heavy(
            name=cost.variable,
            opcode=cost.kind,
            layer=cost.layer or cost.variable,
            phase=cost.phase,
            count=cost.work.count,
            flops=cost.work.flops,
            bytes=round(cost.work.bytes),
            time_s=0.0 if is_timeless else cost.work.time_s + _talk_s(cost),
        )
        for cost in costs
    ]
    every.sort(key=lambda heavy: (-heavy.time_s, -heavy.flops, -heavy.bytes))
    return tuple(every[:_HEAVIEST])


def _layers(costs: Iterable[OperationCost]) -> tuple[LayerCost, ...]:
    """The work of each layer, the most of it first."""
    flops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    nbytes: dict[str, float] = defaultdict(float)
    for cost in costs:
        again = _again(cost)
        flops[cost.layer]["recompute"] += again
        flops[cost.layer][cost.phase] += cost.work.flops - again
        nbytes[cost.layer] += cost.work.bytes
    result = [
        LayerCost(
            layer=layer,
            forward_flops=of["forward"],
            backward_flops=of["backward"],
            recompute_flops=of["recompute"],
            other_flops=of["other"],
            bytes=round(nbytes[layer]),
        )
        for layer, of in flops.items()
    ]
    return tuple(sorted(result, key=lambda layer: (-layer.flops, -layer.bytes)))
