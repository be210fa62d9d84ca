"""The schedule of a compiled step, run through on paper: what it takes, and what waits for what.

Each instruction takes as long as its arithmetic or its memory traffic, whichever is longer (the
roofline of Williams, Waterman and Patterson, 2009). A collective that the compiler splits into a
start and a done runs beside what lies between them; every other one is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..jaxprs.products import GROUPED, PRODUCTS
from ..targets.hardware import Hardware
from .collectives import Collective
from .costs import Loop, Operation
from .links import AxisLink, collective_s


@dataclass(frozen=True)
class Clock:
    """What things take on a hardware; ``None`` for what cannot be known."""

    hardware: Hardware
    platform: str
    links: Sequence[AxisLink]

    def peak(self, dtype: str, precision: str) -> float | None:
        """FLOP/s of a product as the platform runs it."""
        peaks = self.hardware.peak
        if self.platform == "tpu" and not dtype.startswith(("int", "float8")):
            result = peaks("bfloat16")  # one pass, of what is rounded, unless more is asked for
            passes = {"high": 3, "highest": 6}.get(precision, 1) if dtype == "float32" else 1
            return None if result is None else result / passes
        if self.platform == "cuda" and dtype == "float32" and precision != "highest":
            return peaks("tensorfloat32") or peaks("float32")
        if dtype.startswith("float8"):
            return peaks("float8")
        return peaks(dtype) or (peaks("float32") if self.platform == "cpu" else None)

    def flops_per_s(self, dtype: str, kind: str = "product") -> float | None:
        """FLOP/s of large products of a kind: as measured, and at most the peak."""
        return _least(self._rate(kind, dtype, math.inf), self.peak(dtype, ""))

    @property
    def bytes_per_s(self) -> float | None:
        """What large arrays are read and written with: as measured, and at most the bandwidth of
        the memory, for what is measured in a cache is faster."""
        rate = self.hardware.rate("memory", math.inf)
        return _least(rate, self.hardware.memory_bandwidth_bytes_per_s)

    def compute_s(self, operation: Operation) -> float | None:
        speed = self.peak(operation.dtype, operation.precision) if operation.flops else 1.0
        if speed is None:
            return None
        if operation.precision != "highest":  # the rates are those of the default
            speed = self._rate(operation.kind, operation.dtype, operation.flops) or speed
        transcendentals = operation.transcendentals
        return (
            operation.flops / speed
            + self._elements_s("arithmetic", operation.elements - transcendentals)
            + self._elements_s("transcendental", transcendentals)
        )

    def _rate(self, kind: str, dtype: str, flops: float) -> float | None:
        """FLOP/s as measured of such work; of a product of another shape, as of square ones, and
        of convolutions in groups, which no type makes fast, as in float32."""
        alike = kind if kind == GROUPED else _kind("product" if kind in PRODUCTS else kind, dtype)
        rate = self.hardware.rate(_kind(kind, dtype), flops)
        return self.hardware.rate(alike, flops) if rate is None else rate

    def _elements_s(self, kind: str, elements: int) -> float:
        speed = self.hardware.rate(kind, elements) or self.hardware.elements_per_s
        return elements / speed if speed else 0.0

    def memory_s(self, operation: Operation) -> float | None:
        speed = self.hardware.rate("memory", operation.bytes)
        speed = speed or self.hardware.memory_bandwidth_bytes_per_s
        if speed is None:
            return None if operation.bytes else 0.0
        return operation.bytes / speed

    def talk_s(self, collective: Collective) -> float | None:
        return collective_s(collective, self.links)


def _least(*speeds: float | None) -> float | None:
    """The lowest of those that are known."""
    return min((speed for speed in speeds if speed is not None), default=None)


def _kind(kind: str, dtype: str) -> str:
    """The kind of rates that work on elements of a type has."""
    return kind if dtype == "float32" else f"{kind}_{dtype}"


@dataclass
class Times:
    """How long a program took, and where the time went."""

    length: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    waiting: float = 0.0
    begun: float = 0.0  # what instructions cost to begin

    @property
    def bound_by(self) -> str:
        parts = {
            "compute": self.compute,
            "memory": self.memory,
            "communication": self.waiting,
            "instructions": self.begun,
        }
        return max(parts, key=lambda part: parts[part])

    def add(self, other: Times, times: float) -> None:
        self.length += times * other.length
        self.compute += times * other.compute
        self.memory += times * other.memory
        self.waiting += times * other.waiting
        self.begun += times * other.begun


def run(program: Sequence[Operation | Loop], clock: Clock) -> Times:
    """How long a schedule takes: a device computes one thing at a time, each set of axes carries
    one collective at a time, and copies between memories wait for each other."""
    timeline = _Timeline(clock, frozenset(e.ends for e in program if isinstance(e, Operation)))
    for item in program:
        if isinstance(item, Loop):
            trips = 1 if item.trips is None else item.trips
            timeline.spent.add(run(item.body, clock), item.share * trips)
            if item.share != 1.0:
                timeline.spent.add(run(_unchosen(item.body), clock), (1.0 - item.share) * trips)
        else:
            timeline.issue(item)
    return timeline.spent


def _unchosen(program: Sequence[Operation | Loop]) -> list[Operation | Loop]:
    """A schedule without what stands in branches."""
    return [
        replace(item, body=tuple(_unchosen(item.body))) if isinstance(item, Loop) else item
        for item in program
        if not item.is_chosen
    ]


class _Timeline:
    """The moments at which a device, its links and its memory are free again."""

    def __init__(self, clock: Clock, awaited: frozenset[str]) -> None:
        self.clock = clock
        self.awaited = awaited  # names of what a later instruction waits for
        self.spent = Times()
        self.free: dict[object, float] = {}  # axes, or the memory -> when they are
        self.ready: dict[str, float] = {}  # what was begun -> when it will be done

    def issue(self, operation: Operation) -> None:
        begin = self.clock.hardware.instruction_s or 0.0
        self.spent.length += begin
        self.spent.begun += begin
        talked = self._talk(operation)
        if operation.opcode == "copy-start":
            self.ready[operation.name] = self._occupy(
                "memory", self.clock.memory_s(operation) or 0.0
            )
        elif operation.opcode.endswith("-update"):
            self.ready[operation.name] = self.ready.get(operation.ends, 0.0)
        else:
            self._work(operation)
            if operation.ends:
                self._wait(self.ready.get(operation.ends, 0.0), operation.opcode != "copy-done")
        if operation.name in self.awaited and operation.collectives:
            self.ready[operation.name] = talked
        else:
            self._wait(talked, True)

    def _talk(self, operation: Operation) -> float:
        """When the collectives that begin here will be done."""
        return max(
            (self._occupy(c.axes, self.clock.talk_s(c) or 0.0) for c in operation.collectives),
            default=0.0,
        )

    def _occupy(self, what: object, time_s: float) -> float:
        self.free[what] = max(self.spent.length, self.free.get(what, 0.0)) + time_s
        return self.free[what]

    def _work(self, operation: Operation) -> None:
        compute, memory = (
            self.clock.compute_s(operation) or 0.0,
            self.clock.memory_s(operation) or 0.0,
        )
        self.spent.length += max(compute, memory)
        self.spent.compute += compute if compute >= memory else 0.0
        self.spent.memory += memory if memory > compute else 0.0

    def _wait(self, moment: float, is_talk: bool) -> None:
        waited = max(0.0, moment - self.spent.length)
        self.spent.length += waited
        if is_talk:
            self.spent.waiting += waited
        else:
            self.spent.memory += waited
