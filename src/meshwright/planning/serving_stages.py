"""A dry run of serving by stages: each is a program of its own, on its own devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..hlo.collectives import Collective
from ..hlo.links import collective_s, links_of
from ..hlo.text import Array
from ..layouts.mesh import Mesh
from ..targets.hardware import Hardware
from ..targets.parts import part_with
from ..targets.target import Target
from ..units import bytes_text, seconds_text
from .dry_run import not_compiled
from .graph import Graph
from .report import DryRun
from .serving import HANDOVERS, ForwardStep, ServedBatch, ServingReport, forward_report, time_text

_NO_PART = (
    "a stage has {count} of the {whole} devices of {target}, and such a part of it is not "
    "known as a target, so its stages are not compiled"
)
_APART = (
    "the devices of a stage are taken to lie next to each other, which they do where {axis!r} is "
    "the first axis of the mesh: collectives within a stage may take longer here"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class StageStep(ForwardStep):
    """One stage of a forward pass; its program has only the weights that the stage reads.

    ``batch`` holds what the stage reads of the batch, and what enters it from the stage before;
    ``leaving`` is what it passes on, nothing of the last one. ``layer`` is the first weight that it
    is the first to read. ``like`` is the number of a stage before it that does the same to weights
    that lie alike, where no one asks for their names.
    """

    function: Callable[..., Any]
    leaving: tuple[Any, ...]
    layer: str
    like: int | None = None

    @functools.cached_property
    def _forward(self) -> Any:
        function = self.function
        layouts = [value.sharding for value in self.leaving] or None
        return jax.jit(
            lambda whole, batch: function(whole.params, whole.state, *batch), out_shardings=layouts
        )

    @property
    def received_bytes(self) -> int:
        """What one device receives of the stage before."""
        _, entering = self.batch
        return sum(
            math.prod(value.sharding.shard_shape(value.shape)) * value.dtype.itemsize
            for value in entering
        )


@dataclass(frozen=True)
class ServedStage:
    """One stage of a batch: the handover to it, how long it is busy, and its own dry run.

    ``layer`` is the first weight that it is the first to read. One of its devices takes
    ``receive_s`` seconds to receive ``received_bytes`` of the stage before. ``busy_s`` is how long
    a batch keeps the stage: to receive, to compute, and what the server does besides.
    """

    number: int
    layer: str
    received_bytes: int
    receive_s: float | None
    busy_s: float | None
    report: DryRun = field(repr=False)

    @property
    def weight_bytes(self) -> int:
        """Parameters and state of one of its devices."""
        return self.report.memory.parameter_bytes + self.report.memory.state_bytes

    def __str__(self) -> str:
        received = ""
        if self.number:
            took = "" if self.receive_s is None else f" in {seconds_text(self.receive_s)}"
            received = f", receives {bytes_text(self.received_bytes)}{took}"
        peak = self.report.peak_bytes
        peak_text = "" if peak is None else f", {bytes_text(peak)} at the peak"
        verdict = f", {self.report.verdict}" if self.report.verdict else ""
        return (
            f"stage {self.number}, from {self.layer}: {time_text(self.busy_s)}{received}, "
            f"{bytes_text(self.weight_bytes)} of weights{peak_text}{verdict}"
        )


def staged_report(
    steps: Sequence[tuple[int, Sequence[StageStep]]],
    mesh: Mesh,
    axis: str,
    target: Target,
    hardware: Hardware,
    *,
    compile: bool,
    timeout_s: float,
    graph_of: Callable[[int, int], Graph],
) -> ServingReport:
    """The report on batches of several sizes, each by the steps of its stages on one mesh.

    ``graph_of`` gives the operations of a batch of this size in the stage of this number, where
    nothing is compiled.
    """
    size = mesh.size // mesh[axis]
    part = part_with(target, size)
    why = not_compiled(target, compile)
    if part is None and not why:
        why = _NO_PART.format(count=size, whole=mesh.size, target=target)
    run = functools.partial(
        forward_report, target=part or target, hardware=hardware, why=why, timeout_s=timeout_s
    )
    between, batches = _Between(mesh, axis, target, hardware), []
    for rows, of_stages in steps:
        reports = list[DryRun]()
        for number, step in enumerate(of_stages):
            if step.like is None:
                graph = graph_of(rows, number) if why else None
                reports.append(run(step, graph=graph))
            else:
                reports.append(reports[step.like])
        stages = tuple(
            _stage(number, step, report, between)
            for number, (step, report) in enumerate(zip(of_stages, reports, strict=True))
        )
        batches.append(_batch(rows, stages, hardware))
    _, (first, *_) = steps[0]
    return ServingReport(first.program.name, target, mesh.axes, tuple(batches), between.notes)


@dataclass(frozen=True)
class _Between:
    """What lies between the stages."""

    mesh: Mesh
    axis: str
    target: Target
    hardware: Hardware

    @property
    def notes(self) -> tuple[str, ...]:
        """What is taken to be so, and may not be."""
        outer = self.mesh.axis_names[: self.mesh.axis_names.index(self.axis)]
        is_apart = any(self.mesh[axis] > 1 for axis in outer)
        return (_APART.format(axis=self.axis),) if is_apart else ()

    def seconds(self, nbytes: int) -> float | None:
        """How long each device takes to send so much to the one at its place in the next stage."""
        if not nbytes:
            return 0.0
        group = tuple(range(self.mesh[self.axis]))
        array = Array("uint8", (nbytes,), 8)
        one = Collective("collective-permute", (array,), (group,), (self.axis,), 1, "", 0, 0)
        return collective_s(one, links_of(self.target, self.hardware, self.mesh.axes))


def _stage(number: int, step: StageStep, report: DryRun, between: _Between) -> ServedStage:
    nbytes, busy_s = step.received_bytes, None
    receive_s = between.seconds(nbytes)
    if report.step_time_s is not None and receive_s is not None:
        busy_s = receive_s + report.step_time_s + (between.hardware.handover_s or 0.0)
    named = replace(report, name=f"{report.name}, stage {number}")
    return ServedStage(number, step.layer, nbytes, receive_s, busy_s, named)


def _batch(rows: int, stages: tuple[ServedStage, ...], hardware: Hardware) -> ServedBatch:
    """The stages of a batch in one; ``report`` is that of the one that takes the most memory."""
    times = [stage.busy_s for stage in stages if stage.busy_s is not None]
    latency_s = None
    if len(times) == len(stages):
        latency_s = sum(times) + HANDOVERS * (hardware.handover_s or 0.0)

    def need(stage: ServedStage) -> tuple[bool, int]:
        return stage.report.verdict == "does not fit", stage.report.peak_bytes or 0

    return ServedBatch(rows, latency_s, max(stages, key=need).report, stages)
