"""Plans whose dry runs have the last word: they rank them, and those that do not fit give way.

The model may take its best to fit where a compiler's schedule does not let it. Then plans are
looked for that hold less by the model, by as much as it was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...errors import CompileError, PlanError
from ...units import bytes_text, seconds_text
from .choices import Layouts
from .plan import Option, Plan

_TIMES = 2  # that plans which hold less are looked for, each time less than before
_UNKNOWN = 1.25  # how far off the model is taken to be, where a dry run has no peak
_LESS = 0.98  # of what would fit if the model were off as it was
_NOT_DRY_RUN = "estimated only: no TPU slice has this number of devices"


class Report(Protocol):
    """What planning asks of a dry run; :class:`~meshwright.DryRun` has it."""

    @property
    def step_time_s(self) -> float | None: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def fits(self) -> bool | None: ...


@dataclass(frozen=True)
class NoReport:
    """Of a candidate that cannot be dry-run: the model's figures count."""

    step_time_s: float | None = None
    peak_bytes: int | None = None
    fits: bool | None = None


DryRunOf = Callable[[Plan], Report]


@dataclass(frozen=True)
class _Run:
    """A plan with the figures of its dry run, by which it fits or does not."""

    plan: Plan
    fits: bool


def verified(
    plans: Sequence[Plan],
    dry_run_of: DryRunOf,
    limit_bytes: int | None,
    within: Callable[[int], list[Plan]],
) -> list[Plan]:
    """The plans by what their dry runs say: those that fit first, then the objective.

    Where the best does not fit, those ``within`` fewer bytes of the model's, if any, are dry-run,
    too. One that does not compile is left out, and a note says so. Raises
    :class:`~meshwright.PlanError`, with the nearest, where none of these fits either, and
    :class:`~meshwright.CompileError` where none compiles.
    """
    first, limit = plans[0].chosen, limit_bytes
    runs = _DryRuns(dry_run_of, limit_bytes)
    new = runs.of(plans)
    if not new:
        raise next(iter(runs.failed.values()))
    less: list[Plan] = []
    for _ in range(_TIMES):
        if limit is None or limit_bytes is None or _best_fits(new):
            break
        limit = round(_LESS * min(limit, limit_bytes / _off(runs.runs.values(), plans[0])))
        less = runs.not_asked(within(limit))
        if not less:
            break
        new = runs.of(less, _held_to(limit))
    ranked = _ranked([*runs.runs.values()])
    if not ranked[0].fits:
        raise PlanError(f"{_no_fit(runs)} {_way_out(bool(less))}")
    best, *others = (run.plan for run in ranked)
    notes = [*_preferred(best.chosen, first), *runs.left_out()]
    return [replace(best, notes=(*best.notes, *notes)), *others]


class _DryRuns:
    """Asks for the dry run of each plan once, and keeps what it says, or why there is none."""

    def __init__(self, dry_run_of: DryRunOf, limit_bytes: int | None) -> None:
        self.dry_run_of = dry_run_of
        self.limit_bytes = limit_bytes
        self.runs: dict[Layouts, _Run] = {}
        self.failed: dict[Layouts, CompileError] = {}

    def of(self, plans: Iterable[Plan], *notes: str) -> list[_Run]:
        """What those say that compile."""
        result = []
        for candidate in plans:
            try:
                report = self.dry_run_of(candidate)
            except CompileError as error:
                self.failed[candidate.chosen.layouts] = error
                continue
            option = replace(
                candidate.chosen,
                dry_run_time_s=report.step_time_s,
                dry_run_peak_bytes=report.peak_bytes,
            )
            reasons = [_NOT_DRY_RUN] if isinstance(report, NoReport) else []
            plan = replace(candidate, chosen=option, notes=(*candidate.notes, *notes, *reasons))
            result.append(_Run(plan, self._fits(report)))
            self.runs[option.layouts] = result[-1]
        return result

    def not_asked(self, plans: Iterable[Plan]) -> list[Plan]:
        layouts = self.runs.keys() | self.failed.keys()
        return [plan for plan in plans if plan.chosen.layouts not in layouts]

    def left_out(self) -> list[str]:
        return [f"left out: {layouts}: {error}" for layouts, error in self.failed.items()]

    def _fits(self, report: Report) -> bool:
        if report.fits is False:
            return False
        peak, limit = report.peak_bytes, self.limit_bytes
        return peak is None or limit is None or peak <= limit


def _best_fits(runs: Sequence[_Run]) -> bool:
    """Whether the fastest fits, or the smallest: then none that holds less is wanted."""
    return bool(runs) and min(runs, key=lambda run: _rank(run.plan)).fits


def _off(runs: Iterable[_Run], first: Plan) -> float:
    """How many times as much as the model says the model's best holds by its dry run."""
    same = (e.plan.chosen for e in runs if e.plan.chosen.layouts == first.chosen.layouts)
    option = next(same, None)
    if option is None or option.dry_run_peak_bytes is None:
        return _UNKNOWN
    return max(1.0, option.dry_run_peak_bytes / option.peak_bytes)


def _held_to(limit: int) -> str:
    return (
        "plans that fit by the estimate did not fit by their dry runs; this one stays within "
        f"{bytes_text(limit)} by the estimate"
    )


def _ranked(runs: Iterable[_Run]) -> list[_Run]:
    """Those that fit first, then the objective. A figure that no dry run has is the model's."""
    return sorted(runs, key=lambda run: (not run.fits, _rank(run.plan)))


def _preferred(best: Option, first: Option) -> Iterator[str]:
    if (best.axes, best.rules) != (first.axes, first.rules):
        yield (
            "by its dry run this is faster than the plan with the best estimate, "
            f"{seconds_text(first.time_s)}"
        )


def _no_fit(runs: _DryRuns) -> str:
    options = [run.plan.chosen for run in runs.runs.values()]
    fact = f"none of {len(options)} dry-run plans fits"
    if len(options) == 1:
        fact = "the dry-run plan does not fit"
    measured = [one for one in options if one.dry_run_peak_bytes is not None]
    nearest = min(measured, key=lambda one: one.dry_run_peak_bytes or 0, default=None)
    if nearest is not None:
        fact += (
            f". The nearest takes {bytes_text(nearest.dry_run_peak_bytes)}, where the estimate was "
            f"{bytes_text(nearest.peak_bytes)}: {nearest.layouts}"
        )
    return ". ".join([fact, *runs.left_out()]).rstrip(".") + "."


def _way_out(some_hold_less: bool) -> str:
    if some_hold_less:
        return (
            "Dry-run more plans with verify=, or say a lower memory_limit=, by which the model "
            "searches."
        )
    return (
        "No other holds so much less by the model: take more devices or a smaller batch, or "
        "dry-run more plans with verify=."
    )


def _rank(plan: Plan) -> tuple[float, float]:
    option = plan.chosen
    time_s = option.dry_run_time_s if option.dry_run_time_s is not None else option.time_s or 0.0
    return (time_s, option.held_bytes) if plan.objective == "time" else (option.held_bytes, time_s)
