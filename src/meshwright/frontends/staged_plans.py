"""Plans for serving in stages: each holds its part of the weights, on a part of the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..errors import PipelineError, PlanError
from ..planning.search.plan import Option, Plan
from ..planning.serving import ServedBatch
from ..stages.pipeline import Pipeline
from ..targets.parts import part_with
from ..targets.target import Target
from ..units import bytes_text

AXIS = "stage"
IN_STAGES, WITHOUT_STAGES = "in stages", "without stages"  # how a plan names the best others
_MOST = 16  # stages: each is traced, and a batch goes through all of them

Searched = Callable[[Target, int], Plan]  # on a part, with what a device of it may hold
Costed = Callable[[Plan], ServedBatch]


def stage_counts(target: Target) -> Iterator[int]:
    """Into how many stages the devices of a target can be cut, each a target of its own.

    >>> list(stage_counts(Target.of("h100:8"))), list(stage_counts(Target.of("v5e:2x2")))
    ([2, 4, 8], [2, 4])
    """
    count = 2
    while count <= min(_MOST, target.num_devices):
        if target.num_devices % count == 0 and part_with(target, target.num_devices // count):
            yield count
        count *= 2


def in_stages(
    count: int, target: Target, limit_bytes: int, searched: Searched, costed: Costed
) -> Plan:
    """The plan with ``count`` stages, each laid out on its part of the target.

    Raises :class:`~meshwright.PlanError` where a stage holds more than ``limit_bytes``, or where
    the model cannot be cut.
    """
    part = part_with(target, target.num_devices // count)
    assert part is not None
    try:
        within = searched(part, count * limit_bytes)
    except PlanError as error:
        raise PlanError(
            f"{count} stages: more than {bytes_text(limit_bytes)} of a device in every layout"
        ) from error
    plan = _cut(within, count, limit_bytes)
    try:
        batch = costed(plan)
    except PipelineError as error:
        raise PlanError(f"{count} stages: {error}") from error
    peak_bytes = batch.report.peak_bytes or 0
    if peak_bytes > limit_bytes:
        raise PlanError(f"{count} stages: one of them takes {bytes_text(peak_bytes)} of a device")
    return replace(plan, chosen=_with_costs(plan.chosen, batch))


def _cut(plan: Plan, count: int, limit_bytes: int) -> Plan:
    """The plan of one stage as the plan of all ``count``."""
    if plan.mesh.size == 1:
        whole = tuple((path, tuple(() for _ in along)) for path, along in plan.layouts)
        chosen = replace(plan.chosen, axes=(), rules=())
        plan = replace(plan, chosen=chosen, layouts=whole, batch=())
    axes = ((AXIS, count), *plan.axes)
    chosen = replace(plan.chosen, axes=axes, pipeline=Pipeline(AXIS, count))
    return replace(
        plan, limit_bytes=limit_bytes, chosen=chosen, runners_up=(), data_parallel=None, classics=()
    )


def _with_costs(option: Option, batch: ServedBatch) -> Option:
    """The option with what its stages take one after the other."""
    waits = [_waiting_s(stage.receive_s, stage.report.estimate) for stage in batch.stages]
    communication_s = sum(waits)
    latency_s = batch.latency_s
    return replace(
        option,
        time_s=latency_s,
        compute_s=None if latency_s is None else latency_s - communication_s,
        communication_s=communication_s,
        peak_bytes=batch.report.peak_bytes or 0,
        interval_s=batch.interval_s,
    )


def _waiting_s(receive_s: float | None, estimate: object) -> float:
    return (receive_s or 0.0) + (getattr(estimate, "waiting_s", None) or 0.0)
