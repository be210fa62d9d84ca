"""A dry run: what one training step costs on a machine that need not be there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import DataError, DoesNotFitError
from ..layouts.placement import Placement
from ..program import Batch
from ..targets import gpu
from ..targets.hardware import Hardware
from ..targets.target import Target, check_size
from .abstract_step import AbstractStep, HasSteps, abstract_step
from .ahead import Compiled, compile_abstract
from .blocks import Reduced, reduced
from .faults import tracing
from .pipelined.fitting import what_does_not_fit
from .reading import extended, read, refused
from .report import DryRun as DryRun
from .report import Memory as Memory
from .throughput import step_input

Blocks = Literal["auto", "whole", "few"]

_ON_THE_CHIP = (
    "all blocks were compiled: with one and two of them so little is held that most of it lies in "
    "the chip's own memory, which says nothing of more"
)


# Equal blocks from which on one and two compile faster than all of them: eight of a Transformer did
# not, on a TPU. XLA for GPUs compiles equal kernels once, and forty took little more than two.
_WORTH_IT = 16
_WORTH_IT_ON_GPUS = 64


def dry_run_of(
    model: Any, batch: Batch, strategy: HasSteps | Placement, target: Target, hardware: Hardware,
    blocks: Blocks, compile: bool, timeout_s: float,
) -> DryRun:  # fmt: skip
    """What :func:`meshwright.dry_run` says, of strategies that describe their step."""
    _check_devices(strategy, target)
    step = abstract_step(model, batch, strategy)
    if (staged := step.staged) is not None:
        staged.check_rows(step.batch)  # which else the compiled step alone would refuse
    if why := not_compiled(target, compile):
        if target.platform == "cuda":
            gpu.topology_of(target)  # raises for nodes that are not built
        report = _by_the_model(model, batch, strategy, step, target, hardware, why)
    else:
        report = _Compiler(step, target, hardware, timeout_s).report(blocks)
    report = replace(report, fed=step_input(batch, step.how.batches))
    if staged is None:
        return report
    report = replace(report, stages=staged.shares, ticks=staged.ticks)
    note = what_does_not_fit(report)
    return replace(report, notes=(*report.notes, note)) if note else report


def _by_the_model(
    model: Any,
    batch: Batch,
    strategy: HasSteps | Placement,
    step: AbstractStep,
    target: Target,
    hardware: Hardware,
    why: str,
) -> DryRun:
    """The planner's model alone, for which no compiler is needed."""
    from . import analytic
    from .pipelined.report import report_of

    if step.staged is not None:
        return report_of(batch, step, target, hardware, why)
    return analytic.report_of(model, batch, strategy, step, target, hardware, why)


def not_compiled(target: Target, is_asked: bool = True) -> str:
    """Why nothing is compiled, with what to do for it; empty where a compiler is asked."""
    if target.platform == "cuda" and gpu.compiler() is None:
        return gpu.NOT_INSTALLED.format(target)
    reason = "compile=False (--no-compile) was given; leave it out to have the step compiled for"
    return "" if is_asked else f"{reason} {target}"


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


@dataclass(frozen=True, eq=False)
class _Compiler:
    """Compiles a step, or one and two of its equal blocks, and reads what came of it."""

    step: AbstractStep
    target: Target
    hardware: Hardware
    timeout_s: float

    def report(self, blocks: str) -> DryRun:
        """The report, by the blocks that are worth compiling."""
        if blocks == "whole":
            return self._whole()
        with tracing(self.step.program.name):
            repeats, reason = reduced(self.step)
        if repeats is None:
            return self._whole(f"all blocks were compiled: {reason}" if reason else "")
        enough = _WORTH_IT_ON_GPUS if self.target.platform == "cuda" else _WORTH_IT
        few = blocks == "few" or repeats.count >= enough
        return self._of_blocks(repeats) if few else self._whole()

    def _whole(self, note: str = "") -> DryRun:
        """The report on the step as it is compiled."""
        try:
            report = read(self.step, self._compiled(self.step), self.hardware)
        except DoesNotFitError as error:
            report = refused(self.step, self.target, self.hardware, error)
        return replace(report, notes=(*report.notes, note)) if note else report

    def _of_blocks(self, repeats: Reduced) -> DryRun:
        """The report on the step of which one and two equal blocks are compiled."""
        fewer = [repeats.with_blocks(count) for count in (1, 2)]
        try:
            both = [self._compiled(step) for step in fewer]
        except DoesNotFitError as error:
            report = refused(self.step, self.target, self.hardware, error)
            note = f"this is of one or two of {repeats.count} equal blocks, and all need more"
            return replace(report, notes=(*report.notes, note))
        report = extended(self.step, repeats, fewer, both, self.hardware)
        return self._whole(_ON_THE_CHIP) if report is None else report

    def _compiled(self, step: AbstractStep) -> Compiled:
        return compile_abstract(step, self.target, timeout_s=self.timeout_s)
