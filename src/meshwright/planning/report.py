"""The result of a dry run, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, overload

from ..errors import DataError
from ..files import write
from ..hlo.peak import LiveTensor
from ..hlo.traffic import Transfer
from ..layouts.params import Placed
from ..targets.hardware import Hardware
from ..targets.target import Target
from ..views import Viewable, view_of
from .ahead import Compiled
from .beside import Comparison, Pair, beside
from .blocks import Blocks
from .estimate import Estimate
from .measurement import Measured
from .prices import price_of
from .throughput import Price, StepInput, per_s, price
from .verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from ..stages.shares import StageShare
    from ..stages.table import TickTable
    from .search.plan import Plan


MEMORY_NAMES = {
    "parameter_bytes": "parameters",
    "slot_bytes": "slots",
    "state_bytes": "other state",
    "input_bytes": "inputs",
    "padding_bytes": "padding of tiles",
    "temporary_bytes": "temporaries",
    "gradient_bytes": "gradients",
    "peak_bytes": "peak",
    "available_bytes": "available",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; ``None`` for what only a finished compilation tells.

    ``parameter_bytes``, ``slot_bytes``, ``state_bytes`` (batch statistics, seeds, metrics) and
    ``input_bytes`` are exact sizes of their pieces. ``padding_bytes`` is what the device's tiles
    add to them. ``gradient_bytes`` is the size of one gradient for each parameter, in the pieces
    that are updated; it is part of ``temporary_bytes`` to the extent that they live together.
    ``peak_bytes`` is the compiler's figure that ``peak_is`` names; ``available_bytes`` is what a
    device has, ``None`` where that is not known.
    """

    parameter_bytes: int
    slot_bytes: int
    state_bytes: int
    input_bytes: int
    gradient_bytes: int
    padding_bytes: int | None = None
    temporary_bytes: int | None = None
    peak_bytes: int | None = None
    peak_is: str = ""
    available_bytes: int | None = None

    @property
    def argument_bytes(self) -> int:
        """State and inputs as they are, without the device's padding."""
        return self.parameter_bytes + self.slot_bytes + self.state_bytes + self.input_bytes

    @property
    def figures(self) -> tuple[tuple[str, int | None], ...]:
        """Every figure under the name that tables give it."""
        return tuple((name, getattr(self, line)) for line, name in MEMORY_NAMES.items())

    @property
    def free_bytes(self) -> int | None:
        """What is left at the peak; below zero if the step does not fit."""
        if self.peak_bytes is None or self.available_bytes is None:
            return None
        return self.available_bytes - self.peak_bytes


@dataclass(frozen=True)
class DryRun(Viewable):
    """What one training step would cost on a target; ``print`` it for tables.

    ``name`` is the model's, ``axes`` has the name and size of each axis of the mesh on the
    ``target``. All bytes are those of one device. ``verdict`` is ``"fits"``, ``"may not fit"`` or
    ``"does not fit"``; ``fits`` is ``None`` where it may not, and where the memory of a device is
    not known. ``collectives`` are in the order in which they are issued. ``tensors`` are the
    largest temporary arrays alive at the peak and ``alive_bytes`` is the sum of all, by our own
    reading of the schedule. ``refusal`` is what the compiler said of a step that does not fit, of
    which no more is known. ``estimate`` says how long the step would take, by the numbers of
    ``hardware``. ``placed`` says where every variable lies and why. ``blocks`` is set where not all
    equal blocks of the model were compiled: the figures are extended then from one and two of them,
    and ``compiled`` is the step with two. Where nothing was compiled, ``not_compiled`` says why:
    then bytes of state and inputs are exact, and all else is what the planner's model says. ``fed``
    is what one step is fed with, for samples and tokens per second, and ``notes`` is what a reader
    should know about the figures. Of a pipeline, ``stages`` is what each stage has and ``ticks``
    the tick table.

    >>> import jax, jax.numpy as jnp, optax, meshwright as mw
    >>> shapes = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    >>> program = mw.jax_program(lambda p, x: jnp.mean((x @ p["w"]) ** 2), shapes, optax.sgd(0.1))
    >>> rows, where = jax.ShapeDtypeStruct((16, 64), "float32"), mw.Mesh({"batch": 8})
    >>> report = mw.dry_run(
    ...     program, rows, strategy=mw.Placement.of(where), target="h100:8", compile=False
    ... )
    >>> report.fits, report.parameter_bytes, report.is_analytic
    (True, 16384, True)
    """

    name: str
    target: Target
    axes: tuple[tuple[str, int], ...]
    memory: Memory
    collectives: tuple[Transfer, ...] = ()
    tensors: tuple[LiveTensor, ...] = ()
    alive_bytes: int = 0
    estimate: Estimate | None = None
    notes: tuple[str, ...] = ()
    refusal: str = field(default="", repr=False)
    compiled: Compiled | None = field(default=None, repr=False, compare=False)
    placed: tuple[Placed, ...] = field(default=(), repr=False)
    hardware: Hardware | None = field(default=None, repr=False)
    blocks: Blocks | None = None
    not_compiled: str = ""
    fed: StepInput | None = None
    stages: tuple[StageShare, ...] = field(default=(), repr=False)
    ticks: TickTable | None = field(default=None, repr=False)

    @property
    def is_analytic(self) -> bool:
        """Whether this is the planner's model alone, without a compiler."""
        return bool(self.not_compiled)

    @property
    def verdict(self) -> Verdict | None:
        """Whether a device has the memory for it: ``"may not fit"`` where nothing was compiled and
        the estimate is too near the limit for its error; ``None`` where the memory is not known.
        """
        if self.refusal:
            return "does not fit"
        peak, available = self.memory.peak_bytes, self.memory.available_bytes
        return verdict_of(peak, available, self.target, self.is_analytic)

    @property
    def fits(self) -> bool | None:
        """Whether a device has the memory for it; ``None`` where that is not known."""
        return None if self.verdict in (None, "may not fit") else self.verdict == "fits"

    @property
    def peak_bytes(self) -> int | None:
        """The most that a device holds at one time, as the compiler or else the model says."""
        return self.memory.peak_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters of one device."""
        return self.memory.parameter_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the optimizer's slots of one device."""
        return self.memory.slot_bytes

    @property
    def flops(self) -> float | None:
        """FLOPs of products and convolutions of one step, in one device."""
        return None if self.estimate is None else self.estimate.flops

    @property
    def step_time_s(self) -> float | None:
        """How long one step would take; ``None`` where too little is known of the hardware."""
        return None if self.estimate is None else self.estimate.step_time_s

    @property
    def mfu(self) -> float | None:
        """The share of the hardware's peak that the model's own FLOPs would use."""
        return None if self.estimate is None else self.estimate.mfu

    @property
    def replicated_share(self) -> float | None:
        """The share of all devices' FLOPs that another device computes as well; ``None`` where the
        model's own FLOPs are not known."""
        return None if self.estimate is None else self.estimate.replicated_share

    @property
    def errors(self) -> tuple[str, ...]:
        """What of the report must be wrong, in words; empty if nothing.

        A compiled step with fewer FLOPs than the model itself was not read in full: then
        ``step_time_s`` and ``mfu`` are ``None``.
        """
        return () if self.estimate is None else self.estimate.errors

    @property
    def samples_per_s(self) -> float | None:
        """Rows of the batch that all devices together would take in a second."""
        return per_s(None if self.fed is None else self.fed.rows, self.step_time_s)

    @property
    def tokens_per_s(self) -> float | None:
        """The same of tokens; ``None`` where the batch's first array is not integers by rows."""
        return per_s(None if self.fed is None else self.fed.tokens, self.step_time_s)

    def price(self, per_device_hour: float | Mapping[str, float]) -> Price:
        """What a step, a million samples and a million tokens cost, where a device costs so much.

        A table has the price by target (``"h100:8"``) or kind (``"h100"``). Raises
        :class:`~meshwright.DataError` for a price below zero, and where the time of a step is not
        known.
        """
        unit_price = price_of(self.target, per_device_hour)
        return price(unit_price, self.target.num_devices, self.step_time_s, self.fed)

    @property
    def bound_by(self) -> str | None:
        """Where most of the time would go: to compute, memory, communication."""
        return None if self.estimate is None else self.estimate.bound_by

    @property
    def unexpected(self) -> tuple[Transfer, ...]:
        """The unexpected collectives."""
        return tuple(collective for collective in self.collectives if collective.is_unexpected)

    @overload
    def beside(self, other: Measured) -> Comparison: ...
    @overload
    def beside(self, other: DryRun) -> Pair: ...
    def beside(self, other: Measured | DryRun) -> Comparison | Pair:
        """The figures beside what :func:`~meshwright.measure` saw, or beside those of another dry
        run, as of another layout; ``print`` it for a table.

        Raises :class:`~meshwright.DataError` for anything else.

        >>> run = DryRun("net", Target.of("cpu:8"), (("batch", 8),), Memory(6, 12, 1, 1, 6))
        >>> seen = Measured("net", "cpu", "cpu", run.axes, 6, 12, 1, 1, 40, "added up", (0.25,))
        >>> run.beside(seen).row("parameters").ratio
        1.0
        """
        if isinstance(other, DryRun):
            return Pair(self, other)
        if not isinstance(other, Measured):
            raise DataError(
                f"a dry run is shown beside what was measured or beside another dry run; received "
                f"something of type {type(other).__name__}. "
                "Give report.beside(mw.measure(model, batch, strategy=strategy))."
            )
        return beside(self, other)

    def to_html(self, plan: Plan | None = None) -> str:
        """The report as one HTML page that needs no network: sortable tables and pictures.

        ``plan`` is the one that the step was laid out by, whose alternatives are shown as well.
        Raises :class:`~meshwright.DataError` for something else in its place.

        >>> run = DryRun("net", Target.of("v5e:2x4"), (("batch", 8),), Memory(6, 12, 1, 1, 6))
        >>> run.to_html().startswith("<!DOCTYPE html>")
        True
        """
        from .search.plan import Plan

        if not isinstance(plan, Plan | None):
            raise DataError(
                f"the plan beside a report is a mw.Plan; received {plan!r}. "
                "One that lies in a file is read by mw.Plan.load(path)."
            )
        return self._page(plan)

    def save(self, path: str | Path, plan: Plan | None = None) -> None:
        """Write the page of :meth:`to_html`. Raises :class:`~meshwright.DataError` if it cannot."""
        write(path, self.to_html(plan), "the report")

    def save_trace(self, path: str | Path) -> None:
        """Write the time line as a trace, JSON that Perfetto and ``chrome://tracing`` open.

        Raises :class:`~meshwright.DataError` where there is no time line, as nothing was compiled
        or numbers of the hardware are missing, and if the file cannot be written.
        """
        write(path, view_of(self, "trace") or "", "the trace")
