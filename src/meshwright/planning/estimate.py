"""How long a compiled step would take, from its schedule and what is known of the hardware.

``schedule.py`` says what takes how long; here it is summed up, with what was assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..equal_layers import short_list
from ..hlo.costs import Costs, LayerCost, Loop, Operation, read_costs
from ..hlo.links import links_of
from ..hlo.schedule import Clock, Times, run
from ..jaxprs.products import GROUPED
from ..targets.hardware import Hardware, has_measured_rates
from ..targets.target import Target
from ..units import flops_text, seconds_text
from ..views import Viewable
from .ahead import Compiled

_HEAVIEST = 10
_SHORT = 0.02  # of the model's FLOPs, which a compiled step may lack before that is an error
_NAMED = 3  # loops and kernels that a message names


@dataclass(frozen=True)
class Heavy:
    """An instruction and what it takes in one step, all its runs together."""

    name: str
    opcode: str
    layer: str
    phase: str
    count: int | None
    flops: float
    bytes: int
    time_s: float


@dataclass(frozen=True)
class Sums:
    """What an estimate's shares are made of; each adds up over the parts of a step.

    ``own_flops`` are the model's own in one device, ``split_flops`` with them what is computed
    again (``None`` where it is unknown), as if no two devices did the same; ``done_flops`` are
    those that a device does, without what the compiler runs twice. ``least_flops`` are the fewest
    that the model's own can come to in one device, ``elements`` what is computed besides products:
    compilers turn products of vectors into such. ``times`` is where the time goes.
    """

    own_flops: float
    split_flops: float | None
    done_flops: float
    times: Times = field(hash=False)
    least_flops: float | None = None
    elements: float = 0.0

    @property
    def is_short(self) -> bool:
        """Whether a device does less than its share of the model, which cannot be."""
        if self.least_flops is None:
            return False
        return self.done_flops + self.elements < (1.0 - _SHORT) * self.least_flops

    @property
    def replicated_share(self) -> float | None:
        if self.split_flops is None:
            return None
        return max(0.0, 1.0 - self.split_flops / self.done_flops) if self.done_flops else 0.0

    def mfu(self, peak_flops_per_s: float | None) -> float | None:
        if not self.times.length or not peak_flops_per_s:
            return None
        return self.own_flops / (self.times.length * peak_flops_per_s)


@dataclass(frozen=True)
class Estimate(Viewable):
    """What one step of one device would compute, move and take, by the numbers of a hardware.

    ``compute_s``, ``memory_s`` and ``communication_s`` (per set of mesh axes) are what each would
    take alone; ``waiting_s`` is the part of the communication that nothing hides and ``overlap_s``
    the rest. ``step_time_s`` is the length of the schedule. Times are ``None`` where a number of
    the hardware is missing; ``missing`` names those. ``mfu`` is the share of the peak that the
    model's own FLOPs would use: what is computed again for the backward pass does not count.
    ``unknown_loops`` end by a condition on values, and count once; of the kernels ``uncounted``
    nothing is known, and they take no time. ``errors`` says where a figure must be wrong: times and
    MFU are then ``None``. ``bound_by`` is ``"compute"``, ``"memory"``, ``"communication"`` or
    ``"instructions"`` (what each costs to begin): where most of the time goes.
    """

    target: Target
    hardware: str
    flops: float
    recompute_flops: float
    bytes: int
    compute_s: float | None
    memory_s: float | None
    communication_s: tuple[tuple[tuple[str, ...], float | None], ...]
    waiting_s: float | None
    overlap_s: float | None
    step_time_s: float | None
    mfu: float | None
    bound_by: str | None
    replicated_share: float | None
    heaviest: tuple[Heavy, ...] = field(repr=False)
    layers: tuple[LayerCost, ...] = field(repr=False)
    assumptions: tuple[str, ...] = field(repr=False)
    missing: tuple[str, ...] = ()
    sums: Sums | None = field(default=None, repr=False)
    peak_flops_per_s: float | None = field(default=None, repr=False)
    unknown_loops: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[str, ...]:
        """What in these figures must be wrong, with the values and a way out; empty if nothing."""
        return (_short_in_words(self),) if self.sums is not None and self.sums.is_short else ()

    @property
    def uncertain(self) -> tuple[str, ...]:
        """What was counted once, or not at all, as the compiled text does not say more."""
        result = []
        if self.unknown_loops:
            count = "counts" if len(self.unknown_loops) == 1 else "count"
            result.append(
                f"{_count(self.unknown_loops, 'loop')} of unknown length {count} once "
                f"({short_list(self.unknown_loops, _NAMED)}): FLOPs, bytes and times are at least "
                "those shown"
            )
        if self.uncounted:
            result.append(
                f"the work of {_count(self.uncounted, 'kernel')} is unknown and counts as nothing "
                f"({short_list(self.uncounted, _NAMED)})"
            )
        return tuple(result)


class Turns(NamedTuple):
    """Of a loop over the ticks of a pipeline, which runs ``times`` times and whose text has all
    branches: the ``share`` of them that is taken."""

    times: int
    share: float


_OF_STAGES = re.compile(r"(^|/)shard_map/(.*/)?while$")  # stages are taken by hand, and each loops


def _with_shares(costs: Costs, turns: Sequence[Turns]) -> Costs:
    """Costs with the branches that are taken in the loops over ticks, which come in this order."""
    to_come, program = list(turns), list[Operation | Loop]()
    for item in costs.program:
        is_of_ticks = isinstance(item, Loop) and _OF_STAGES.search(item.path)
        if isinstance(item, Loop) and is_of_ticks and to_come and item.trips == to_come[0].times:
            program.append(item.taking(to_come.pop(0).share))
        else:
            program.append(item)
    return replace(costs, program=tuple(program))


def estimate(
    compiled: Compiled,
    hardware: Hardware,
    *,
    model_flops: float | None = None,
    least_flops: float | None = None,
    recomputes: bool = True,
    turns: Sequence[Turns] = (),
) -> Estimate:
    """How long the step would take on such hardware, and why.

    ``model_flops`` are those of the step before it was split over devices
    (``step.flops.model_flops`` of its trace, what is computed again included): with them, ``mfu``
    leaves replicated work out and ``replicated_share`` says how much there is. ``least_flops`` are
    the fewest of them that a compiler can leave: a step with less was misread, and has no times
    (:attr:`Estimate.errors`). Unless ``model_flops`` ``recomputes``, it has nothing that is
    computed again. Of loops over ticks with ``turns``, a share is taken. Numbers that the hardware
    lacks are never made up.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> from meshwright.planning import compile_ahead
    >>> mesh = mw.Mesh({"batch": 8})
    >>> x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=mw.Layout(["batch", None],
    ...     mesh).sharding)
    >>> step = compile_ahead(jax.jit(lambda x: (x @ x.T).sum()), [x], "cpu:8")
    >>> guess = Hardware("guess", (("float32", 1e9),), memory_bandwidth_bytes_per_s=1e9)
    >>> found = estimate(step, guess)
    >>> found.flops, found.step_time_s, found.missing
    (32768.0, None, ('links.shared.bytes_per_s',))
    """
    costs = _with_shares(read_costs(compiled.text, compiled.axes), turns)
    links = links_of(compiled.target, hardware, compiled.axes)
    clock = Clock(hardware, compiled.target.platform, links)
    missing = _missing(costs, clock)
    times = run(costs.program, clock)
    begun_s = hardware.call_s or 0.0
    times.add(Times(length=begun_s, begun=begun_s), 1.0)
    split = None if model_flops is None else model_flops / compiled.target.num_devices
    again = costs.recompute_flops / costs.flops if costs.flops and recomputes else 0.0
    own = (costs.flops if split is None else split) * (1.0 - again)
    talk = _communication(costs, clock)
    spoken = sum(spent for _, spent in talk if spent is not None)
    summed = Estimate(
        target=compiled.target,
        hardware=hardware.name,
        flops=costs.flops,
        recompute_flops=costs.recompute_flops,
        bytes=costs.bytes,
        compute_s=_total(
            (clock.compute_s(operation), operation.times) for operation in costs.operations
        ),
        memory_s=_total(
            (clock.memory_s(operation), operation.times) for operation in costs.operations
        ),
        communication_s=talk,
        waiting_s=times.waiting,
        overlap_s=max(0.0, spoken - times.waiting),
        step_time_s=times.length,
        mfu=None,
        bound_by=None,
        replicated_share=None,
        heaviest=_heaviest(costs, clock),
        layers=costs.layers,
        assumptions=_assumptions(costs, clock, compiled.target),
        missing=missing,
        sums=Sums(
            own,
            split if recomputes else None,
            costs.done_flops,
            times,
            None if least_flops is None else least_flops / compiled.target.num_devices,
            sum(operation.times * operation.elements for operation in costs.operations),
        ),
        unknown_loops=costs.unknown_loops,
        uncounted=_of_users(costs.uncounted),
        peak_flops_per_s=clock.peak("bfloat16", "") or clock.peak("float32", ""),
    )
    return with_shares(summed)


def with_shares(estimate: Estimate) -> Estimate:
    """The estimate with what follows from its sums; without times where a number is missing, or
    where work is."""
    sums = estimate.sums
    if sums is None:
        return estimate
    if estimate.missing or sums.is_short:
        estimate = replace(estimate, waiting_s=None, overlap_s=None, step_time_s=None)
        return replace(estimate, replicated_share=sums.replicated_share)
    return replace(
        estimate,
        mfu=sums.mfu(estimate.peak_flops_per_s),
        bound_by=sums.times.bound_by,
        replicated_share=sums.replicated_share,
    )


def _total(parts: Iterable[tuple[float | None, float]]) -> float | None:
    total = 0.0
    for time_s, times in parts:
        if time_s is None:
            return None
        total += times * time_s
    return total


def _communication(costs: Costs, clock: Clock) -> tuple[tuple[tuple[str, ...], float | None], ...]:
    """Seconds of all collectives over each set of axes, the longest first."""
    groups: dict[tuple[str, ...], list[tuple[float | None, float]]] = {}
    for operation in costs.operations:
        for one in operation.collectives:
            if one.axes:
                groups.setdefault(one.axes, []).append((clock.talk_s(one), operation.times))
    sums = [(axes, _total(parts)) for axes, parts in groups.items()]
    return tuple(sorted(sums, key=lambda pair: -(pair[1] or 0.0)))


def _heaviest(costs: Costs, clock: Clock) -> tuple[Heavy, ...]:
    layers = []
    for operation in costs.operations:
        talk_s = sum(clock.talk_s(one) or 0.0 for one in operation.collectives)
        time_s = max(clock.compute_s(operation) or 0.0, clock.memory_s(operation) or 0.0, talk_s)
        n = operation.times
        layers.append(
            Heavy(
                name=operation.name,
                opcode=operation.opcode,
                layer=operation.layer,
                phase=operation.phase,
                count=operation.count,
                flops=n * operation.flops,
                bytes=round(n * operation.bytes),
                time_s=n * time_s,
            )
        )
    layers.sort(key=lambda heavy: (-heavy.time_s, -heavy.flops, -heavy.bytes))
    return tuple(layers[:_HEAVIEST])


# What is not known, and what is assumed


def _missing(costs: Costs, clock: Clock) -> tuple[str, ...]:
    """The numbers of the hardware without which the step has no time."""
    names: dict[str, None] = {}
    for operation in costs.operations:
        if clock.compute_s(operation) is None:
            names[f"peak_flops_per_s.{operation.dtype}"] = None
        if clock.memory_s(operation) is None:
            names["memory_bandwidth_bytes_per_s"] = None
        if any(clock.talk_s(one) is None for one in operation.collectives):
            slow = [link.link for link in clock.links if link.link.bytes_per_s is None]
            names |= {f"links.{link.kind}.bytes_per_s": None for link in slow}
    return tuple(names)


def _assumptions(costs: Costs, clock: Clock, target: Target) -> tuple[str, ...]:
    result = [f"{link}." for link in clock.links if link.size > 1]
    used = [link.link for link in clock.links if link.size > 1]
    if any(link.pattern == "ring" for link in used):
        result.append("Dims of the torus are closed to rings, and used in both directions.")
    late = dict.fromkeys(link.kind for link in used if link.latency_s is None)
    result += [f"The latency of {kind} is unknown and counts as zero." for kind in late]
    if clock.hardware.elements_per_s is None and not clock.hardware.rates:
        result.append("Elementwise work counts by the bytes that it moves.")
    if not clock.hardware.rates and has_measured_rates(target.kind):
        result.append(
            "Kernels run at published speeds, which real ones do not quite reach: "
            f"hardware=mw.hardware_of({target.kind!r}, measured=True) has measured ones."
        )
    result += notes_of_groups((operation.kind for operation in costs.operations), clock.hardware)
    if target.platform == "tpu" and any(
        operation.dtype == "float32" for operation in costs.operations
    ):
        result.append("float32 products run in bfloat16 passes: one, or 3 and 6 if asked for.")
    if target.platform == "cuda":
        result.append(
            "float32 products run as tensorfloat32 unless the highest precision is asked."
        )
    result += [
        f"Loop {loop!r} ends by a condition, and counts once." for loop in costs.unknown_loops
    ]
    result += [
        f"Unknown kernel {kernel}: its time counts as zero."
        for kernel in _of_users(costs.uncounted)
    ]
    return tuple(result)


def notes_of_groups(kinds: Iterable[str], hardware: Hardware) -> list[str]:
    """What a report says of convolutions in groups whose speed is not known: one note, or none.

    >>> from ..targets.hardware import hardware_of
    >>> notes_of_groups(["product", "grouped_convolution"], hardware_of("v5e"))
    ['Convolutions in groups, such as depthwise ones, count at the peak, and may take far longer: \
mw.calibrate measures them on such a machine.']
    """
    if GROUPED not in kinds or hardware.rate(GROUPED, 1.0) is not None:
        return []
    return [
        "Convolutions in groups, such as depthwise ones, count at the peak, and may take far "
        "longer: mw.calibrate measures them on such a machine."
    ]


def _of_users(kernels: Iterable[str]) -> tuple[str, ...]:
    """Without the compiler's own, of collectives that count."""
    return tuple(kernel for kernel in kernels if not kernel.startswith("AsyncCollective"))


# In words


def _short_in_words(estimate: Estimate) -> str:
    sums, devices = estimate.sums, estimate.target.num_devices
    assert sums is not None
    fact = (
        f"the compiled step has {flops_text(sums.done_flops)} in each of {devices} devices, "
        f"and the model needs {flops_text(sums.least_flops or 0.0)}: work is missing from "
        f"FLOPs and bytes, the step takes longer than {seconds_text(sums.times.length)}, and "
        "step time and MFU are not given"
    )
    if estimate.uncertain:
        return f"{fact}. {'; '.join(estimate.uncertain)}."
    return (
        f"{fact}. The compiler left products out, or they are written in a way that is not read. "
        "Compare the program in report.compiled.text, and report it as a bug if the products are "
        "there."
    )


def _count(names: Sequence[str], noun: str) -> str:
    return f"1 {noun}" if len(names) == 1 else f"{len(names)} {noun}s"
