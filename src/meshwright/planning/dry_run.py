"""A dry run: what one training step costs on a machine that need not be there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DoesNotFitError
from ..mesh import Mesh
from ..placement import Placed, Placement
from ..program import Batch, TrainState
from ..step.flops import model_flops
from . import gpu, tables
from .ahead import Compiled, compile_described, trace
from .alive import LiveTensor, alive_at_peak
from .described import Described, Describes, describe
from .estimate import Estimate, estimate
from .files import write
from .hardware import Hardware, hardware_of
from .hlo import parse
from .target import Target
from .traffic import Transfer, transfers

_TENSORS = 32  # that are kept of those alive at the peak


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
    def free_bytes(self) -> int | None:
        """What is left at the peak; below zero if the step does not fit."""
        if self.peak_bytes is None or self.available_bytes is None:
            return None
        return self.available_bytes - self.peak_bytes


@dataclass(frozen=True)
class DryRun:
    """What one training step would cost on a target; ``print`` it for tables.

    All bytes are those of one device. ``fits`` is ``None`` where the memory of a device is not
    known. ``collectives`` are in the order in which they are issued. ``tensors`` are the largest
    temporary arrays alive at the peak and ``alive_bytes`` is the sum of all, by our own reading of
    the schedule. ``refusal`` is what the compiler said of a step that does
    not fit, of which there is no more to tell. ``estimate`` says how long the step would take, by
    the numbers of ``hardware``. ``placed`` says where every variable lies and why.
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

    @property
    def fits(self) -> bool | None:
        """Whether a device has the memory for it."""
        if self.refusal:
            return False
        free = self.memory.free_bytes
        return None if free is None else free >= 0

    @property
    def peak_bytes(self) -> int | None:
        """The most that a device holds at one time, as the compiler says."""
        return self.memory.peak_bytes

    @property
    def parameter_bytes(self) -> int:
        return self.memory.parameter_bytes

    @property
    def slot_bytes(self) -> int:
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
    def bound_by(self) -> str | None:
        """Where most of the time would go: to compute, memory, communication."""
        return None if self.estimate is None else self.estimate.bound_by

    @property
    def unexpected(self) -> tuple[Transfer, ...]:
        """The collectives that nobody asked for."""
        return tuple(each for each in self.collectives if each.is_unexpected)

    def __str__(self) -> str:
        return tables.of_dry_run(self)

    def to_html(self) -> str:
        """The report as one HTML page that needs no network: sortable tables and pictures.

        >>> run = DryRun("net", Target.of("v5e:2x4"), (("batch", 8),), Memory(6, 12, 1, 1, 6))
        >>> run.to_html().startswith("<!DOCTYPE html>")
        True
        """
        from . import page  # which draws, and is not needed to compile

        return page.of_dry_run(self)

    def save(self, path: str | Path) -> None:
        """Write the page of :meth:`to_html`. Raises :class:`~meshwright.DataError` if it cannot."""
        write(path, self.to_html(), "the report")


def dry_run(
    model: Any,
    batch: Batch,
    *,
    strategy: Describes | Placement,
    target: Target | str,
    mesh: Mesh | Mapping[str, int] | None = None,
    hardware: Hardware | None = None,
    timeout_s: float = 3600.0,
) -> DryRun:
    """Compile the training step for a target, which need not be there, and read what it costs.

    ``model`` is a compiled Keras model, best built in :func:`~meshwright.abstract`, or a
    :class:`~meshwright.Program`. ``batch`` holds arrays ``(x, y)``, or what the program takes; only
    shapes and dtypes matter, so ``jax.ShapeDtypeStruct`` will do. With ``accumulate=k`` it is one
    of the step's ``k`` micro-batches. ``mesh`` takes the place of the strategy's, and ``hardware``
    that of what is known of the target's chips. A step that needs more memory than a device has
    gives a report that says so. Raises
    :class:`~meshwright.TargetError` for a target that does not go with the mesh, and
    :class:`~meshwright.CompileError` if the step does not compile.

    >>> import jax, keras, meshwright as mw
    >>> with mw.abstract():
    ...     model = keras.Sequential([keras.Input([64]), keras.layers.Dense(32, name="last")])
    ...     model.compile("adam", "mse")
    >>> strategy = mw.Sharded(mw.Mesh({"batch": 4, "model": 2}), {"last/kernel": [None, "model"]})
    >>> batch = [jax.ShapeDtypeStruct((16, features), "float32") for features in (64, 32)]
    >>> report = dry_run(model, tuple(batch), strategy=strategy, target="cpu:8")
    >>> report.parameter_bytes == 4 * (64 * 16 + 32)
    True
    """
    target = Target.of(target)
    hardware = hardware or hardware_of(target)
    if mesh is not None:
        strategy = strategy.on(mesh if isinstance(mesh, Mesh) else Mesh(mesh))
    described = describe(model, batch, strategy)
    try:
        compiled = compile_described(described, target, timeout_s=timeout_s)
    except DoesNotFitError as error:
        return refused(described, target, hardware, error)
    return read(described, compiled, hardware)


# Reading, pure


def read(described: Described, compiled: Compiled, hardware: Hardware) -> DryRun:
    """The report on a step that was compiled."""
    alive = alive_at_peak(parse(compiled.text))
    known = sizes(described)
    peak, peak_is = _peak(compiled)
    return DryRun(
        name=described.name,
        target=compiled.target,
        axes=compiled.axes,
        memory=Memory(
            **known,
            padding_bytes=compiled.argument_bytes - sum(known.values()) + known["gradient_bytes"],
            temporary_bytes=compiled.temporary_bytes,
            peak_bytes=peak,
            peak_is=peak_is,
            available_bytes=hardware.memory_bytes,
        ),
        collectives=transfers(compiled.collectives, arguments(described), described.placement),
        tensors=alive[:_TENSORS],
        alive_bytes=sum(each.nbytes for each in alive),
        estimate=estimate(compiled, hardware, model_flops=_model_flops(described, compiled.target)),
        notes=_notes(compiled.target),
        compiled=compiled,
        placed=described.placed,
        hardware=hardware,
    )


def refused(
    described: Described, target: Target, hardware: Hardware, error: DoesNotFitError
) -> DryRun:
    """The report on a step that the compiler found too large."""
    return DryRun(
        name=described.name,
        target=target,
        axes=described.mesh.axes,
        memory=Memory(
            **sizes(described),
            peak_bytes=error.needed_bytes,
            peak_is="what the compiler says it needs",
            available_bytes=error.available_bytes or hardware.memory_bytes,
        ),
        notes=_notes(target),
        refusal=error.breakdown,
        placed=described.placed,
        hardware=hardware,
    )


def sizes(described: Described) -> dict[str, int]:
    """The exact bytes of what a step takes, in one device, and of one gradient per parameter."""
    by_role = {"parameter": 0, "slot": 0}
    for each in described.placed:
        role = each.info.role if each.info.role in by_role else "state"
        by_role[role] = by_role.get(role, 0) + each.bytes_per_device
    updated = described.placement.with_zero(3 if described.placement.zero else 0)
    gradients = updated.place(each.info for each in described.placed)
    return {
        "parameter_bytes": by_role["parameter"],
        "slot_bytes": by_role["slot"],
        "state_bytes": by_role.get("state", 0),
        "input_bytes": _bytes_of_batch(described),
        "gradient_bytes": sum(p.bytes_per_device for p in gradients if p.info.role == "parameter"),
    }


def _model_flops(described: Described, target: Target) -> float | None:
    """FLOPs of the step as it was written, before it is split over devices."""
    traced = trace(described.jitted, (described.state, described.batch), target)
    return model_flops(traced.jaxpr)


def _bytes_of_batch(described: Described) -> int:
    import jax

    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(described.batch)
    )


def arguments(described: Described) -> Sequence[Placed | None]:
    """Which variable each argument of the compiled step is; ``None`` for those of the batch."""
    import jax

    by_path = [{each.info.path: each for each in described.placed}] * len(described.state)
    named = TrainState(
        *(
            {path: known[path] for path in part}
            for part, known in zip(described.state, by_path, strict=True)
        )
    )
    flat = jax.tree.leaves(named, is_leaf=lambda each: isinstance(each, Placed))
    return [*flat, *[None] * len(jax.tree.leaves(described.batch))]


def _peak(compiled: Compiled) -> tuple[int, str]:
    """XLA for CPU leaves temporary buffers out of its own figure; there they are added up."""
    if compiled.target.platform != "cpu":
        return compiled.peak_bytes, "the compiler's peak_memory_in_bytes"
    new = compiled.output_bytes - compiled.donated_bytes
    whole = compiled.argument_bytes + new + compiled.temporary_bytes
    return whole, "arguments, new outputs and temporaries of the compiler, added up"


def _notes(target: Target) -> tuple[str, ...]:
    if target.platform == "cuda":
        return (gpu.NOT_TUNED,)
    if target.platform != "cpu":
        return ()
    return ("compiled by XLA for CPU, which orders and fuses otherwise than for an accelerator",)
