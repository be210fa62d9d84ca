"""From a step to a plan: search, name the axes, dry-run the best, tell why."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from ...errors import PlanError
from ...hlo.groups import Axes
from ...layouts.mesh import Mesh
from ...targets.hardware import Hardware, hardware_of
from ...targets.target import Target
from ...units import bytes_text, seconds_text
from ..abstract_step import AbstractStep
from ..graph import Graph
from ..traced_graph import notes_of_unknown
from .branch_and_bound import SearchResult, search_for
from .candidates import Candidate
from .choices import (
    DATA_PARALLEL,
    EVERY_REMAT,
    PIPELINE,
    Choices,
    Layouts,
    Remat,
    pipeline_text,
)
from .classics import Classics, classics
from .compact import Compact
from .facts import facts_of
from .infeasible import no_plan, none_in_time
from .plain_layouts import plainer
from .plan import Option, Plan, Reason
from .reasons import reasons
from .request import Objective, Request, Space
from .staged import AXIS, Found, PipelinesOf
from .verification import DryRunOf, verified


def plan_step(
    step: Graph | AbstractStep,
    target: Target | str,
    *,
    objective: Objective = "time",
    memory_limit: int | None = None,
    axes: Mesh | Mapping[str, int] | str | None = None,
    hardware: Hardware | None = None,
    zero: tuple[int, ...] = (0, 1, 2, 3),
    accumulate: tuple[int, ...] = (1, 2, 4, 8),
    remat: tuple[Remat, ...] = EVERY_REMAT,
    max_axes: int = 3,
    limit_s: float = 10.0,
    verify: int = 0,
    dry_run_of: DryRunOf | None = None,
    pipelines_of: PipelinesOf | None = None,
    explains: bool = True,
) -> Plan:
    """The best plan for a step on a target: mesh, axes of dims, ZeRO, micro-batches, remat.

    ``objective`` is ``"time"`` of a step or ``"memory"`` at the peak of one device. Nothing takes
    more than ``memory_limit`` bytes, which is a device's memory where it is left out. ``axes``
    fixes the mesh, else all up to ``max_axes`` axes are tried, of fewer devices too. ``zero``,
    ``accumulate`` and ``remat`` are what may be chosen. Data parallel, FSDP, tensor parallel
    and both together are looked at first: no plan is slower than one of them that fits. After
    ``limit_s`` seconds more the best so far is taken. With ``verify=k`` the best ``k`` are given to
    ``dry_run_of``, with less ZeRO, plain data parallel and FSDP beside them, and ranked by what it
    answers; where the best does not fit, others are, which hold less by the model. With
    ``pipelines_of``, where neither ``axes`` nor ``objective="memory"`` is asked for, pipelines are
    looked at in as many seconds again. One is chosen where it is faster than all else would be
    even if that hid all the communication that it can behind its compute, or where nothing else
    fits. Raises
    :class:`~meshwright.PlanError`, with the nearest miss and what would help, where nothing
    fits. Without ``explains`` that and the reasons of the plan are left out, which take as long
    again.

    >>> from ..graph import GraphDim, GraphTensor, Operation
    >>> dims = tuple(GraphDim(name, 1024, name) for name in ("batch", "in", "out"))
    >>> tensors = (GraphTensor("x", (0, 1), (1024, 1024), 4, "input"),
    ...            GraphTensor("w", (1, 2), (1024, 1024), 4, "parameter"),
    ...            GraphTensor("y", (0, 2), (1024, 1024), 4))
    >>> forward = Operation("dot_general", "dense", (0, 1), (2,), 2.0 * 1024**3, summed=(1,))
    >>> plan = plan_step(Graph(dims, tensors, (forward,)), "h100:4")
    >>> plan.axes, plan.rules
    ((('batch', 2), ('model', 2)), {'batch': ('batch',), 'out': ('model',)})
    """
    target = Target.of(target)
    hardware = hardware or hardware_of(target)
    _check(objective, memory_limit, verify, remat)
    graph = step if isinstance(step, Graph) else _graph_of(step)
    limit_bytes = hardware.memory_bytes if memory_limit is None else memory_limit
    space = Space(check_axes(axes, target), max_axes, axes is None, zero, accumulate, remat)
    keep, verify = max(2, verify), verify if dry_run_of is not None else 0
    request = Request(graph, target, hardware, objective, limit_bytes, space)
    question = _Question(request, keep, verify, limit_s, explains)
    fault, plans = None, list[Plan]()
    try:
        plans = question.plans()
    except PlanError as error:
        fault = error
    if pipelines_of is not None and axes is None and objective == "time":
        plans = question.with_pipelines(plans, pipelines_of)
    if not plans:
        assert fault is not None
        raise fault
    if dry_run_of is not None and verify:
        plans = verified(plans, dry_run_of, limit_bytes, question.plans_within)
    best = plans[0]
    return replace(best, runners_up=tuple(plan.chosen for plan in plans[1:]))


def _check(objective: str, memory_limit: int | None, verify: int, remat: Sequence[str]) -> None:
    """Raise :class:`~meshwright.PlanError` that lists every invalid argument."""
    faults = []
    if objective not in get_args(Objective):
        faults.append(
            "objective must be 'time', 'memory', 'latency' or 'throughput'; received "
            f"{objective!r}."
        )
    if memory_limit is not None and memory_limit < 1:
        faults.append(f"memory_limit must be 1 byte or more; received {memory_limit!r}.")
    if verify < 0:
        faults.append(f"verify must be a number of plans, 0 or more; received {verify!r}.")
    if not remat or not set(remat) <= set(EVERY_REMAT):
        faults.append(
            f"remat must list one or more of {', '.join(map(repr, EVERY_REMAT))}; "
            f"received {remat!r}."
        )
    if faults:
        raise PlanError("\n".join(faults))


def _graph_of(described: AbstractStep) -> Graph:
    from ..traced_graph import graph_of_step  # heavy, and not needed for graphs that are there

    return cast(Graph, graph_of_step(described))


def check_axes(axes: Mesh | Mapping[str, int] | str | None, target: Target) -> Axes | None:
    """The axes that are fixed. Raises :class:`~meshwright.PlanError` for more than the target."""
    if axes is None:
        return None
    if isinstance(axes, str):
        axes = Mesh.from_string(axes)
    pairs: Axes = tuple(axes.items()) if isinstance(axes, Mapping) else axes.axes
    size = 1
    for _, axis_size in pairs:
        size *= axis_size
    if size > target.num_devices or size < 1:
        raise PlanError(
            f"the mesh {dict(pairs)} takes {size} devices, and {target} has {target.num_devices}."
        )
    return pairs


_NEAR = 1.5  # times the best by the model, up to which a pipeline is worth a dry run


@dataclass(frozen=True)
class _Question:
    """What is planned; plans say that they were to keep to the limit of ``request``."""

    request: Request
    keep: int
    verify: int
    limit_s: float
    explains: bool

    def plans(self) -> list[Plan]:
        """The best plans; those that are verified, or all found.

        Raises :class:`~meshwright.PlanError` where there is none.
        """
        result, limit_bytes = self._search(self.request), self.request.limit_bytes
        if result.candidates:
            return self._plans(result, self.request)
        if limit_bytes is None or not result.is_proven:
            raise none_in_time(self._classics.values(), limit_bytes, self.limit_s)
        if not self.explains:
            limit = bytes_text(limit_bytes)
            raise PlanError(f"no layout keeps within {limit} on {self.request.target}.")
        raise no_plan(self.request, limit_bytes)

    def with_pipelines(self, plans: list[Plan], pipelines_of: PipelinesOf) -> list[Plan]:
        """The plans, with the best pipeline before or behind them and a note on which it is."""
        pipelines = pipelines_of(self.request, self.limit_s)
        if not pipelines:
            note = "no pipeline: none that fits was found"
            return [replace(plan, notes=(*plan.notes, note)) for plan in plans]
        options = [_option_of_pipeline(one) for one in pipelines]
        note = _no_pipeline(options[0], plans[0].chosen) if plans else ""
        if note:
            beside = (PIPELINE, options[0])
            noted = [
                replace(plan, notes=(*plan.notes, note), classics=(*plan.classics, beside))
                for plan in plans
            ]
            return self._worth_a_dry_run(noted, pipelines[0], options[0])
        best = self._plan_of_pipeline(pipelines[0], options, plans)
        return [best, *plans]

    def _worth_a_dry_run(self, plans: list[Plan], pipeline: Found, option: Option) -> list[Plan]:
        """With the pipeline, where dry runs decide and it is near enough to the best."""
        time_s, best_s = option.time_s, plans[0].chosen.time_s
        if not self.verify or time_s is None or best_s is None or time_s > _NEAR * best_s:
            return plans
        return [*plans, self._plan_of_pipeline(pipeline, [option], plans)]

    def _plan_of_pipeline(
        self, pipeline: Found, options: list[Option], others: Sequence[Plan]
    ) -> Plan:
        request, parallel = self.request, self._parallel
        problem, layouts = request.problem, pipeline.layouts
        why = _why_pipeline(pipeline, others)
        return Plan(
            target=str(request.target),
            hardware=request.hardware.name,
            objective=request.objective,
            limit_bytes=request.limit_bytes,
            chosen=options[0],
            runners_up=tuple(options[1:]),
            data_parallel=None if parallel is None else _option(parallel),
            layouts=_layouts(problem, layouts),
            inputs=tuple(t.path for t in request.graph.tensors if t.role == "input"),
            batch=_batch(problem, layouts),
            why=why,
            notes=(
                "estimate by the tick table: each tick is as long as its busiest stage, and "
                "collectives of a stage overlap with nothing; a dry run is more precise",
            ),
            is_proven=False,
            classics=tuple(
                (name, _option(other))
                for name, other in self._classics.items()
                if name != DATA_PARALLEL
            ),
        )

    def plans_within(self, limit_bytes: int) -> list[Plan]:
        """The best plans that hold at most ``limit_bytes``, if there are any."""
        within = replace(self.request, limit_bytes=limit_bytes)
        return self._plans(self._search(within), within)

    def _search(self, request: Request) -> SearchResult:
        return search_for(request, self.keep, self.limit_s, self._classics.values())

    def _plans(self, result: SearchResult, request: Request) -> list[Plan]:
        best = result.candidates
        if self.verify and best:
            best = best[: self.verify]
            best = [*best, *self._plainer(best, request)]
        return self._plans_from(best, result)

    def _plainer(self, best: Sequence[Candidate], request: Request) -> list[Candidate]:
        """What is verified beside the best, as far as the space has it."""
        layouts_of_best = {candidate.layouts for candidate in best}
        return [
            candidate
            for candidate in plainer(request, best[0], self._parallel)
            if candidate.layouts not in layouts_of_best
            and self._may_choose(candidate.layouts.choices)
        ]

    def _may_choose(self, choices: Choices) -> bool:
        space = self.request.space
        return choices.zero in space.zero and choices.remat in space.remat

    @functools.cached_property
    def _classics(self) -> Classics:
        return classics(self.request)

    @property
    def _parallel(self) -> Candidate | None:
        return self._classics.get(DATA_PARALLEL)

    def _plans_from(self, candidates: Sequence[Candidate], result: SearchResult) -> list[Plan]:
        request, parallel = self.request, self._parallel
        graph, target, problem = request.graph, request.target, request.problem
        plans = []
        for candidate in candidates:
            why: tuple[Reason, ...] = ()
            if self.explains and (self.verify or not plans):  # others are runners-up for good
                setting = request.setting(candidate.layouts.axes)
                why = reasons(problem, setting, candidate.layouts)
            plans.append(
                Plan(
                    target=str(target),
                    hardware=request.hardware.name,
                    objective=request.objective,
                    limit_bytes=request.limit_bytes,
                    chosen=_option(candidate),
                    runners_up=(),
                    data_parallel=None if parallel is None else _option(parallel),
                    layouts=_layouts(problem, candidate.layouts),
                    inputs=tuple(t.path for t in graph.tensors if t.role == "input"),
                    batch=_batch(problem, candidate.layouts),
                    why=why,
                    notes=(*notes_of_unknown(graph), *_notes(target, candidate, parallel, result)),
                    is_proven=result.is_proven,
                    classics=tuple(
                        (name, _option(other))
                        for name, other in self._classics.items()
                        if name != DATA_PARALLEL
                    ),
                )
            )
        return plans


def _option_of_pipeline(pipeline: Found) -> Option:
    option = _option_of(pipeline, pipeline.cost.step_time_s)
    return replace(option, accumulate=1, pipeline=pipeline.layouts.choices.pipeline)


def _no_pipeline(pipeline: Option, best: Option) -> str:
    """Why the pipeline is not chosen; empty where it is."""
    if pipeline.time_s is None or best.time_s is None:
        return "no pipeline: nothing is known of its time"
    least_s = max(best.compute_s or 0.0, best.communication_s or 0.0)
    if pipeline.time_s < least_s:
        return ""
    stages = dict(pipeline.axes)[AXIS]
    text = (
        f"no pipeline: the best, of {stages} stages, takes {seconds_text(pipeline.time_s)}, and "
        f"the plan {seconds_text(best.time_s)}"
    )
    if pipeline.time_s >= best.time_s:
        return text
    return f"{text}, or {seconds_text(least_s)} where its collectives hide behind compute"


def _why_pipeline(best: Found, others: Sequence[Plan]) -> tuple[Reason, ...]:
    layouts, cost = best
    pipeline = layouts.choices.pipeline
    assert pipeline is not None
    changes = [f"idle for {cost.idle_share:.0%} of the step"]
    if others and others[0].chosen.time_s is not None:
        changes.append(f"without it the best step takes {seconds_text(others[0].chosen.time_s)}")
    elif not others:
        changes.append("nothing else was found that fits")
    stages = dict(layouts.axes)[AXIS]
    name = f"pipeline of {stages} stages, {pipeline_text(pipeline)}"
    return (Reason(name, tuple(changes)),)


def _batch(problem: Compact, layouts: Layouts) -> tuple[str, ...]:
    return () if problem.batch is None else layouts.of(problem.units[problem.batch].family)


def _option(candidate: Candidate) -> Option:
    return _option_of(candidate, candidate.cost.time_s)


def _option_of(candidate: Candidate | Found, time_s: float | None) -> Option:
    layouts, cost = candidate
    return Option(
        axes=layouts.axes,
        rules=layouts.rules,
        zero=layouts.choices.zero,
        accumulate=layouts.choices.accumulate,
        remat=layouts.choices.remat,
        time_s=time_s,
        compute_s=cost.compute_s,
        communication_s=cost.communication_s,
        peak_bytes=cost.peak_bytes,
    )


def _layouts(problem: Compact, layouts: Layouts) -> tuple[tuple[str, Any], ...]:
    """The axes of each dim of every parameter and input; of a forward pass also of state that is
    split, as kernels of eight bits are."""
    along = [layouts.of(unit.family) for unit in problem.units]
    is_forward = not facts_of(problem.graph).has_backward
    lies = []
    for tensor in problem.graph.tensors:
        of_dims = tuple(() if dim is None else along[problem.unit_of[dim]] for dim in tensor.dims)
        is_split_state = is_forward and tensor.role == "state" and any(of_dims)
        if tensor.role in ("parameter", "input") or is_split_state:
            lies.append((tensor.path, of_dims))
    return tuple(lies)


def _notes(
    target: Target, candidate: Candidate, parallel: Candidate | None, result: SearchResult
) -> tuple[str, ...]:
    notes = []
    used = 1
    for _, size in candidate.layouts.axes:
        used *= size
    if used == 1 < target.num_devices:
        notes.append("one device is fastest: splitting costs more than it saves")
    elif used < target.num_devices:
        notes.append(
            f"{used} of {target.num_devices} devices are used: more devices are not faster, or do "
            "not divide the dims"
        )
    if parallel is None and target.num_devices > 1:
        notes.append("data parallel is left out: the batch does not divide")
    if not result.is_proven:
        notes.append("the search stopped at its time limit; raise limit_s= to search further")
    notes.append("estimate without overlap of compute and communication; a dry run is more precise")
    return tuple(notes)
