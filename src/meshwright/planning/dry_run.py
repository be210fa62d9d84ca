"""A dry run: what one training step costs on a machine that need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ..errors import DataError, DoesNotFitError
from ..layouts.mesh import Mesh
from ..layouts.placement import Placement
from ..program import Batch
from ..targets import gpu
from ..targets.hardware import Hardware, hardware_of
from ..targets.target import Target, check_size
from .abstract_step import AbstractStep, HasSteps, abstract_step
from .ahead import compile_abstract
from .blocks import Reduced, reduced
from .faults import tracing
from .reading import extended, read, refused
from .report import DryRun as DryRun
from .report import Memory as Memory
from .throughput import fed

_ON_THE_CHIP = (
    "all blocks were compiled: with one and two of them so little is held that most of it lies in "
    "the chip's own memory, which says nothing of more"
)


# Equal blocks from which on one and two compile faster than all of them: eight of a Transformer did
# not, on a TPU. XLA for GPUs compiles equal kernels once, and forty took little more than two.
_WORTH_IT = 16
_WORTH_IT_ON_GPUS = 64


def dry_run(
    model: Any,
    batch: Batch,
    *,
    strategy: HasSteps | Placement,
    target: Target | str,
    mesh: Mesh | Mapping[str, int] | None = None,
    hardware: Hardware | None = None,
    blocks: Literal["auto", "whole", "few"] = "auto",
    compile: bool = True,
    timeout_s: float = 3600.0,
) -> DryRun:
    """What :func:`meshwright.dry_run` says, of strategies that describe their step."""
    target = Target.of(target)
    hardware = hardware or hardware_of(target)
    if mesh is not None:
        strategy = strategy.on(mesh if isinstance(mesh, Mesh) else Mesh(mesh))
    _check_devices(strategy, target)
    described = abstract_step(model, batch, strategy)
    report = _report(
        model, batch, strategy, described, target, hardware, blocks, compile, timeout_s
    )
    return replace(report, fed=fed(batch, described.how.accumulate))


def _report(
    model: Any,
    batch: Batch,
    strategy: HasSteps | Placement,
    described: AbstractStep,
    target: Target,
    hardware: Hardware,
    blocks: str,
    compile: bool,
    timeout_s: float,
) -> DryRun:
    if why := not_compiled(target, compile):
        from .analytic import report_of  # the planner's model, which a compiler needs not

        if target.platform == "cuda":
            gpu.topology_of(target)  # raises for nodes that are not built
        return report_of(model, batch, strategy, described, target, hardware, why)
    if blocks == "whole":
        return _whole(described, target, hardware, timeout_s)
    with tracing(described.program.name):
        repeats, reason = reduced(described)
    enough = _WORTH_IT_ON_GPUS if target.platform == "cuda" else _WORTH_IT
    if repeats is not None and blocks == "auto" and repeats.count < enough:
        return _whole(described, target, hardware, timeout_s)
    if repeats is None:
        whole = _whole(described, target, hardware, timeout_s)
        said = (f"all blocks were compiled: {reason}",) if reason else ()
        return replace(whole, notes=(*whole.notes, *said))
    return _of_blocks(described, repeats, target, hardware, timeout_s)


def not_compiled(target: Target, is_asked: bool = True) -> str:
    """Why nothing is compiled, with what to do for it; empty where a compiler is asked."""
    if target.platform == "cuda" and gpu.compiler() is None:
        return gpu.NOT_INSTALLED.format(target)
    said = "compile=False (--no-compile) was given; leave it out to have the step compiled for"
    return "" if is_asked else f"{said} {target}"


def _check_devices(strategy: HasSteps | Placement, target: Target) -> None:
    """Raise before anything is built: minutes are lost where it turns out at the end."""
    placement = strategy if isinstance(strategy, Placement) else _placement_of(strategy)
    check_size(placement.mesh, target)


def _placement_of(strategy: HasSteps) -> Placement:
    placement = getattr(strategy, "placement", None)
    if placement is None:
        raise DataError(
            "strategy= must be a mw.Sharded, mw.DataParallel, mw.Placement or a strategy of "
            f"keras.distribution with a device mesh; received a {type(strategy).__name__}."
        )
    return placement


def _whole(described: AbstractStep, target: Target, hardware: Hardware, timeout_s: float) -> DryRun:
    """The report on a step as it is compiled."""
    try:
        compiled = compile_abstract(described, target, timeout_s=timeout_s)
    except DoesNotFitError as error:
        return refused(described, target, hardware, error)
    return read(described, compiled, hardware)


def _of_blocks(
    described: AbstractStep, repeats: Reduced, target: Target, hardware: Hardware, timeout_s: float
) -> DryRun:
    """The report on a step of which one and two equal blocks are compiled."""
    fewer = [repeats.with_blocks(count) for count in (1, 2)]
    try:
        both = [compile_abstract(step, target, timeout_s=timeout_s) for step in fewer]
    except DoesNotFitError as error:
        report = refused(described, target, hardware, error)
        said = f"this is of one or two of {repeats.count} equal blocks, and all of them need more"
        return replace(report, notes=(*report.notes, said))
    report = extended(described, repeats, fewer, both, hardware)
    if report is not None:
        return report
    whole = _whole(described, target, hardware, timeout_s)
    return replace(whole, notes=(*whole.notes, _ON_THE_CHIP))
