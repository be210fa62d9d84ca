"""Dry runs of a forward pass that serves, whole or in stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..layouts.placement import Placement
from ..planning.dry_run import not_compiled
from ..planning.serving import ServingReport, serving_report
from ..planning.serving_stages import staged_report
from ..stages.pipeline import Pipeline
from ..targets.hardware import Hardware
from ..targets.target import Target
from .forwards import Forwards
from .staged_forwards import StagedForwards


def dry_run_of_serving(
    forwards: Forwards,
    strategy: Any,
    pipeline: Pipeline | None,
    target: Target,
    hardware: Hardware,
    *,
    rows: Iterable[int],
    compile: bool,
    timeout_s: float,
    is_rough: bool = False,
    is_named: bool = True,
) -> ServingReport:
    """What batches of these sizes take under a strategy, or a placement.

    With ``is_rough`` stages are cut as for a search, and unless ``is_named`` some have the reports
    of others, see :class:`~meshwright.frontends.staged_forwards.StagedForwards`.
    """
    if pipeline is None:
        steps = forwards.steps(strategy)
        return serving_report(
            [(count, forwards.on(steps, count)) for count in rows],
            target,
            hardware,
            compile=compile,
            timeout_s=timeout_s,
            graph_of=forwards.graph,
        )
    placement = strategy if isinstance(strategy, Placement) else strategy.placement
    compiles = not not_compiled(target, compile)
    staged = StagedForwards(
        forwards, placement, pipeline, target, compiles, is_rough=is_rough, is_named=is_named
    )
    return staged_report(
        [(count, staged.on(count)) for count in rows],
        placement.mesh,
        pipeline.axis,
        target,
        hardware,
        compile=compile,
        timeout_s=timeout_s,
        graph_of=staged.graph,
    )
