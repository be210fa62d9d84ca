"""A dry run of serving: what the forward pass takes on machines that need not be there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import jax

from ..errors import DoesNotFitError, PlanError
from ..program import TrainState
from ..targets.hardware import Hardware
from ..targets.target import Target
from ..units import bytes_text, seconds_text
from .abstract_step import AbstractStep
from .ahead import compile_abstract
from .analytic.report import report_of_graph
from .dry_run import not_compiled
from .faults import tracing_forward
from .graph import Graph
from .prices import price_of
from .reading import read, refused
from .report import DryRun

if TYPE_CHECKING:
    from .serving_stages import ServedStage

_BUSY = 0.8  # of the time of a device that a load may take, for requests come unevenly
# A request wakes the thread of the batches, its answer wakes the caller, and what is done in Python
# on the way takes as long again.
HANDOVERS = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardStep(AbstractStep):
    """The forward pass alone, with weights and inputs as shapes that lie on a mesh."""

    @classmethod
    def of(cls, step: AbstractStep) -> ForwardStep:
        """The forward pass of a training step."""
        parts = {field.name: getattr(step, field.name) for field in fields(step)}
        return cls(**parts)

    @property
    def jitted(self) -> Any:
        return self._forward

    @functools.cached_property
    def _forward(self) -> Any:
        predict = self.predict_step

        def forward(whole: TrainState, batch: Any) -> Any:
            with tracing_forward(self.program.name, batch):
                return predict(whole.params, whole.state, batch)

        return jax.jit(forward)

    @property
    def has_gradients(self) -> bool:
        return False


@dataclass(frozen=True)
class ServedBatch:
    """A size of batch: how long one takes, and the dry run that says so.

    Of a model in ``stages`` the latency is that of all of them, one after the other, and ``report``
    is the dry run of the stage that takes the most memory.
    """

    rows: int
    latency_s: float | None
    report: DryRun = field(repr=False)
    stages: tuple[ServedStage, ...] = field(default=(), repr=False)

    @property
    def bottleneck(self) -> ServedStage | None:
        """The slowest stage, for which all others wait; ``None`` where there are none, or times are
        not known."""
        times = {stage.number: stage.busy_s for stage in self.stages if stage.busy_s is not None}
        if not times or len(times) < len(self.stages):
            return None
        return self.stages[max(times, key=lambda number: times[number])]

    @property
    def interval_s(self) -> float | None:
        """Seconds from one batch to the next: all of its latency, or that of the slowest stage."""
        return self.bottleneck.busy_s if self.bottleneck else self.latency_s

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second of one copy of the model, batch after batch."""
        return self.rows / self.interval_s if self.interval_s else None


@dataclass(frozen=True)
class Load:
    """What a load takes: copies of the model, each on its mesh, and the rows of a batch."""

    rows: int
    copies: int
    devices: int
    latency_s: float

    def __str__(self) -> str:
        return (
            f"{self.devices} devices: {self.copies} cop{'y' if self.copies == 1 else 'ies'} of the "
            f"model, batches of {self.rows} rows in {seconds_text(self.latency_s)}"
        )


@dataclass(frozen=True)
class ServingReport:
    """What serving a model takes on a target; ``print`` it.

    ``name`` is the model's, ``axes`` has the name and size of each axis of the mesh on the
    ``target``, and ``batches`` one entry per size of batch. Bytes are those of one device and
    exact; times are those of the roofline, without queue and network, and with what the server does
    besides where the hardware was measured (:func:`~meshwright.calibrate`). Of a model in stages
    bytes are those of the device that holds the most, and each batch has its ``stages``. ``notes``
    say what is taken to be so.

    >>> import jax, meshwright as mw
    >>> with mw.abstract():
    ...     import keras
    ...     model = keras.Sequential([keras.Input([64]), keras.layers.Dense(32)])
    >>> x, strategy = jax.ShapeDtypeStruct((1, 64), "float32"), mw.Sharded(mw.Mesh({"batch": 4}))
    >>> report = mw.dry_serve(model, x, strategy=strategy, target="h100:4", compile=False)
    >>> report.weight_bytes, [batch.rows for batch in report.batches], report.fits
    (8320, [1, 8, 32], True)
    """

    name: str
    target: Target
    axes: tuple[tuple[str, int], ...]
    batches: tuple[ServedBatch, ...]
    notes: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Parameters and state of one device; of stages, of the one that holds the most."""
        first = self.batches[0]
        if first.stages:
            return max(stage.weight_bytes for stage in first.stages)
        memory = first.report.memory
        return memory.parameter_bytes + memory.state_bytes

    @property
    def fits(self) -> bool | None:
        """Whether every batch fits into a device; ``None`` where that is not known."""
        answers = [batch.report.fits for batch in self.batches]
        return None if None in answers else all(answers)

    def devices_for(self, rows_per_s: float, p99_s: float | None = None) -> Load:
        """The fewest devices for a rate of rows, none of which waits for long.

        A request may wait for the batch before it, and then for its own. Raises
        :class:`~meshwright.PlanError` where no batch is fast enough, or times are not known.
        """
        size = math.prod(count for _, count in self.axes)
        loads = []
        for batch in self.batches:
            if batch.latency_s is None or batch.interval_s is None or not batch.rows_per_s:
                continue
            if batch.report.fits is False:
                continue
            if p99_s is None or batch.interval_s + batch.latency_s <= p99_s:
                copies = max(math.ceil(rows_per_s / (_BUSY * batch.rows_per_s)), 1)
                loads.append(Load(batch.rows, copies, copies * size, batch.latency_s))
        if not loads:
            limit = "" if p99_s is None else f" within {seconds_text(p99_s)}"
            self._check_times()
            if self.fits is False and not any(b.report.fits for b in self.batches):
                raise PlanError(
                    f"no batch of {self.name!r} fits into a device of {self.target}. Cut the model "
                    "into more pieces, or serve fewer rows in a batch."
                )
            times = ", ".join(time_text(batch.latency_s) for batch in self.batches)
            raise PlanError(
                f"no batch of {self.name!r} is answered{limit} on {self.target}: its times are "
                f"{times}. Cut the model into more pieces, or allow more time."
            )
        return min(loads, key=lambda load: (load.devices, load.latency_s))

    def _check_times(self) -> None:
        """Raise :class:`~meshwright.PlanError` where no time is known."""
        if any(batch.latency_s is not None for batch in self.batches):
            return
        target, kind = str(self.target), str(self.target).partition(":")[0]
        measured = (
            f"Measure them on the machine that serves: meshwright calibrate {target}, or "
            f"--hardware measured here; in Python hardware=mw.calibrate({target!r})."
            if self.target.platform == "cpu"
            else "Name a file of your own: --hardware mine.toml, or hardware=mw.load_hardware(...)."
        )
        raise PlanError(
            f"how long a batch of {self.name!r} takes on {target} is unknown, for there are no "
            f"hardware figures for {kind}. {measured}"
        )

    def price_per_million(self, per_device_hour: float | Mapping[str, float]) -> float | None:
        """The price of a million rows, in full batches of the cheapest size that fits.

        A table has the price by target (``"h100:8"``) or kind (``"h100"``). As in
        :meth:`devices_for`, devices are idle for a fifth of the time. ``None`` where no time is
        known, or nothing fits.
        """
        size = math.prod(count for _, count in self.axes)
        fitting = [batch for batch in self.batches if batch.report.fits is not False]
        rates = [_BUSY * batch.rows_per_s for batch in fitting if batch.rows_per_s]
        hour_price = price_of(self.target, per_device_hour)
        return 1e6 * hour_price * size / (3600 * max(rates)) if rates else None

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        why = self.batches[0].report.not_compiled
        lines = [
            f"{self.name} served on {self.target} ({axes})",
            *([f"estimated, nothing was compiled: {why}"] if why else []),
            f"weights of a device: {bytes_text(self.weight_bytes)}",
        ]
        for batch in self.batches:
            peak = batch.report.peak_bytes
            peak_text = "" if peak is None else f", {bytes_text(peak)} at the peak"
            rate = "" if batch.rows_per_s is None else f", {batch.rows_per_s:,.0f} rows/s"
            verdict = f", {batch.report.verdict}" if batch.report.verdict else ""
            lines.append(
                f"batch of {batch.rows}: {time_text(batch.latency_s)}{rate}{peak_text}{verdict}"
            )
            for stage in batch.stages:
                slowest = " (the bottleneck)" if stage is batch.bottleneck else ""
                lines.append(f"  {stage}{slowest}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def serving_report(
    steps: Sequence[tuple[int, ForwardStep]],
    target: Target,
    hardware: Hardware,
    *,
    compile: bool,
    timeout_s: float,
    graph_of: Callable[[int], Graph],
) -> ServingReport:
    """The report on the forward pass of batches of several sizes; ``graph_of`` gives the operations
    of one, for the planner's model where nothing is compiled."""
    why = not_compiled(target, compile)
    batches = []
    for rows, step in steps:
        graph = graph_of(rows) if why else None
        report = forward_report(step, target, hardware, graph, why, timeout_s)
        batches.append(ServedBatch(rows, _latency_s(report, hardware), report))
    _, first = steps[0]
    return ServingReport(first.program.name, target, first.placement.mesh.axes, tuple(batches))


def _latency_s(report: DryRun, hardware: Hardware) -> float | None:
    """The forward pass and what the server does besides, where that was measured."""
    if report.step_time_s is None:
        return None
    return report.step_time_s + HANDOVERS * (hardware.handover_s or 0.0)


def forward_report(
    step: ForwardStep,
    target: Target,
    hardware: Hardware,
    graph: Graph | None,
    why: str,
    timeout_s: float,
) -> DryRun:
    """The dry run of one forward pass: compiled, or by the model of its ``graph``, and ``why``."""
    if graph is not None:
        return report_of_graph(graph, step, target, hardware, why)
    try:
        return read(step, compile_abstract(step, target, timeout_s=timeout_s), hardware)
    except DoesNotFitError as error:
        return refused(step, target, hardware, error)


def time_text(seconds: float | None) -> str:
    """Seconds as text, also where they are not known.

    >>> time_text(0.002), time_text(None)
    ('2 ms', 'time unknown')
    """
    return "time unknown" if seconds is None else seconds_text(seconds)
