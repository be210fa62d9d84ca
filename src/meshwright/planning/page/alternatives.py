"""A plan's alternatives side by side: what was chosen, what else fits, pure data parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...layouts.layout import UNSHARDED
from ...layouts.mesh import Mesh
from ...units import bytes_text, seconds_text
from ..accuracy import range_of
from ..search.choices import remat_text
from ..search.words import NOTHING
from .bars import Part, bar, key
from .grid import Cell, Column, Row, grid
from .markup import Child, Html, breakable, section, tag
from .meshes import mesh_picture

if TYPE_CHECKING:
    from ..search.plan import Option, Plan

_PARTS = (("compute", "blue"), ("collectives", "orange"))


class _Named(NamedTuple):
    """An option under the name that the page has for it."""

    name: str
    option: Option


def alternatives_section(plan: Plan) -> Html:
    """The section on what a plan decided, and against what."""
    every = _every(plan)
    said = "Estimates of the planner, without overlap of compute and communication."
    if any(each.option.dry_run_time_s is not None for each in every):
        said += " Options with a dry run were compiled and are ranked by it."
    return section(
        "plan",
        "The plan and its alternatives",
        tag("p", said),
        _times(every),
        _peaks(every, plan.limit_bytes),
        _table(every, plan.limit_bytes),
        _list("What each choice brings, beside the same plan without it", _of_note(plan.why)),
        _list("Notes of the planner", plan.notes),
    )


def plan_head(plan: Plan) -> Html:
    """The top of a page about a plan alone."""
    chosen = plan.chosen
    axes = " × ".join(f"{axis}={size}" for axis, size in plan.axes)
    figures = [
        ("time of a step", seconds_text(_time(chosen)), _how_sure(chosen)),
        (
            "peak of a device",
            bytes_text(chosen.held_bytes),
            _how(chosen.dry_run_peak_bytes is not None),
        ),
        ("devices", f"{chosen.num_devices:,}", f"mesh {axes}"),
        ("ZeRO", str(chosen.zero), ""),
        ("micro-batches", str(chosen.accumulate), ""),
        ("remat", chosen.remat, ""),
    ]
    told = [
        tag(
            "div", tag("dt", name), tag("dd", tag("b", value), tag("small", more) if more else None)
        )
        for name, value, more in figures
    ]
    by = f", by the numbers of {plan.hardware}: the least {plan.objective}"
    return tag(
        "header",
        tag("p", "Meshwright plan", class_="over"),
        tag("h1", plan.name or f"A plan for {plan.target}"),
        tag("p", tag("b", plan.target), by, class_="under"),
        _verdict(plan),
        tag("dl", told),
    )


def plan_mesh_section(plan: Plan) -> Html:
    """The mesh that was chosen, and what lies along its axes."""
    columns = (Column("axis"), Column("devices", "num"), Column("along it lie", "words"))
    rows = [
        (
            axis,
            Cell(str(size), size),
            ", ".join(f for f, along in plan.rules.items() if axis in along),
        )
        for axis, size in plan.axes
    ]
    table = grid("axes-table", f"The axes of its {plan.mesh.size:,} devices", columns, rows, None)
    figure = tag("figure", mesh_picture(Mesh(dict(plan.axes))))
    return section("mesh", "The mesh", tag("div", figure, table, class_="beside"))


def plan_layouts_section(plan: Plan) -> Html:
    """Where every parameter and input lies."""
    columns = (Column("array", "path"), Column("role", "word"), Column("layout", "path"))
    rows = [
        (
            Cell(breakable(path)),
            "input" if path in plan.inputs else "parameter",
            Cell(tag("code", f"[{', '.join('+'.join(axes) or UNSHARDED for axes in along)}]")),
        )
        for path, along in plan.layouts
    ]
    table = grid("layouts-table", "Parameters and inputs, and their layouts", columns, rows)
    return section("layouts", "Where every array lies", table)


def _every(plan: Plan) -> list[_Named]:
    """The chosen one first, what else fits, the best first, and what is known by name."""
    several = len(plan.runners_up) > 1
    others = [
        _Named(f"runner-up {number}" if several else "runner-up", each)
        for number, each in enumerate(plan.runners_up, start=1)
    ]
    known = [_Named(name, each) for name, each in plan.named.items()]
    return [_Named("chosen", plan.chosen), *others, *known]


def _verdict(plan: Plan) -> Html:
    limit = plan.limit_bytes
    if limit is None:
        said = "? Fit unknown: device memory not known"
        return tag("p", said, class_="verdict maybe")
    return tag("p", f"✓ Fits into {bytes_text(limit)}", class_="verdict good")


def _how_sure(option: Option) -> str:
    """Who says how long a step takes, and how far that was off elsewhere."""
    is_dry_run = option.dry_run_time_s is not None
    time_s = _time(option)
    if time_s is None:
        return ""
    return f"{_how(is_dry_run)}; {range_of(time_s, is_dry_run)}"


def _of_note(why: Sequence[str]) -> list[str]:
    """Without the choices that change next to nothing."""
    return [each for each in why if not each.endswith(NOTHING)]


def _how(is_dry_run: bool) -> str:
    return "by its dry run" if is_dry_run else "by the planner's model"


# Pictures


def _times(every: Sequence[_Named]) -> Html | None:
    """How long a step takes, all on one scale; none where no times are known."""
    known = [each for each in every if each.option.time_s is not None]
    if not known:
        return None
    whole = max(each.option.time_s or 0.0 for each in known) or 1.0
    rows = []
    for name, option in known:
        spent = (option.compute_s or 0.0, option.communication_s or 0.0)
        parts = [
            Part(part, time_s, seconds_text(time_s), paint)
            for (part, paint), time_s in zip(_PARTS, spent, strict=True)
        ]
        told = f"{seconds_text(option.time_s)}, {seconds_text(option.compute_s)} of it compute"
        rows.append(_bar(name, bar(parts, whole, f"time of {name}"), told))
    return tag("figure", tag("figcaption", "Time of one step"), rows, key(_PARTS))


def _peaks(every: Sequence[_Named], limit: int | None) -> Html:
    """What a device holds at most, beside what it has."""
    whole = max(1, limit or 0, *(each.option.peak_bytes for each in every))
    rows = [
        _bar(
            name,
            bar(
                [Part("peak", option.peak_bytes, bytes_text(option.peak_bytes), "sky")],
                whole,
                f"memory of {name}",
                limit,
            ),
            bytes_text(option.peak_bytes)
            + ("" if _fits(option, limit) is not False else ": too much"),
        )
        for name, option in every
    ]
    told = "Peak of one device" + (
        "" if limit is None else f"; the line is the limit, {bytes_text(limit)}"
    )
    return tag("figure", tag("figcaption", told), rows)


def _bar(name: str, drawn: Html, told: str) -> Html:
    return tag("div", tag("b", name), drawn, tag("span", told), class_="hbar")


# The table


def _table(every: Sequence[_Named], limit: int | None) -> Html:
    families = dict.fromkeys(family for _, option in every for family, _ in option.rules)
    columns = [
        Column("option", "word"),
        Column("devices", "num"),
        Column("mesh", "words"),
        Column("split", "words"),
        Column("and", "words"),
        Column("step", "num"),
        Column("collectives", "num"),
        Column("peak", "num"),
        Column("fits", "word"),
        Column("beside the chosen", "words"),
    ]
    rows = [_row(each, every[0].option, families, limit) for each in every]
    return grid("plan-table", "The options side by side", columns, rows)


def _row(each: _Named, chosen: Option, families: dict[str, None], limit: int | None) -> Row:
    name, option = each
    fits = _fits(option, limit)
    return (
        Cell(tag("b", name)),
        Cell(str(option.num_devices), option.num_devices),
        Cell(", ".join(f"{axis}={size}" for axis, size in option.axes)),
        Cell(_split(option, families)),
        Cell(", ".join(_choices(option)) or "-"),
        _figure(seconds_text, option.time_s, option.dry_run_time_s),
        Cell(seconds_text(option.communication_s), option.communication_s or 0.0),
        _figure(bytes_text, option.peak_bytes, option.dry_run_peak_bytes),
        Cell("unknown" if fits is None else "✓ yes" if fits else "✗ no"),
        Cell("-" if option is chosen else ", ".join(_beside(option, chosen)) or "costs the same"),
    )


def _figure(shown: Callable[[Any], str], modelled: float | None, dry_run: float | None) -> Cell:
    """By the planner's model, and below it by the dry run, which sorts where there is one."""
    if dry_run is None:
        return Cell(shown(modelled), modelled or 0.0)
    below = tag("small", f"dry run: {shown(dry_run)}")
    return Cell([shown(modelled), tag("br"), below], dry_run)


def _choices(option: Option) -> Iterator[str]:
    """What is done besides splitting dims."""
    if option.zero:
        yield f"ZeRO {option.zero}"
    if option.accumulate > 1:
        yield f"{option.accumulate} micro-batches"
    if option.remat != "none":
        yield remat_text(option.remat)


def _split(option: Option, families: dict[str, None]) -> Child:
    """The dims that are split, and along which axes."""
    along = dict(option.rules)
    parts = [f"{family} over {'+'.join(along[family])}" for family in families if family in along]
    return [
        [tag("br") if i else None, breakable(part)] for i, part in enumerate(parts)
    ] or "nothing"


def _beside(option: Option, chosen: Option) -> Iterator[str]:
    """What it would cost, and save, to take this one instead; by dry runs, if both have one."""
    mine, other = option.time_s, chosen.time_s
    if option.dry_run_time_s is not None and chosen.dry_run_time_s is not None:
        mine, other = option.dry_run_time_s, chosen.dry_run_time_s
    if mine is not None and other is not None and mine != other:
        yield f"{seconds_text(abs(mine - other))} {'slower' if mine > other else 'faster'}"
    more = option.peak_bytes - chosen.peak_bytes
    if option.dry_run_peak_bytes is not None and chosen.dry_run_peak_bytes is not None:
        more = option.dry_run_peak_bytes - chosen.dry_run_peak_bytes
    if more:
        yield f"{'takes' if more > 0 else 'saves'} {bytes_text(abs(more))}"


def _time(option: Option) -> float | None:
    """By the dry run where there is one."""
    return option.time_s if option.dry_run_time_s is None else option.dry_run_time_s


def _fits(option: Option, limit: int | None) -> bool | None:
    return None if limit is None else option.held_bytes <= limit


def _list(title: str, items: Sequence[str]) -> Child:
    if not items:
        return None
    return [tag("h3", title), tag("ul", [tag("li", breakable(each)) for each in items])]
