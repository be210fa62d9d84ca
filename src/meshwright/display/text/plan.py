"""A plan as a table: the options side by side, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...layouts.mesh import axes_text
from ...planning.verdict import error_text
from ...targets.target import Target
from ...units import bytes_text, seconds_text
from ..figures import SETTLES, fits_text
from .columns import Columns, Line, Paragraphs, paragraphs

if TYPE_CHECKING:
    from ...planning.search.plan import Option, Plan, Serving


def plan_text(plan: Plan) -> Paragraphs:
    """The plan as a terminal shows it."""
    how = "compiled" if plan.is_compiled else "estimated, not compiled"
    if plan.verdict == "may not fit":
        how += f", may not fit ({SETTLES})"
    what, serving = "", plan.serving
    aim = f"least {plan.objective}"
    if serving is not None:
        what, least = "serving on ", "most" if plan.objective == "throughput" else "least"
        aim = f"{least} {plan.objective} in batches of {rows_text(serving.rows)}"
    constants = f"the constants of {plan.hardware}"
    return paragraphs(
        Line(f"plan for {what}{plan.target}, {how}: {aim} by {constants}", "bold"),
        _table(_columns(plan), plan),
        [] if serving is None else _batches(serving),
        [f"  {reason}" for reason in plan.why],
        [f"  note: {note}" for note in (*plan.notes, *_doubts(plan))],
    )


def _doubts(plan: Plan) -> list[str]:
    """Why an option may not fit that is estimated to."""
    if all(plan.verdict_of(option) != "may not fit" for option in _columns(plan).values()):
        return []
    return [f'"maybe" is within the error of estimates: {error_text(Target.of(plan.target))}']


def _columns(plan: Plan) -> dict[str, Option]:
    """The options to show; one that is known by a name is shown once."""
    options = {"chosen": plan.chosen}
    options |= {"runner-up": plan.runners_up[0]} if plan.runners_up else {}
    names = {option.layouts: name for name, option in plan.named.items()}
    columns = {
        f"{column}: {names[option.layouts]}" if option.layouts in names else column: option
        for column, option in options.items()
    }
    shown_layouts = {option.layouts for option in options.values()}
    return columns | {name: o for name, o in plan.named.items() if o.layouts not in shown_layouts}


def micro_batches(option: Option) -> int:
    """Into how many a batch is cut, by a pipeline or by accumulation."""
    return option.accumulate if option.pipeline is None else option.pipeline.micro_batches


def schedule_text(option: Option) -> str:
    """The schedule of a pipeline."""
    if option.pipeline is None:
        return "-"
    runs = f" x {option.pipeline.repeats}" if option.pipeline.repeats > 1 else ""
    keeps = "" if option.pipeline.does_remat else ", no remat of stages"
    return f"{option.pipeline.schedule}{runs}{keeps}"


def rows_text(count: int) -> str:
    """
    >>> rows_text(1), rows_text(8)
    ('1 row', '8 rows')
    """
    return f"{count} row{'' if count == 1 else 's'}"


def rate_text(rows_per_s: float | None) -> str:
    """
    >>> rate_text(1234.5), rate_text(None)
    ('1,234/s', 'unknown')
    """
    if rows_per_s is None:
        return "unknown"
    return f"{rows_per_s:,.0f}/s" if rows_per_s >= 10 else f"{rows_per_s:.2g}/s"


def _batches(serving: Serving) -> Columns:
    """What is compiled, and what it takes."""
    rows = [("batch", "latency", "rows of a copy", f"of {copies_text(serving.copies)}", "peak")]
    for batch in serving.batches:
        rate = batch.rows_per_s
        rows.append(
            (
                rows_text(batch.rows),
                seconds_text(batch.latency_s),
                rate_text(rate),
                rate_text(None if rate is None else serving.copies * rate),
                bytes_text(batch.peak_bytes),
            )
        )
    return Columns(rows)


def copies_text(count: int) -> str:
    """
    >>> copies_text(1), copies_text(2)
    ('1 copy', '2 copies')
    """
    return "1 copy" if count == 1 else f"{count} copies"


def _table(columns: dict[str, Option], plan: Plan) -> Columns:
    options, limit_bytes = list(columns.values()), plan.limit_bytes
    rows = [("", *columns)]
    trains = plan.serving is None
    pass_name = "step" if trains else "latency"

    def row(label: str, text: Callable[[Option], str]) -> None:
        rows.append((label, *map(text, options)))

    def axes_of(family: str) -> Callable[[Option], str]:
        return lambda option: "+".join(dict(option.rules).get(family, ())) or "-"

    row("devices", lambda option: str(option.num_devices))
    row("mesh", lambda option: axes_text(option.axes))
    for family in dict.fromkeys(family for option in options for family, _ in option.rules):
        row(family, axes_of(family))
    if trains:
        row("ZeRO", lambda option: str(option.zero))
        row("micro-batches", lambda option: str(micro_batches(option)))
        if any(option.pipeline is not None for option in options):
            row("schedule", schedule_text)
        row("remat", lambda option: option.remat)
    row(pass_name, lambda option: seconds_text(option.time_s))
    row("compute", lambda option: seconds_text(option.compute_s))
    row("collectives", lambda option: seconds_text(option.communication_s))
    if any(option.interval_s is not None for option in options):
        row("next batch", lambda option: seconds_text(option.interval_s or option.time_s))
    if not trains:
        row("of all copies", lambda option: rate_text(plan.rows_per_s(option)))
    row("peak", lambda option: bytes_text(option.peak_bytes))
    if any(option.dry_run_time_s is not None for option in options):
        row(f"dry run: {pass_name}", lambda option: seconds_text(option.dry_run_time_s))
    if any(option.dry_run_peak_bytes is not None for option in options):
        row("dry run: peak", lambda option: bytes_text(option.dry_run_peak_bytes))
    if limit_bytes is not None:
        fits = f"fits {bytes_text(limit_bytes)}"
        row(fits, lambda option: fits_text(plan.verdict_of(option)))
    return Columns(rows)
