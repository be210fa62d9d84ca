"""How long a step would take by the planner's model: what its operations take, added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...hlo.costs import LayerCost
from ...hlo.links import links_of
from ...hlo.schedule import Clock, Times
from ...targets.hardware import Hardware
from ...targets.target import Target
from ..estimate import Estimate, Heavy, Sums, with_shares
from .deeds import Deed
from .laid import Laid

_HEAVIEST = 10
_ALWAYS = (
    "Nothing overlaps: collectives come on top of compute and memory traffic.",
    "Each operation takes the longer of its arithmetic and its memory traffic; elementwise work is "
    "taken to be done on the way where one operation alone reads it.",
    "Each array has a collective of its own, and a loss none; compilers send several together.",
)


def estimate_of(laid: Laid, deeds: Sequence[Deed], target: Target, hardware: Hardware) -> Estimate:
    """The estimate of a step, all of whose work is known."""
    links = links_of(target, hardware, laid.setting.axes)
    clock = Clock(hardware, target.platform, links)
    missing, times = laid.setting.missing, _times(deeds)
    talk = _communication(deeds)
    found = Estimate(
        target=target,
        hardware=hardware.name,
        flops=sum(each.done.flops for each in deeds),
        recompute_flops=sum(map(_again, deeds)),
        bytes=round(sum(each.done.bytes for each in deeds)),
        compute_s=None if missing else sum(each.done.flops_s for each in deeds),
        memory_s=None if missing else sum(each.done.bytes_s for each in deeds),
        communication_s=tuple((axes, None if missing else time_s) for axes, time_s in talk),
        waiting_s=times.waiting,
        overlap_s=0.0,
        step_time_s=times.length,
        mfu=None,
        bound_by=None,
        replicated_share=None,
        heaviest=_heaviest(deeds, bool(missing)),
        layers=_layers(deeds),
        assumptions=(*(f"{link}." for link in links if link.size > 1), *_ALWAYS),
        missing=missing,
        sums=_sums(deeds, target.num_devices, times),
        peak_flops_per_s=clock.peak("bfloat16", "") or clock.peak("float32", ""),
    )
    return with_shares(found)


def _sums(deeds: Iterable[Deed], count: int, times: Times) -> Sums:
    own = split = done = 0.0
    for each in deeds:
        own += 0.0 if each.phase == "recompute" else each.whole_flops
        split += (2 if each.again else 1) * each.whole_flops
        done += each.done.flops
    return Sums(own / count, split / count, done, times)


def _times(deeds: Iterable[Deed]) -> Times:
    """Where the time goes, one thing after the other."""
    times = Times()
    for each in deeds:
        of_flops = each.done.flops_s >= each.done.bytes_s
        times.compute += each.done.time_s if of_flops else 0.0
        times.memory += 0.0 if of_flops else each.done.time_s
        times.waiting += _talk_s(each)
    times.length = times.compute + times.memory + times.waiting
    return times


def _talk_s(deed: Deed) -> float:
    return sum(each.count * each.time_s for each in deed.done.said)


def _again(deed: Deed) -> float:
    """FLOPs that are done again for the backward pass."""
    if deed.phase == "recompute":
        return deed.done.flops
    return deed.done.flops / 2 if deed.again else 0.0


def _communication(deeds: Iterable[Deed]) -> tuple[tuple[tuple[str, ...], float], ...]:
    """Seconds over each set of axes, the longest first."""
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for deed in deeds:
        for each in deed.done.said:
            found[each.axes] += each.count * each.time_s
    return tuple(sorted(found.items(), key=lambda pair: -pair[1]))


def _heaviest(deeds: Iterable[Deed], is_timeless: bool) -> tuple[Heavy, ...]:
    every = [
        Heavy(
            name=each.variable,
            opcode=each.kind,
            layer=each.layer or each.variable,
            phase=each.phase,
            count=each.done.count,
            flops=each.done.flops,
            bytes=round(each.done.bytes),
            time_s=0.0 if is_timeless else each.done.time_s + _talk_s(each),
        )
        for each in deeds
    ]
    every.sort(key=lambda heavy: (-heavy.time_s, -heavy.flops, -heavy.bytes))
    return tuple(every[:_HEAVIEST])


def _layers(deeds: Iterable[Deed]) -> tuple[LayerCost, ...]:
    """The work of each layer, the most of it first."""
    flops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    nbytes: dict[str, float] = defaultdict(float)
    for each in deeds:
        again = _again(each)
        flops[each.layer]["recompute"] += again
        flops[each.layer][each.phase] += each.done.flops - again
        nbytes[each.layer] += each.done.bytes
    found = [
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
    return tuple(sorted(found, key=lambda layer: (-layer.flops, -layer.bytes)))
