"""Plans whose dry runs have the last word: they rank them, and those that do not fit give way.

The model may take its best to fit where a compiler's schedule does not let it. Then plans are
looked for that hold less by the model, by as much as it was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...errors import CompileError, PlanError
from .plan import Option, Plan
from .words import ms, nbytes

_TIMES = 2  # that plans which hold less are looked for, each time less than before
_UNKNOWN = 1.25  # how far off the model is taken to be, where a dry run has no peak
_LESS = 0.98  # of what would fit if the model were off as it was


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
class _Seen:
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
    errors: list[CompileError] = []
    new = seen = list(_dry_run(plans, dry_run_of, errors))
    for _ in range(_TIMES):
        if limit is None or limit_bytes is None or _best_fits(new):
            break
        limit = round(_LESS * min(limit, limit_bytes / _off(seen, plans[0])))
        plans = within(limit)
        known = {each.plan.chosen.layouts for each in seen}
        others = [each for each in plans if each.chosen.layouts not in known]
        if not others:
            break
        new = [_held_to(each, limit) for each in _dry_run(others, dry_run_of, errors)]
        seen = [*seen, *new]
    if errors and not seen:
        raise errors[0]
    best, *others = _ranked(seen, first)
    notes = [f"a plan to verify is left out: {error}" for error in errors]
    return [replace(best, notes=(*best.notes, *notes)), *others]


def _dry_run(
    plans: Iterable[Plan], dry_run_of: DryRunOf, errors: list[CompileError]
) -> Iterator[_Seen]:
    """The plans that compile; why others do not is added to ``errors``."""
    for each in plans:
        try:
            report = dry_run_of(each)
        except CompileError as error:
            errors.append(error)
            continue
        option = replace(
            each.chosen,
            dry_run_time_s=report.step_time_s,
            dry_run_peak_bytes=report.peak_bytes,
        )
        yield _Seen(replace(each, chosen=option), report.fits is not False)


def _best_fits(seen: Sequence[_Seen]) -> bool:
    """Whether the fastest fits, or the smallest: then none that holds less is wanted."""
    return bool(seen) and min(seen, key=lambda each: _rank(each.plan)).fits


def _off(seen: Iterable[_Seen], first: Plan) -> float:
    """How many times as much as the model says the model's best holds by its dry run."""
    same = (e.plan.chosen for e in seen if e.plan.chosen.layouts == first.chosen.layouts)
    option = next(same, None)
    if option is None or option.dry_run_peak_bytes is None:
        return _UNKNOWN
    return max(1.0, option.dry_run_peak_bytes / option.peak_bytes)


def _held_to(seen: _Seen, limit: int) -> _Seen:
    note = (
        f"what the model took to fit did not by its dry run; this keeps within {nbytes(limit)} "
        "by the model"
    )
    return replace(seen, plan=replace(seen.plan, notes=(*seen.plan.notes, note)))


def _ranked(seen: list[_Seen], first: Option) -> list[Plan]:
    """Those that fit first, then the objective. A figure that no dry run has is the model's."""
    ranked = sorted(seen, key=lambda each: (not each.fits, _rank(each.plan)))
    best = ranked[0].plan
    if not ranked[0].fits:
        raise _no_fit([each.plan.chosen for each in seen])
    if (best.chosen.axes, best.chosen.rules) != (first.axes, first.rules):
        note = f"the dry run preferred this to the model's first, {ms(first.time_s)} by the model"
        best = replace(best, notes=(*best.notes, note))
    return [best, *(each.plan for each in ranked[1:])]


def _no_fit(options: list[Option]) -> PlanError:
    known = [one for one in options if one.dry_run_peak_bytes is not None]
    nearest = min(known, key=lambda one: one.dry_run_peak_bytes or 0, default=None)
    fact = f"of {len(options)} plans that were dry-run none fits"
    if len(options) == 1:
        fact = "the plan that was dry-run does not fit"
    if nearest is not None:
        fact += (
            f". The nearest takes {nbytes(nearest.dry_run_peak_bytes)}, where the model said "
            f"{nbytes(nearest.peak_bytes)}: {nearest.layouts}"
        )
    return PlanError(
        f"{fact}. Dry-run more plans with verify=, or say a lower memory_limit=, by which the "
        "model searches."
    )


def _rank(plan: Plan) -> tuple[float, float]:
    option = plan.chosen
    time_s = option.dry_run_time_s if option.dry_run_time_s is not None else option.time_s or 0.0
    peak = option.dry_run_peak_bytes
    peak = option.peak_bytes if peak is None else peak
    return (time_s, peak) if plan.objective == "time" else (peak, time_s)
