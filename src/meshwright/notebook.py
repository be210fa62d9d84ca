"""The views of values in a notebook: small HTML, readable on a light page and on a dark one.

``view_of`` is the one registry: a class has its view by its name here, and its subclasses share it.
Everything that comes from the user is escaped by :func:`tag`. Colours are those of the page that
the view stands on; pictures keep their own paper.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .drawing import Drawn, Section, draw_svg
from .drawing.tiling import Tiling
from .drawing.words import copies_text
from .layouts.layout import Layout
from .planning.page.markup import Html, joined, tag
from .units import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from .equivalence.judging import Equivalence, UnderMesh
    from .layouts.explain import Explanation
    from .layouts.layout_map import LayoutMap
    from .layouts.mesh import Mesh
    from .planning.beside import Comparison
    from .planning.measurement import Measured
    from .planning.report import DryRun
    from .planning.search.plan import Option, Plan

_MOST_ROWS = 200  # of a table; a notebook keeps all that it shows
_STYLE = """
.mw-view{font-size:13px;line-height:1.45;max-width:100%}
.mw-view table{border-collapse:collapse;margin:.3em 0;font-variant-numeric:tabular-nums}
.mw-view th,.mw-view td{padding:.15em .7em;text-align:left!important;vertical-align:top;
border:0;border-bottom:1px solid rgba(128,128,128,.35);background:none}
.mw-view .n{text-align:right!important}
.mw-view .scroll{max-height:28em;overflow:auto}
.mw-view .good{color:#2e9a5b}.mw-view .bad{color:#e0484d}.mw-view .soft{opacity:.72}
.mw-view pre{overflow:auto;font-size:12px}
.mw-view img{max-width:100%;height:auto;border-radius:4px}
.mw-view summary{cursor:pointer}
"""
_View = Callable[[Any], Html]


def view_of(value: Any) -> str | None:
    """The HTML of a value; ``None`` for one that has no view of its own.

    >>> from meshwright import Mesh
    >>> view_of(Mesh({"batch": 2})).startswith('<div class="mw-view">')
    True
    """
    for each in type(value).__mro__:
        view = _VIEWS.get(f"{each.__module__}.{each.__qualname__}".removeprefix("meshwright."))
        if view is not None:
            style = tag("style", Html(_STYLE.replace("\n", "")))
            return tag("div", style, view(value), class_="mw-view")
    return None


def _mesh(mesh: Mesh) -> Html:
    return joined([_title(f"Mesh {mesh.axes_text}"), _picture(Section("", mesh))])


def _layout(layout: Layout) -> Html:
    specs = [str(Layout([spec])).strip("[]") for spec in layout.specs]
    rows = [(str(dim), spec) for dim, spec in enumerate(specs)]
    mesh = layout.bound_mesh() if layout.is_bound else None
    if mesh is None:
        return joined([_title(f"Layout {layout}"), _table(("dim", "axes"), rows, (0,))])
    counts = tuple(layout.num_shards(dim) for dim in range(layout.rank))
    tiling = Tiling.of(Drawn("", counts, layout))
    rows = [(*row, str(count)) for row, count in zip(rows, counts, strict=True)]
    return joined(
        [
            _title(f"Layout {layout.unbound()} on {mesh.axes_text}: {copies_text(tiling)}"),
            _table(("dim", "axes", "pieces"), rows, right=(0, 2)),
        ]
    )


def _layout_map(layouts: LayoutMap) -> Html:
    rows = [(pattern, layouts.text_of(pattern)) for pattern in layouts]
    return joined([_title(f"LayoutMap, {len(rows)} layouts"), _table(("pattern", "layout"), rows)])


def _explanation(found: Explanation) -> Html:
    rows = [
        (each[0], each[1], each[2], bytes_text(placed.bytes_per_device), each[4])
        for each, placed in zip(found.rows(), found.placed, strict=True)
    ]
    total = f"{len(rows)} variables on {found.mesh.axes_text}, "
    total += f"{bytes_text(found.bytes_per_device)} per device"
    headings = ("variable", "dims", "layout", "per device", "why")
    return joined([_title(total), _table(headings, rows, right=(3,))])


def _dry_run(run: DryRun) -> Html:
    mesh = ", ".join(f"{axis}={size}" for axis, size in run.axes)
    memory = run.memory
    rows = [
        ("parameters", bytes_text(memory.parameter_bytes)),
        ("slots", bytes_text(memory.slot_bytes)),
        ("other state", bytes_text(memory.state_bytes)),
        ("inputs", bytes_text(memory.input_bytes)),
        ("temporaries", bytes_text(memory.temporary_bytes)),
        ("peak", bytes_text(memory.peak_bytes)),
        ("available", bytes_text(memory.available_bytes)),
        ("step time, estimated", seconds_text(run.step_time_s)),
        ("bound by", run.bound_by or "unknown"),
        ("MFU", share_text(run.mfu)),
        ("collectives", f"{len(run.collectives)}, of which {len(run.unexpected)} unexpected"),
    ]
    return joined(
        [
            _title(f"{run.name} on {run.target} ({mesh}): ", _fit(run.fits)),
            _table(("of one device", ""), rows, right=(1,)),
            _notes(run.notes),
            _whole(run),
            tag("div", "report.save('report.html') writes the page with pictures.", class_="soft"),
        ]
    )


def _plan(plan: Plan) -> Html:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.axes)
    options = {"chosen": plan.chosen}
    options |= {"runner-up": plan.runners_up[0]} if plan.runners_up else {}
    options |= {"data parallel": plan.data_parallel} if plan.data_parallel else {}
    headings = ("", "mesh", "ZeRO", "micro-batches", "step", "peak")
    return joined(
        [
            _title(f"Plan for {plan.target}: {mesh}, ZeRO {plan.zero}, remat {plan.how.remat!r}"),
            _table(headings, [_option(name, each) for name, each in options.items()], (4, 5)),
            tag("ul", [tag("li", each) for each in plan.why]),
            _notes(plan.notes),
            _whole(plan),
        ]
    )


def _option(name: str, option: Option) -> tuple[str, ...]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in option.axes)
    time = seconds_text(option.time_s)
    numbers = str(option.zero), str(option.accumulate)
    return name, mesh, *numbers, time, bytes_text(option.held_bytes)


def _measured(seen: Measured) -> Html:
    mesh = ", ".join(f"{axis}={size}" for axis, size in seen.axes)
    times = seen.step_times_s
    span = f"{seconds_text(min(times))} to {seconds_text(max(times))}"
    rows = [
        ("step time, median", seconds_text(seen.step_time_s), span),
        ("parameters", bytes_text(seen.parameter_bytes), ""),
        ("slots", bytes_text(seen.slot_bytes), ""),
        ("other state", bytes_text(seen.state_bytes), ""),
        ("inputs", bytes_text(seen.input_bytes), ""),
        ("peak", bytes_text(seen.peak_bytes), seen.peak_is),
    ]
    for each in seen.collectives or ():
        over = f"{each.kind} over {', '.join(each.axes)}"
        rows.append((over, seconds_text(each.time_s), f"{each.count:g} per step"))
    title = f"{seen.name} on {seen.device} ({mesh}), {len(times)} steps"
    return joined([_title(title), _table(("of one device", "", ""), rows, right=(1,))])


def _comparison(comparison: Comparison) -> Html:
    return tag("pre", str(comparison))


def _equivalence(found: Equivalence) -> Html:
    from .equivalence.table import closing, opening

    end = tag("b", closing(found), class_="good" if found.equal else "bad")
    return joined([opening(found), [_under_mesh(each) for each in found.meshes], tag("p", end)])


def _under_mesh(each: UnderMesh) -> Html:
    from .equivalence.table import HEADINGS, rows_of, verdict

    table = _table(HEADINGS, rows_of(each), right=range(1, 6))
    line = tag("b", verdict(each), class_="good" if each.equal else "bad")
    return tag("details", tag("summary", line), _notes(each.notes), table, open=_open(each))


def _open(each: UnderMesh) -> str | None:
    return None if each.equal else ""


_VIEWS: dict[str, _View] = {
    "layouts.mesh.Mesh": _mesh,
    "layouts.layout.Layout": _layout,
    "layouts.layout_map.LayoutMap": _layout_map,
    "layouts.explain.Explanation": _explanation,
    "planning.report.DryRun": _dry_run,
    "planning.search.plan.Plan": _plan,
    "planning.measurement.Measured": _measured,
    "planning.beside.Comparison": _comparison,
    "equivalence.judging.Equivalence": _equivalence,
}


# Pieces


def _title(*children: Any) -> Html:
    return tag("div", tag("b", *children))


def _picture(what: Section) -> Html:
    """As an image, which frontends show of notebooks that they do not trust, too."""
    data = base64.b64encode(draw_svg(what).encode()).decode()
    alt = f"mesh {what.mesh.axes_text}"
    return tag("div", Html(tag("img", src=f"data:image/svg+xml;base64,{data}", alt=alt)))


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()
) -> Html:
    numbers = set(right)

    def cells(name: str, texts: Sequence[str]) -> list[Html]:
        return [
            tag(name, text, class_="n" if place in numbers else None)
            for place, text in enumerate(texts)
        ]

    shown = [tag("tr", cells("td", row)) for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        more = f"and {len(rows) - _MOST_ROWS} more; print() shows all"
        shown.append(tag("tr", tag("td", more, colspan=len(headings))))
    head = tag("thead", tag("tr", cells("th", headings))) if any(headings) else None
    return tag("div", tag("table", head, tag("tbody", shown)), class_="scroll")


def _fit(fits: bool | None) -> Html:
    if fits is None:
        return tag("span", "fit unknown: device memory not known", class_="soft")
    return tag("span", "fits" if fits else "does not fit", class_="good" if fits else "bad")


def _notes(notes: Sequence[str]) -> Html | None:
    return tag("ul", [tag("li", note) for note in notes], class_="soft") if notes else None


def _whole(value: Any) -> Html:
    return tag("details", tag("summary", "as text"), tag("pre", str(value)))
