"""A plan's options side by side: what was chosen, what else fits, what is known by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...layouts.layout import UNSHARDED
from ...layouts.mesh import axes_text
from ...planning.search.choices import pipeline_text, remat_text
from ...units import bytes_text, seconds_text
from ..figures import SIGNS, fits_text, range_text
from ..text.plan import (
    copies_text,
    micro_batches,
    rate_text,
    rows_text,
    schedule_text,
)
from .elements import Cell, Column, Part, element

if TYPE_CHECKING:
    from markupsafe import Markup

    from ...planning.search.plan import Option, Plan, Serving

_PARTS = (("compute", "blue"), ("collectives", "orange"))


class _Named(NamedTuple):
    """An option under the name that the page has for it."""

    name: str
    option: Option


def plan_section(plan: Plan) -> dict[str, object]:
    """The section on what a plan decided, and against what."""
    options = _every(plan)
    return {
        "has_dry_runs": any(option.option.dry_run_time_s is not None for option in options),
        "times": _times(options, plan),
        "peaks": _peaks(options, plan),
        "table": _table(options, plan),
        "reasons": [element("path", str(reason)) for reason in plan.why if reason.changes],
        "notes": [element("path", note) for note in plan.notes],
    }


def plan_figures(plan: Plan) -> list[tuple[str, str, str]]:
    """The figures that people ask for first: name, value, and more about it."""
    best = plan.chosen
    is_dry_run, time_s = best.dry_run_time_s is not None, _time(best)
    sure = ""
    if time_s is not None:
        near = range_text(time_s, is_dry_run, plan.hardware, plan.target)
        sure = f"{_how(is_dry_run)}; {near}"
    peak_how = _how(best.dry_run_peak_bytes is not None)
    if plan.serving is not None:
        return _serving_figures(plan, plan.serving, _how(is_dry_run), peak_how)
    return [
        ("time of a step", seconds_text(time_s), sure),
        ("peak of a device", bytes_text(best.held_bytes), peak_how),
        ("devices", f"{best.num_devices:,}", f"mesh {axes_text(plan.axes, ' × ')}"),
        ("ZeRO", str(best.zero), ""),
        ("micro-batches", str(micro_batches(best)), schedule_text(best).strip("-")),
        ("remat", best.remat, ""),
    ]


def _serving_figures(
    plan: Plan, serving: Serving, sure: str, peak_how: str
) -> list[tuple[str, str, str]]:
    best, rows = plan.chosen, rows_text(serving.rows)
    return [
        (f"latency of {rows}", seconds_text(_time(best)), sure),
        ("rows of the target", rate_text(plan.rows_per_s(best)), copies_text(serving.copies)),
        ("peak of a device", bytes_text(best.held_bytes), peak_how),
        ("devices of a copy", f"{best.num_devices:,}", f"mesh {axes_text(plan.axes, ' × ')}"),
        ("precision", serving.precision or "of the model", ""),
        ("batches", ", ".join(map(str, serving.buckets)), "rows that are compiled for"),
    ]


def plan_batches(plan: Plan) -> dict[str, object] | None:
    """The section on the batches that a plan serves; ``None`` for plans of training."""
    serving = plan.serving
    if serving is None:
        return None
    whole = max((batch.latency_s or 0.0 for batch in serving.batches), default=0.0) or 1.0
    bars, rows = [], []
    for batch in serving.batches:
        name, latency_s, rate = rows_text(batch.rows), batch.latency_s or 0.0, batch.rows_per_s
        text = seconds_text(batch.latency_s)
        part = Part("latency", latency_s, text, "blue")
        bars.append((name, element("bar", [part], whole, f"latency of {name}"), text))
        target_rate = None if rate is None else serving.copies * rate
        rows.append(
            (
                Cell(f"{batch.rows:,}", batch.rows),
                Cell(text, latency_s),
                Cell(rate_text(rate), rate or 0.0),
                Cell(rate_text(target_rate), target_rate or 0.0),
                Cell(bytes_text(batch.peak_bytes), batch.peak_bytes or 0),
            )
        )
    columns = (
        Column("rows", "num"),
        Column("latency", "num"),
        Column("rows of a copy", "num"),
        Column(f"of {copies_text(serving.copies)}", "num"),
        Column("peak", "num"),
    )
    caption = "The batches that are compiled, by themselves: without queue and network"
    table = element("table", "batches-table", caption, columns, rows)
    return {"charts": [element("chart", "Latency of a batch", bars), table]}


def plan_axes(plan: Plan) -> Markup:
    """The axes of the mesh that was chosen, and what lies along them."""
    columns = (Column("axis"), Column("devices", "num"), Column("along it lie", "words"))
    rows = [
        (
            axis,
            Cell(str(size), size),
            ", ".join(f for f, along in plan.rules.items() if axis in along),
        )
        for axis, size in plan.axes
    ]
    return element(
        "table", "axes-table", f"The axes of its {plan.mesh.size:,} devices", columns, rows, None
    )


def plan_layouts(plan: Plan) -> dict[str, object]:
    """The section on where every parameter and input lies."""
    columns = (Column("array", "path"), Column("role", "word"), Column("layout", "path"))
    rows = [
        (
            element("path", path),
            "input" if path in plan.inputs else "parameter",
            element("code", f"[{', '.join('+'.join(axes) or UNSHARDED for axes in along)}]"),
        )
        for path, along in plan.layouts
    ]
    table = element(
        "table", "layouts-table", "Parameters and inputs, and their layouts", columns, rows
    )
    return {"text": "", "figures": (), "left": 0, "table": table}


def _every(plan: Plan) -> list[_Named]:
    """The chosen one first, what else fits, the best first, and what is known by name."""
    several = len(plan.runners_up) > 1
    others = [
        _Named(f"runner-up {number}" if several else "runner-up", option)
        for number, option in enumerate(plan.runners_up, start=1)
    ]
    named = [_Named(name, option) for name, option in plan.named.items()]
    return [_Named("chosen", plan.chosen), *others, *named]


def _how(is_dry_run: bool) -> str:
    return "by its dry run" if is_dry_run else "by the planner's model"


def _times(options: Sequence[_Named], plan: Plan) -> Markup | None:
    """How long a step or batch takes, all on one scale; none where no times are known."""
    whole = max((alternative.option.time_s or 0.0 for alternative in options), default=0.0) or 1.0
    rows = []
    for name, option in options:
        if option.time_s is not None:
            spent = option.compute_s or 0.0, option.communication_s or 0.0
            parts = [
                Part(part, time_s, seconds_text(time_s), paint)
                for (part, paint), time_s in zip(_PARTS, spent, strict=True)
            ]
            text = f"{seconds_text(option.time_s)}, {seconds_text(option.compute_s)} of it compute"
            if option.dry_run_time_s is not None:
                text += f"; dry run: {seconds_text(option.dry_run_time_s)}"
            if plan.serving is not None:
                text += f"; {rate_text(plan.rows_per_s(option))} of all copies"
            rows.append((name, element("bar", parts, whole, f"time of {name}"), text))
    what = "step" if plan.serving is None else "batch"
    return element("chart", f"Time of one {what}", rows, _PARTS) if rows else None


def _peaks(options: Sequence[_Named], plan: Plan) -> Markup:
    """What a device holds at most, by its dry run where there is one, beside what it has."""
    limit = plan.limit_bytes
    whole = max(1, limit or 0, *(alternative.option.held_bytes for alternative in options))
    rows = []
    for name, option in options:
        peak = bytes_text(option.held_bytes)
        part = Part("peak", option.held_bytes, peak, "sky")
        bar = element("bar", [part], whole, f"memory of {name}", limit)
        suffixes = {"does not fit": ": too much", "may not fit": ": may not fit"}
        rows.append((name, bar, peak + suffixes.get(plan.verdict_of(option) or "", "")))
    line = "" if limit is None else f"; the line is the limit, {bytes_text(limit)}"
    return element("chart", f"Peak of one device{line}", rows)


def _table(options: Sequence[_Named], plan: Plan) -> Markup:
    families = dict.fromkeys(family for _, option in options for family, _ in option.rules)
    columns = [
        Column("option", "name"),
        Column("devices", "num"),
        Column("mesh", "words"),
        Column("split", "words"),
        Column("and", "words"),
        Column("time", "num"),
        Column("collectives", "num"),
        Column("peak", "num"),
        Column("fits", "word"),
        Column("beside the chosen", "words"),
    ]
    rows = [_row(alternative, options[0].option, families, plan) for alternative in options]
    return element("table", "plan-table", "The options side by side", columns, rows)


def _row(
    named: _Named, best: Option, families: dict[str, None], plan: Plan
) -> tuple[Cell | str, ...]:
    name, option = named
    verdict = plan.verdict_of(option)
    return (
        name,
        Cell(str(option.num_devices), option.num_devices),
        axes_text(option.axes),
        _split(option, families),
        ", ".join(_choices(option)) or "-",
        _figure(seconds_text, option.time_s, option.dry_run_time_s),
        Cell(seconds_text(option.communication_s), option.communication_s or 0.0),
        _figure(bytes_text, option.peak_bytes, option.dry_run_peak_bytes),
        f"{SIGNS[verdict][0]} {fits_text(verdict)}" if verdict else "unknown",
        "-" if option is best else ", ".join(_beside(option, best)) or "costs the same",
    )


def _figure(text: Callable[[Any], str], modelled: float | None, dry_run: float | None) -> Cell:
    """By the planner's model, and below it by the dry run, which sorts where there is one."""
    if dry_run is None:
        return Cell(text(modelled), modelled or 0.0)
    return Cell(element("lines", [text(modelled)], small=f"dry run: {text(dry_run)}"), dry_run)


def _choices(option: Option) -> Iterator[str]:
    """What is done besides splitting dims."""
    if option.zero:
        yield f"ZeRO {option.zero}"
    if option.accumulate > 1:
        yield f"{option.accumulate} micro-batches"
    if option.pipeline is not None:
        yield pipeline_text(option.pipeline)
    if option.remat != "none":
        yield remat_text(option.remat)


def _split(option: Option, families: dict[str, None]) -> str:
    """The dims that are split, and along which axes."""
    along = dict(option.rules)
    lines = [
        element("path", f"{family} over {'+'.join(along[family])}")
        for family in families
        if family in along
    ]
    return element("lines", lines) if lines else "nothing"


def _beside(option: Option, best: Option) -> Iterator[str]:
    """What it would cost, and save, to take this one instead; by dry runs, if both have one."""
    mine, other = option.time_s, best.time_s
    if option.dry_run_time_s is not None and best.dry_run_time_s is not None:
        mine, other = option.dry_run_time_s, best.dry_run_time_s
    if mine is not None and other is not None and mine != other:
        yield f"{seconds_text(abs(mine - other))} {'slower' if mine > other else 'faster'}"
    more = option.peak_bytes - best.peak_bytes
    if option.dry_run_peak_bytes is not None and best.dry_run_peak_bytes is not None:
        more = option.dry_run_peak_bytes - best.dry_run_peak_bytes
    if more:
        yield f"{'takes' if more > 0 else 'saves'} {bytes_text(abs(more))}"


def _time(option: Option) -> float | None:
    """By the dry run where there is one."""
    return option.time_s if option.dry_run_time_s is None else option.dry_run_time_s
