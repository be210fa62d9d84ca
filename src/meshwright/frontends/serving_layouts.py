"""The best layouts and stages of a forward pass, and on how many devices."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import PlanError
from ..planning.dry_run import not_compiled
from ..planning.search.plan import Option, Plan
from ..planning.search.planner import plan_step
from ..planning.search.verification import DryRunOf, NoReport
from ..planning.serving import ServedBatch, ServingReport
from ..targets.parts import part_with, smaller_parts
from ..targets.target import Target
from .forwards import Forwards
from .serving_dry_runs import dry_run_of_serving
from .serving_question import Question
from .staged_forwards import served_pipeline
from .staged_plans import IN_STAGES, WITHOUT_STAGES, in_stages, stage_counts

_NEARLY = 0.75  # of what a device may hold, which weights take that leave too little beside them
_FULL = 0.97  # the same for a part of the target, of which no layout is looked for
_WORSE = 2  # counts of devices one after the other that are worse than fewer, before none is tried


def best_layouts(forwards: Forwards, question: Question) -> Plan:
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
        report = report_of(forwards, plan, question, compile=False, rows=rows, is_rough=True)
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
        return report_of(forwards, candidate, question, compile=True, rows=rows).batches[0].report

    return report


def report_of(
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
    return dry_run_of_serving(
        forwards,
        plan.placement(),
        served_pipeline(plan),
        part or question.target,
        question.hardware,
        rows=rows,
        compile=compile and part is not None,
        timeout_s=question.timeout_s,
        is_rough=is_rough,
        is_named=False,
    )
