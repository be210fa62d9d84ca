"""The dry run of a pipeline without compiling anything."""

from __future__ import annotations

import math
from dataclasses import replace

from ...errors import LayoutError, TargetError
from ...hlo.schedule import Times
from ...hlo.traffic import Transfer
from ...program import Batch
from ...stages.deal import Deal
from ...targets.hardware import Hardware
from ...targets.target import Target
from ...units import share_text
from ..abstract_step import AbstractStep, unstaged
from ..analytic.assignment import Assignment, assignment_of, graph_alone
from ..analytic.estimate import estimate_of
from ..analytic.operation_costs import OperationCost, operation_costs, transfers_of
from ..estimate import Estimate, with_shares
from ..reading import sizes
from ..report import DryRun, Memory
from ..search.choices import Choices, remat_of
from .cost import PipelineCost, Staging, pipeline_cost, sent_bytes
from .equal import equal_blocks
from .sections import Section, sections_of

_PEAK_IS = "the planner's model: arrays of one micro-batch, and what is in flight"


def report_of(
    batch: Batch, described: AbstractStep, target: Target, hardware: Hardware, why: str
) -> DryRun:
    """What the planner's model says of a pipeline's step; ``why`` nothing is compiled.

    Bytes of state and inputs are exact. Raises :class:`~meshwright.TargetError` for a model or a
    layout that the planner's model does not know.
    """
    try:
        assignment, staging = staged_assignment(batch, described, target, hardware)
    except LayoutError as error:
        raise TargetError(
            f"{why}. Without a compiler only the planner's estimate is possible, and it failed for "
            f"{described.program.name!r}:\n{error}"
        ) from error
    assert described.staged is not None
    by_block = described.how.remat == "block"
    cost = pipeline_cost(assignment, staging, target, hardware, by_block)
    costs = _scaled(assignment, staging, described, by_block)
    nbytes = sizes(described)
    exact = sum(nbytes.values()) - nbytes["gradient_bytes"]
    return DryRun(
        name=described.program.name,
        target=target,
        axes=described.placement.mesh.axes,
        memory=Memory(
            **nbytes,
            temporary_bytes=cost.temporary_bytes,
            peak_bytes=exact + cost.temporary_bytes,
            peak_is=_PEAK_IS,
            available_bytes=hardware.memory_bytes,
        ),
        collectives=(*_permutes(staging), *transfers_of(costs, described.placed)),
        estimate=_estimate(assignment, costs, cost, staging, target, hardware),
        notes=(*_notes(staging, cost), *(described.staged.notes if described.staged else ())),
        placed=described.placed,
        hardware=hardware,
        not_compiled=why,
    )


def staged_assignment(
    batch: Batch, described: AbstractStep, target: Target, hardware: Hardware
) -> tuple[Assignment, Staging]:
    """The layout of a model with as many blocks as one stage has, and how it is cut."""
    staged = described.staged
    assert staged is not None
    pipeline, placement = staged.pipeline, described.placement
    stages = placement.mesh[pipeline.axis]
    blocks, reason = equal_blocks(unstaged(described), staged.is_of_loop)
    deal = staged.dealt
    if blocks is None or not isinstance(deal, Deal):
        raise LayoutError(
            f"its stages are not runs of equal blocks{f': {reason}' if reason else ''}. Have the "
            "step compiled."
        )
    repeats = blocks.repeats
    most = max(deal.sizes)
    count = most * pipeline.repeats
    short = repeats.with_blocks(count)
    graph = graph_alone(short.program, batch, placement, short)
    assignment = assignment_of(graph, short, target, hardware)
    choices = Choices(min(1, placement.zero), pipeline.micro_batches, remat_of("none"))
    staging = Staging(
        pipeline=pipeline,
        stages=stages,
        blocks=count,
        block_paths=frozenset(path for paths in repeats.blocks[:count] for path in paths),
        sent_bytes=sent_bytes(staged.sent, placement.batch_shards),
        skips=staged.skips,
        count=deal.count,
        filled=tuple(size / most for size in deal.sizes) if staged.skips else (),
        shares_loss=deal.shares_loss,
        frozen_bytes=blocks.frozen_bytes,
    )
    return replace(assignment, choices=choices), staging


def _permutes(staging: Staging) -> list[Transfer]:
    """What is passed on to neighbours, forward and backward."""
    if not staging.permutes:
        return []
    return [
        Transfer(
            kind="collective-permute",
            axes=(staging.pipeline.axis,),
            bytes_per_device=nbytes,
            count=staging.permutes,
            paths=(),
            phases=("forward", "backward"),
            dtypes=(),
        )
        for nbytes in staging.sent_bytes
    ]


def _scaled(
    assignment: Assignment, staging: Staging, described: AbstractStep, by_block: bool
) -> list[OperationCost]:
    """The operations of a stage as often as they run in a step: with what is computed again, and
    what comes before the blocks or after them as one of the stages does it."""
    costs = operation_costs(assignment, described.placement)
    count = len(assignment.problem.graph.operations)
    begin = next((n for n, cost in enumerate(costs) if not cost.variable), 0)
    sections = sections_of(assignment.problem.graph, staging.block_paths)
    again = staging.pipeline.does_remat + by_block
    runs = {Section("blocks", "forward"): 1 + again, Section("before", "forward"): 2}
    after = staging.stages if staging.shares_loss else 1
    scaled = [
        _times(cost, runs.get(section, 1), after if _is_after(section) else 1)
        for cost, section in zip(costs[begin : begin + count], sections, strict=True)
    ]
    return [*costs[:begin], *scaled, *costs[begin + count :]]


def _is_after(section: Section) -> bool:
    return section.name == "after" and section.phase != "update"


def _times(cost: OperationCost, runs: int, shared_by: int) -> OperationCost:
    """An operation as often as it runs, for one of the stages that share it."""
    if runs == shared_by == 1:
        return cost
    share = runs / shared_by
    work = cost.work
    return replace(
        cost,
        work=replace(
            work,
            count=math.ceil(share * work.count),
            flops=share * work.flops,
            bytes=share * work.bytes,
            flops_s=share * work.flops_s,
            bytes_s=share * work.bytes_s,
            collectives=tuple(
                replace(one, count=math.ceil(share * one.count)) for one in work.collectives
            ),
        ),
    )


def _estimate(
    assignment: Assignment,
    costs: list[OperationCost],
    cost: PipelineCost,
    staging: Staging,
    target: Target,
    hardware: Hardware,
) -> Estimate:
    """That of a stage that has what comes before the blocks and after them, with the time of all
    ticks."""
    estimate = estimate_of(assignment, costs, target, hardware)
    assert estimate.sums is not None
    times = estimate.sums.times
    talk = dict(estimate.communication_s)
    sent_s = staging.permutes * len(staging.sent_bytes) * cost.permute_s
    talk[(staging.pipeline.axis,)] = None if estimate.missing else sent_s
    sums = replace(
        estimate.sums,
        own_flops=_own_flops(assignment, staging) / target.num_devices,
        split_flops=None,
        times=Times(cost.step_time_s or 0.0, times.compute, times.memory, times.waiting),
    )
    return with_shares(
        replace(
            estimate,
            communication_s=tuple(sorted(talk.items(), key=lambda pair: -(pair[1] or 0.0))),
            step_time_s=cost.step_time_s,
            sums=sums,
        )
    )


def _own_flops(assignment: Assignment, staging: Staging) -> float:
    """FLOPs of the whole model, all stages together; places that are left empty have none."""
    graph = assignment.problem.graph
    sections = sections_of(graph, staging.block_paths)
    as_many = staging.stages if staging.count is None else staging.count / staging.blocks
    return sum(
        operation.flops * operation.times * (as_many if section.name == "blocks" else 1)
        for operation, section in zip(graph.operations, sections, strict=True)
    )


def _notes(staging: Staging, cost: PipelineCost) -> tuple[str, ...]:
    pipeline = staging.pipeline
    table = staging.table
    return (
        f"{pipeline.schedule} of {staging.stages} stages and {pipeline.micro_batches} "
        f"micro-batches: {len(table.ticks)} ticks; the busiest stage works "
        f"{share_text(1 - cost.idle_share)} of the step",
    )
