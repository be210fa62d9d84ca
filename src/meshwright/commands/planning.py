"""What ``meshwright dry-run`` and ``plan`` do: build a model as shapes, ask about a target."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .. import _compat
from ..display.text.changes import changes_text
from ..display.text.columns import Paragraphs
from ..equivalence.cases import Case, case_of, setups
from ..equivalence.faults import check_patterns
from ..equivalence.finding import find_build
from ..errors import BatchError, LayoutError, ModelError, PipelineError, PlanError
from ..frontends.dry_runs import dry_run
from ..frontends.inputs import inputs_of
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh, create_mesh
from ..layouts.placement import Placement
from ..planning import Target
from ..planning.changes import compare, notes
from ..planning.compiler_process import watching
from ..planning.goals import AIMS, Aim, ServingGoal
from ..planning.lock import Lock, lock_of
from ..planning.search.planner import check_axes
from ..program import Program
from ..stages.pipeline import Pipeline
from ..targets.hardware import hardware_of
from ..targets.target import check_size
from ..together import Faults
from ..topology import virtual_devices
from ..units import clock_text

if TYPE_CHECKING:
    from ..frontends.plans import Plan
    from ..planning.beside import Comparison
    from ..planning.dry_run import DryRun
    from ..planning.search.request import Objective
    from ..planning.serving import ServingReport
    from ..serving.options import Precision
    from ..targets.hardware import Hardware


_OF_STEPS = ("accumulate", "remat", "sums", "local")  # options that only training steps have


class DryRunOptions(NamedTuple):
    """The options of ``meshwright dry-run``."""

    build: str
    target: Target
    mesh: Mesh | None
    layouts: Mapping[str, Layout]
    zero: int | None
    batch_size: int | None
    options: Mapping[str, Any]
    compile: bool = True
    hardware: Hardware | str | None = None


def run(request: DryRunOptions, timeout_s: float, html_path: Path | None = None) -> DryRun:
    """The dry run of the model that ``build`` makes, on a mesh over all devices of a target.

    The report is written to ``html_path``, too, as a page for a browser.
    """
    return _saved(_case(request).dry_run(timeout_s, hardware=_hardware(request)), html_path)


def run_here(
    request: DryRunOptions, timeout_s: float, html_path: Path | None = None
) -> tuple[DryRun, Comparison]:
    """The same by the numbers of this machine, and beside it the step as it runs here.

    Raises :class:`~meshwright.TargetError` for GPUs and TPUs that are not here.
    """
    from ..frontends.measures import measure
    from ..targets.calibrate import calibrate

    case = _case(request, here=True)
    hardware = calibrate(request.target)
    report = _saved(case.dry_run(timeout_s, hardware=hardware), html_path)
    strategy = case.strategy.on(create_mesh(dict(case.mesh.axes)))
    return report, report.beside(measure(case.model, case.batch, strategy=strategy))


def run_serving(
    request: DryRunOptions,
    rows: Sequence[int],
    timeout_s: float,
    precision: Precision | None = None,
    pipeline: str | None = None,
) -> ServingReport:
    """What serving the model takes for batches of these sizes; the layouts are those of training,
    without what only that needs, and with ``pipeline`` in stages over that axis."""
    from ..frontends.dry_runs import dry_serve

    case = _case(request, serves=True, pipeline=pipeline)
    strategy = case.strategy
    if isinstance(strategy, Placement):
        strategy = strategy.serving(case.mesh)
    else:
        strategy = strategy.serving(case.mesh.abstract())
    how: dict[str, Any] = {"strategy": strategy, "target": request.target, "rows": rows}
    how["hardware"] = _hardware(request)
    how |= {"precision": precision, "compile": request.compile, "timeout_s": timeout_s}
    progress = _Progress(request.target)
    try:
        with watching(progress.show):
            return dry_serve(case.model, case.batch, **how)
    finally:
        progress.end()


def _hardware(request: DryRunOptions) -> Hardware | None:
    """The numbers to estimate by; ``None`` for the published ones."""
    if request.hardware == "measured":
        return _measured(request.target)
    return cast("Hardware | None", request.hardware)


def _measured(target: Target) -> Hardware:
    from ..targets.calibrate import calibrate

    return calibrate(target) if target.platform == "cpu" else hardware_of(target, measured=True)


def _check_measured(target: Target, hardware: Hardware | str | None) -> None:
    """Raise :class:`~meshwright.TargetError` for measured rates that are not known."""
    if hardware == "measured" and target.platform != "cpu":
        hardware_of(target, measured=True)


def _saved(report: DryRun, html_path: Path | None) -> DryRun:
    if html_path is not None:
        report.save(html_path)
    return report


class _Case(NamedTuple):
    """What is dry-run: a step, of a batch, or what is served, of inputs."""

    model: Any
    batch: Any
    strategy: Any
    mesh: Mesh
    target: Target
    compile: bool

    def dry_run(self, timeout_s: float, **more: Any) -> DryRun:
        """Its report; meanwhile the terminal shows that a compiler is running."""
        progress = _Progress(self.target)
        try:
            with watching(progress.show):
                return dry_run(
                    self.model,
                    self.batch,
                    strategy=self.strategy,
                    target=self.target,
                    compile=self.compile,
                    timeout_s=timeout_s,
                    **more,
                )
        finally:
            progress.end()


def _case(
    request: DryRunOptions, here: bool = False, serves: bool = False, pipeline: str | None = None
) -> _Case:
    """What the options of the command mean; with ``here`` the devices are made, too. With
    ``serves`` a model without a batch will do, and ``batch`` is what goes into it."""
    build, target, mesh, layouts, zero, batch_size, options, compile, hardware = request
    mesh = mesh or Mesh({"batch": target.num_devices})
    faults = Faults()
    with faults:
        check_size(mesh, target)
    with faults:
        _check_measured(target, hardware)
    options = dict(options) if zero is None else {**options, "zero": zero}
    if not _compat.jax_is_running() and not (here and target.platform != "cpu"):
        # An accelerator that is here, or its driver, is woken up only to be measured.
        virtual_devices(target.num_devices if here else 1)
    model = batch = strategy = None
    with faults:
        case = built_case(build, layouts, options, needs_batch=not serves)
        case = for_serving(case, mesh) if serves else case
        case = case if pipeline is None else by_stages(case, pipeline, mesh)
        model = case.model
        with faults:
            setup = setups(case, [mesh.abstract()])[0]
            strategy = _strategy(case, setup)  # also checks the options
            accumulate = setup.options.get("accumulate", 1)
            batch = (
                _served_inputs(case, batch_size)
                if serves
                else _micro_batch(case.batches[0], batch_size, accumulate)
            )
        if faults.errors:  # else the step itself finds these, and more
            check_patterns(case, mesh)
    faults.refuse()
    return _Case(model, batch, strategy, mesh, target, compile)


class _Progress:
    """Says on standard error that a compiler is at work, and on a terminal for how long."""

    def __init__(self, target: Target) -> None:
        self._words = f"compiling for {target} ..."
        self._is_said = False

    def show(self, elapsed_s: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{self._words} {clock_text(elapsed_s)} ")
        elif not self._is_said:
            sys.stderr.write(f"{self._words}\n")
        sys.stderr.flush()
        self._is_said = True

    def end(self) -> None:
        if self._is_said and sys.stderr.isatty():
            sys.stderr.write("\n")


def objective_of(
    objective: str, rows: Sequence[int] | None, precisions: Sequence[str], batch_size: int | None
) -> Objective | Aim | ServingGoal:
    """What :func:`meshwright.plan` takes as its objective.

    Raises :class:`~meshwright.PlanError` for options of the other kind of plans.
    """
    if objective in AIMS:
        if batch_size is not None:
            raise PlanError(f"--objective {objective} takes sizes of batches: use --rows.")
        return ServingGoal(cast(Aim, objective), rows or ServingGoal.rows, precisions or None)
    both = (("--rows", rows), ("--precision", precisions))
    if wrong := [name for name, value in both if value]:
        raise PlanError(
            f"{' and '.join(wrong)} need a plan for serving: --objective latency or throughput."
        )
    return cast("Objective", objective)


def choose(
    build: str,
    target: Target,
    mesh: Mesh | None,
    batch_size: int | None,
    objective: Callable[[], Objective | Aim | ServingGoal],
    hardware: Hardware | str | None = None,
    **how: Any,
) -> Plan:
    """The planner's layout of the model that ``build`` makes; layouts of its own are ignored.

    ``objective`` makes what :func:`meshwright.plan` takes, or raises; ``how`` is what else it
    takes.
    """
    from ..frontends.plans import plan

    if not _compat.jax_is_running():
        virtual_devices(1)
    faults, batch, case = Faults(), None, None
    goal: Objective | Aim | ServingGoal = "time"
    with faults:
        goal = objective()
    with faults:
        check_axes(mesh, target)
    with faults:
        _check_measured(target, hardware)
    serves = isinstance(goal, ServingGoal)
    with faults:
        case = built_case(build, {}, {}, needs_batch=not serves)
        if serves:
            batch = _served_inputs(case, batch_size)
        else:
            batch = _micro_batch(case.batches[0], batch_size, 1)
    faults.refuse()
    assert case is not None
    # What a CPU can do is not published, and without that no layout is faster than another.
    needs_times = target.platform == "cpu" and goal != "memory"
    if hardware == "measured" or (needs_times and hardware is None):
        hardware = _measured(target)
    return plan(
        case.model,
        batch,
        target=target,
        hardware=cast("Hardware | None", hardware),
        objective=goal,
        axes=mesh,
        **how,
    )


def checked(report: DryRun, before: Lock, tolerance: float | None) -> tuple[Paragraphs, bool]:
    """What changed since a lock file was written, to print, and whether any of it got worse."""
    now = lock_of(report)
    changes = compare(before, now, tolerance)
    is_worse = any(change.verdict == "worse" for change in changes)
    return changes_text(before, changes, notes(before, now)), is_worse


def built_case(
    build: str,
    layouts: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    needs_batch: bool = True,
) -> Case:
    """What ``build`` returns; a Keras model is made of shapes only."""
    from ..frontends.keras.abstract import abstract

    function = find_build(build)
    with abstract():
        built = function()
    case = case_of(built, layouts, options, needs_batch=needs_batch)
    if not isinstance(case.model, Program) and not hasattr(case.model, "compiled"):
        raise ModelError(
            f"build() must return a compiled Keras model or a Program; received a "
            f"{type(case.model).__name__}."
        )
    return case


def strategy_on(case: Case, mesh: Mesh) -> Any:
    """The rules of a case on a mesh of devices."""
    setup = setups(case, [mesh.abstract()])[0]
    return _strategy(case, replace(setup, mesh=mesh))


def for_serving(case: Case, mesh: Mesh) -> Case:
    """The case as it is served on a mesh: rows are whole where it has no axis ``batch``."""
    if "batch" in case.options or "batch" in mesh:
        return case
    return replace(case, options={**case.options, "batch": None})


def by_stages(case: Case, axis: str, mesh: Mesh | None) -> Case:
    """The case as it is served by stages over an axis of the mesh, without what only training has.

    Raises :class:`~meshwright.PipelineError` unless the mesh has the axis.
    """
    if mesh is None or axis not in mesh:
        axes = "no mesh was given" if mesh is None else f"the mesh is {mesh}"
        raise PipelineError(f"--pipeline {axis}: {axes}. Add the axis: --mesh {axis}=2.")
    options = {name: value for name, value in case.options.items() if name not in _OF_STEPS}
    stages = Pipeline(axis, micro_batches=mesh[axis])
    return replace(case, options={**options, "pipeline": stages})


def _served_inputs(case: Case, rows: int | None) -> Any:
    """The shapes of what goes into the model: of the batch that it is trained on, or as the model
    says. Raises :class:`~meshwright.ModelError` where neither is known."""
    batch = case.batches[0] if case.batch is not None and case.batches else None
    if isinstance(case.model, Program):
        batch = case.model.example if batch is None else batch
        if batch is None:
            raise ModelError(
                f"the inputs of program {case.model.name!r} are not known: let build() return "
                "(program, batch). Of a batch (x, y), x goes in, and any other batch as it is."
            )
    elif batch is None:
        from ..frontends.keras.forward import example_of

        return example_of(case.model)
    return _micro_batch(inputs_of(batch), rows, 1)


def _strategy(case: Case, setup: Any) -> Any:
    from ..frontends.keras import Sharded
    from ..step.options import StepOptions

    try:
        if not isinstance(case.model, Program):
            return Sharded(setup.mesh, setup.layouts, **setup.options)
        ways = {"accumulate", "remat", "sums", "pipeline"} & setup.options.keys()
        own = {k: v for k, v in setup.options.items() if k not in ways}
        how = StepOptions(**{k: setup.options[k] for k in ways})
        return Sharded.from_placement(Placement.of(setup.mesh, setup.layouts, **own), how)
    except TypeError as error:
        raise LayoutError(f"--option: {error}.") from error


def _micro_batch(batch: Any, rows: int | None, parts: int) -> Any:
    """The shapes of a batch of ``rows`` rows, or of the part of it that is taken at once."""
    import jax
    import numpy as np

    def shape(value: Any) -> Any:
        value = value if hasattr(value, "dtype") else np.asarray(value)
        if not value.shape:
            return jax.ShapeDtypeStruct((), value.dtype)
        count = rows or value.shape[0]
        if count % parts:
            raise BatchError(
                f"a batch of {count} rows does not divide into {parts} micro-batches; use "
                f"--batch-size {count // parts * parts or parts}."
            )
        return jax.ShapeDtypeStruct((count // parts, *value.shape[1:]), value.dtype)

    return jax.tree.map(shape, batch)
