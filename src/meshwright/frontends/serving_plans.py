"""Plans for serving: mesh, layouts, stages, precision and batches of the forward pass."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import PlanError, TargetError
from ..layouts.mesh import Mesh
from ..planning.dry_run import not_compiled
from ..planning.goals import OWN, ServingGoal
from ..planning.search.plan import Option, Plan, PlannedBatch, Reason, Serving
from ..planning.search.planner import plan_step
from ..planning.search.setting import UnknownTimesError
from ..planning.search.verification import DryRunOf, NoReport
from ..planning.serving import ServedBatch, ServingReport, serving_report
from ..planning.serving_stages import staged_report
from ..program import Program
from ..targets.hardware import Hardware
from ..targets.parts import part_with, smaller_parts
from ..targets.target import Target
from ..units import bytes_text, seconds_text
from .forwards import Forwards
from .staged_forwards import StagedForwards, served_pipeline
from .staged_plans import IN_STAGES, WITHOUT_STAGES, in_stages, stage_counts

_WORTH = 1.1  # times as fast as a wider type, which a narrower one must be
_FREE = 1.1  # of the time of a batch, which a larger one may take before both are compiled
_MORE = 1.02  # times the rows per second of a smaller batch, which a larger one must have
_ROOM = 1.1  # times what a batch lacks, to look for a plan that has it
_NEARLY = 0.75  # of what a device may hold, which weights take that leave too little beside them
_FULL = 0.97  # the same for a part of the target, of which no layout is looked for
_WORSE = 2  # counts of devices one after the other that are worse than fewer, before none is tried


class _Served(NamedTuple):
    """A plan of the forward pass in one precision."""

    precision: str | None
    forwards: Forwards
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Question:
    """The request for a plan that serves."""

    target: Target
    goal: ServingGoal
    hardware: Hardware
    memory_limit: int | None = None
    axes: Mesh | Mapping[str, int] | str | None = None
    verify: int = 0
    limit_s: float = 10.0
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        faults = []
        if self.verify < 0:
            faults.append(f"verify must be a number of plans, 0 or more; received {self.verify!r}.")
        if self.memory_limit is not None and self.memory_limit < 1:
            faults.append(f"memory_limit must be 1 byte or more; received {self.memory_limit!r}.")
        if faults:
            raise PlanError("\n".join(faults))

    @property
    def planned_rows(self) -> int:
        """The batch that layouts are chosen for."""
        return min(self.goal.rows) if self.goal.aim == "latency" else max(self.goal.rows)

    @property
    def limit_bytes(self) -> int | None:
        """What a device may hold."""
        return self.hardware.memory_bytes if self.memory_limit is None else self.memory_limit

    def copies(self, plan: Plan) -> int:
        """How many copies of the model the target has room for."""
        return self.target.num_devices // plan.chosen.num_devices

    def rank(self, plan: Plan) -> float:
        """Less is better: seconds of a batch, or seconds of a row with all copies at work."""
        time_s = _time(plan.chosen)
        if time_s is None:
            return float("inf")
        if self.goal.aim == "latency":
            return time_s
        return (plan.chosen.interval_s or time_s) / self.copies(plan)


def plan_serving(model: Any, inputs: Any, question: Question) -> tuple[Plan, Forwards]:
    """The best plan for serving a model, and its forward pass in the precision of the plan.

    Raises :class:`~meshwright.PlanError` where nothing fits in any precision.
    """
    candidates, faults = list[_Served](), dict[str | None, PlanError]()
    for precision in _precisions(model, question):
        forwards = Forwards(model, inputs, precision)
        try:
            candidates.append(_Served(precision, forwards, _layouts(forwards, question)))
        except PlanError as error:
            faults[precision] = error
        except UnknownTimesError as error:
            raise TargetError(error.at_serving) from error
    if not candidates:
        lines = [f"{_named(precision)}: {error}" for precision, error in faults.items()]
        lines = lines if len(faults) > 1 else [str(next(iter(faults.values())))]
        raise PlanError("\n".join(lines))
    best = functools.reduce(
        lambda wider, other: (
            other if question.rank(wider.plan) > _WORTH * question.rank(other.plan) else wider
        ),
        candidates,
    )
    best, report = _fitting(best, question)
    best = best._replace(plan=_verified(best.plan, report, question))
    batches, left_out = _worthwhile(report, question)
    serving = Serving(question.planned_rows, question.copies(best.plan), best.precision, batches)
    why = _why(best, candidates, faults, question)
    notes = (*best.plan.notes, *left_out)
    plan = replace(
        best.plan,
        target=str(question.target),
        objective=question.goal.aim,
        serving=serving,
        why=(*best.plan.why, *why),
        notes=notes,
    )
    return plan, best.forwards


def _fitting(best: _Served, question: Question) -> tuple[_Served, ServingReport]:
    """The plan, and its dry run of serving; where a batch does not fit, another plan that holds as
    much less, if there is one."""
    report = _of_all_rows(best, question)
    limit, peaks = question.limit_bytes, [batch.report.peak_bytes or 0 for batch in report.batches]
    if limit is None or max(peaks) <= limit:
        return best, report
    less = replace(question, memory_limit=limit - math.ceil(_ROOM * (max(peaks) - limit)))
    try:
        plan = _layouts(best.forwards, less)
    except PlanError:
        return best, report
    other = best._replace(plan=replace(plan, limit_bytes=limit))
    again = _of_all_rows(other, question)
    fits = all((batch.report.peak_bytes or 0) <= limit for batch in again.batches)
    return (other, again) if fits else (best, report)


def _verified(plan: Plan, report: ServingReport, question: Question) -> Plan:
    """The plan with what a compiler said of its stages; others were compiled as they were found."""
    batch = next((b for b in report.batches if b.rows >= question.planned_rows), report.batches[-1])
    if not batch.stages or batch.report.is_analytic:
        return plan
    chosen = replace(
        plan.chosen,
        dry_run_time_s=batch.latency_s,
        dry_run_peak_bytes=batch.report.peak_bytes,
        interval_s=batch.interval_s,
    )
    return replace(plan, chosen=chosen)


def _of_all_rows(served: _Served, question: Question) -> ServingReport:
    """The dry run of the batches that are asked for, in sizes that a server rounds them to."""
    shards = math.prod(dict(served.plan.axes)[axis] for axis in served.plan.batch)
    sizes = {-(-rows // shards) * shards for rows in question.goal.rows}
    is_compiled = question.verify > 0
    return _report(served.forwards, served.plan, question, compile=is_compiled, rows=sorted(sizes))


def _precisions(model: Any, question: Question) -> tuple[str | None, ...]:
    """Those to compare, wider types first.

    CPUs compute in float32 whatever the type, so that fewer bits are not faster there.
    """
    if (precisions := question.goal.precisions) is not None:
        return tuple(None if name == OWN else name for name in precisions)
    narrow = not isinstance(model, Program) and question.target.platform != "cpu"
    return (None, "bfloat16") if narrow else (None,)


# Layouts


def _layouts(forwards: Forwards, question: Question) -> Plan:
    """The best layouts, and stages, for the batch that is planned for."""
    targets = [
        target
        for target in _parts(question)
        if target == question.target or _has_room(target, forwards.weight_bytes, question)
    ]
    searches = 2 if _may_have_stages(forwards, question) else 1
    within_stages = _WithinStages(forwards, question, question.limit_s / len(targets) / searches)
    best, worse = None, 0
    fault: PlanError | None = None
    others = list[Option]()
    for target in targets:
        try:
            plan, *rest = _ways(forwards, question, target, within_stages)
        except PlanError as error:
            fault = error
            continue
        others += [other.chosen for other in rest]
        if best is None or question.rank(plan) < question.rank(best):
            others += [] if best is None else [best.chosen]
            best, worse = plan, 0
            continue
        others.append(plan.chosen)
        worse += 1
        if worse == _WORSE:
            break
    if best is None:
        assert fault is not None
        raise fault
    return _beside_others(best, others, question)


def _beside_others(best: Plan, others: Sequence[Option], question: Question) -> Plan:
    """The plan with the best of what else was looked at, and how it is with or without stages."""
    ranked = sorted(
        (*best.runners_up, *others),
        key=lambda option: question.rank(replace(best, chosen=option)),
    )
    distinct = {
        option.layouts: option for option in ranked if option.layouts != best.chosen.layouts
    }
    is_staged = best.chosen.pipeline is not None
    otherwise = [o for o in distinct.values() if (o.pipeline is not None) != is_staged]
    name = WITHOUT_STAGES if is_staged else IN_STAGES
    classics = (*best.classics, *((name, option) for option in otherwise[:1]))
    return replace(best, runners_up=tuple(distinct.values())[:2], classics=classics)


def _may_have_stages(forwards: Forwards, question: Question) -> bool:
    """Whether one device is too small for the weights, or nearly: else copies of the whole model
    are never worse."""
    if question.axes is not None or question.limit_bytes is None:
        return False
    return forwards.weight_bytes > _NEARLY * question.limit_bytes


@dataclass(frozen=True)
class _WithinStages:
    """Plans of a part of the target as one of several stages."""

    forwards: Forwards
    question: Question
    limit_s: float

    def __call__(self, part: Target, memory_limit: int) -> Plan:
        return self._alone if part.num_devices == 1 else self._plan(part, memory_limit)

    @functools.cached_property
    def _alone(self) -> Plan:
        """That of one device, which is the same for any number of stages."""
        target, limit_bytes = self.question.target, self.question.limit_bytes
        part = part_with(target, 1)
        assert part is not None
        assert limit_bytes is not None
        return self._plan(part, target.num_devices * limit_bytes)

    def _plan(self, part: Target, memory_limit: int) -> Plan:
        within = replace(self.question, memory_limit=memory_limit, verify=0)
        return _searched(self.forwards, within, part, self.limit_s, explains=False)


def _ways(
    forwards: Forwards, question: Question, target: Target, within_stages: _WithinStages
) -> list[Plan]:
    """Plans of one part of the target, the better first: whole, and in stages where one device does
    not hold the weights: in as many as fit for throughput, as few for latency."""
    limit_bytes, counts = question.limit_bytes, list[int]()
    if _may_have_stages(forwards, question):
        counts = sorted(stage_counts(target), reverse=question.goal.aim == "throughput")
    plans, faults = list[Plan](), list[PlanError]()
    try:
        plans.append(_searched(forwards, question, target, within_stages.limit_s))
    except PlanError as error:
        faults.append(error)

    def costed(plan: Plan) -> ServedBatch:
        rows = (question.planned_rows,)
        report = _report(forwards, plan, question, compile=False, rows=rows, is_rough=True)
        return report.batches[0]

    for count in counts:
        assert limit_bytes is not None
        try:
            plans.append(in_stages(count, target, limit_bytes, within_stages, costed))
            break  # each count is traced, and other parts of the target have others
        except PlanError as error:
            faults.append(error)
            if target != question.target:
                break
    if not plans:
        raise PlanError("\n".join(map(str, faults)))
    return sorted(plans, key=question.rank)


def _parts(question: Question) -> Iterator[Target]:
    """The devices that a copy may take: for throughput few first, as copies share no work."""
    if question.goal.aim == "throughput" and question.axes is None:
        yield from reversed(tuple(smaller_parts(question.target)))
    yield question.target


def _has_room(target: Target, weight_bytes: int, question: Question) -> bool:
    """Whether the weights, cut into pieces for all devices, leave anything beside them."""
    limit = question.limit_bytes
    return limit is None or weight_bytes <= _FULL * limit * target.num_devices


def _searched(
    forwards: Forwards, question: Question, target: Target, limit_s: float, *, explains: bool = True
) -> Plan:
    can_verify = question.verify and not not_compiled(target)
    alone = {"batch": 1} if target.num_devices == 1 else None
    return plan_step(
        forwards.graph(question.planned_rows),
        target,
        memory_limit=question.memory_limit,
        axes=question.axes or alone,
        hardware=question.hardware,
        zero=(0,),
        accumulate=(1,),
        remat=("none",),
        limit_s=limit_s,
        verify=question.verify,
        dry_run_of=_dry_run_of(forwards, question, target) if can_verify else None,
        explains=explains,
    )


def _dry_run_of(forwards: Forwards, question: Question, whole: Target) -> DryRunOf:
    def report(candidate: Plan) -> Any:
        if part_with(whole, candidate.mesh.size) is None:
            return NoReport()
        rows = (question.planned_rows,)
        return _report(forwards, candidate, question, compile=True, rows=rows).batches[0].report

    return report


# Batches


def _report(
    forwards: Forwards,
    plan: Plan,
    question: Question,
    *,
    compile: bool,
    rows: Iterable[int],
    is_rough: bool = False,
) -> ServingReport:
    """The dry run of serving by a plan."""
    part = part_with(question.target, plan.mesh.size)
    if (pipeline := served_pipeline(plan)) is not None:
        staged = StagedForwards(forwards, plan.placement(), pipeline, question.target, is_rough)
        return staged_report(
            [(count, staged.on(count)) for count in rows],
            plan.mesh,
            pipeline.axis,
            part or question.target,
            question.hardware,
            compile=compile and part is not None,
            timeout_s=question.timeout_s,
            graphs_of=staged.graphs,
        )
    steps = forwards.steps(plan.placement())
    return serving_report(
        [(count, forwards.on(steps, count)) for count in rows],
        part or question.target,
        question.hardware,
        compile=compile and part is not None,
        timeout_s=question.timeout_s,
        graph_of=forwards.graph,
    )


def _worthwhile(
    report: ServingReport, question: Question
) -> tuple[tuple[PlannedBatch, ...], tuple[str, ...]]:
    """The batches that are worth compiling, and why others are not."""
    limit_bytes, planned = question.limit_bytes, question.planned_rows
    batches = [
        PlannedBatch(
            batch.rows,
            batch.latency_s,
            batch.report.peak_bytes,
            batch.interval_s if batch.stages else None,
        )
        for batch in report.batches
    ]
    worthwhile, notes = list[PlannedBatch](), list[str]()
    for batch, larger in itertools.zip_longest(batches, batches[1:]):
        if batch.rows != planned and _is_over(batch, limit_bytes):
            why = f"it takes {bytes_text(batch.peak_bytes)} of a device"
        elif larger is not None and not _is_over(larger, limit_bytes) and _is_free(batch, larger):
            why = (
                f"it takes {seconds_text(batch.latency_s)}, and one of {larger.rows} "
                f"{seconds_text(larger.latency_s)}"
            )
        elif worthwhile and batch.rows != planned and _adds_nothing(batch, worthwhile[-1]):
            why = f"it answers no more rows per second than one of {worthwhile[-1].rows}"
        else:
            worthwhile.append(batch)
            continue
        notes.append(f"no batch of {batch.rows}: {why}")
    return tuple(worthwhile), tuple(notes)


def _is_over(batch: PlannedBatch, limit_bytes: int | None) -> bool:
    if batch.peak_bytes is None or limit_bytes is None:
        return False
    return batch.peak_bytes > limit_bytes


def _adds_nothing(batch: PlannedBatch, smaller: PlannedBatch) -> bool:
    if batch.rows_per_s is None or smaller.rows_per_s is None:
        return False
    return batch.rows_per_s <= _MORE * smaller.rows_per_s


def _is_free(batch: PlannedBatch, larger: PlannedBatch) -> bool:
    if batch.latency_s is None or larger.latency_s is None:
        return False
    return larger.latency_s <= _FREE * batch.latency_s


# Why


def _why(
    best: _Served,
    candidates: Sequence[_Served],
    faults: Mapping[str | None, PlanError],
    question: Question,
) -> tuple[Reason, ...]:
    """What the precision changes beside the others that were looked at."""
    changes = []
    for other in candidates:
        if other is best:
            continue
        time_s, peak = _time(other.plan.chosen), other.plan.chosen.held_bytes
        changes.append(
            f"{_named(other.precision)} takes {seconds_text(time_s)} and {bytes_text(peak)} at "
            f"best, on {_devices(other.plan.chosen.num_devices)}"
        )
    changes += [f"{_named(precision)} does not fit" for precision in faults]
    why = [Reason(f"precision {_named(best.precision)}", tuple(changes))] if changes else []
    plan = best.plan
    if plan.chosen.pipeline is not None and WITHOUT_STAGES not in plan.named:
        why.append(Reason("stages", ("without them nothing fits",)))
    return tuple(why)


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _named(precision: str | None) -> str:
    return precision or "of the model"


def _time(option: Option) -> float | None:
    return option.time_s if option.dry_run_time_s is None else option.dry_run_time_s
