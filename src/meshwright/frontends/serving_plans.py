"""Plans for serving: mesh, layouts, stages, precision and batches of the forward pass."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import PlanError, TargetError
from ..planning.goals import OWN
from ..planning.search.plan import Plan, PlannedBatch, Reason, Serving
from ..planning.search.setting import UnknownTimesError
from ..planning.serving import ServingReport
from ..program import Program
from ..units import bytes_text, seconds_text
from .forwards import Forwards
from .serving_layouts import best_layouts, report_of
from .serving_question import Question, time_s_of
from .staged_plans import WITHOUT_STAGES

_WORTH = 1.1  # times as fast as a wider type, which a narrower one must be
_FREE = 1.1  # of the time of a batch, which a larger one may take before both are compiled
_MORE = 1.02  # times the rows per second of a smaller batch, which a larger one must have
_ROOM = 1.1  # times what a batch lacks, to look for a plan that has it


class _Served(NamedTuple):
    """A plan of the forward pass in one precision."""

    precision: str | None
    forwards: Forwards
    plan: Plan


def plan_serving(model: Any, inputs: Any, question: Question) -> tuple[Plan, Forwards]:
    """The best plan for serving a model, and its forward pass in the precision of the plan.

    Raises :class:`~meshwright.PlanError` where nothing fits in any precision.
    """
    candidates, faults = list[_Served](), dict[str | None, PlanError]()
    for precision in _precisions(model, question):
        forwards = Forwards(model, inputs, precision)
        try:
            candidates.append(_Served(precision, forwards, best_layouts(forwards, question)))
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
        plan = best_layouts(best.forwards, less)
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
    return report_of(
        served.forwards, served.plan, question, compile=is_compiled, rows=sorted(sizes)
    )


def _precisions(model: Any, question: Question) -> tuple[str | None, ...]:
    """Those to compare, wider types first.

    CPUs compute in float32 whatever the type, so that fewer bits are not faster there.
    """
    if (precisions := question.goal.precisions) is not None:
        return tuple(None if name == OWN else name for name in precisions)
    narrow = not isinstance(model, Program) and question.target.platform != "cpu"
    return (None, "bfloat16") if narrow else (None,)


# Batches


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
        if other.precision == best.precision:
            continue
        time_s, peak = time_s_of(other.plan.chosen), other.plan.chosen.held_bytes
        changes.append(
            f"{_named(other.precision)} takes {seconds_text(time_s)} and {bytes_text(peak)} at "
            f"best, on {_devices(other.plan.chosen.num_devices)}"
        )
    changes += [f"{_named(precision)} does not fit" for precision in faults]
    of = best.precision or "of the model"
    why = [Reason(f"precision {of}", tuple(changes))] if changes else []
    plan = best.plan
    if plan.chosen.pipeline is not None and WITHOUT_STAGES not in plan.named:
        why.append(Reason("stages", ("without them nothing fits",)))
    return tuple(why)


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _named(precision: str | None) -> str:
    return precision or "the model's own precision"
