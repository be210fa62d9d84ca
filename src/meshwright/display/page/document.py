"""Whole pages: one file each, no network, no fonts, nothing that runs but their own few lines."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...hlo.links import links_of
from ...layouts.mesh import Mesh, axes_text
from ...planning.verdict import error_text
from ...targets.target import Target
from ...units import UNKNOWN, bytes_text, flops_text, seconds_text, share_text
from ..figures import SETTLES, SIGNS, analytic_text, fit_text, range_text
from ..text.beside import pair_title, row_cells
from .boxes import boxes_section
from .collectives import collectives_section
from .elements import Cell, Column, Part, element, environment, source
from .layers import layers_section
from .layouts import layouts_section
from .memory import memory_section
from .pictures import mesh_picture
from .plan import plan_axes, plan_batches, plan_figures, plan_layouts, plan_section
from .stages import stages_section
from .timeline import time_section

if TYPE_CHECKING:
    from markupsafe import Markup

    from ...planning.beside import Pair, Row
    from ...planning.report import DryRun
    from ...planning.search.plan import Plan

_LINKS = {  # the sections of all pages, and their names in the navigation
    "load": "Load",
    "batches": "Batches",
    "latency": "Latency",
    "calls": "Call it",
    "plan": "Plan",
    "mesh": "Mesh",
    "memory": "Memory",
    "time": "Time",
    "stages": "Stages",
    "collectives": "Collectives",
    "boxes": "Layers",
    "layers": "FLOPs",
    "layouts": "Layouts",
    "notes": "Notes",
    "figures": "Figures",
}


def dry_run_page(run: DryRun, plan: Plan | None = None) -> str:
    """The report as one HTML page, complete in itself; the same report gives the same page.

    With the plan that the step was laid out by, its alternatives are shown, too. It holds no time
    stamp and asks nothing of a network: its own policy forbids that. All that comes from the user
    is escaped.
    """
    sections = {
        "plan": None if plan is None else plan_section(plan),
        "mesh": {"picture": mesh_picture(Mesh(dict(run.axes))), "table": _axes(run)},
        "memory": {"run": run, **memory_section(run)},
        "time": time_section(run),
        "stages": stages_section(run),
        "collectives": collectives_section(run),
        "boxes": boxes_section(run),
        "layers": layers_section(run.estimate),
        "layouts": layouts_section(run.placed),
        "notes": _notes(run),
    }
    return page_of(f"{run.name} on {run.target}", _run_head(run), sections)


def plan_page(plan: Plan) -> str:
    """A plan as a page: its alternatives, its mesh and its layouts."""
    title = plan.name or f"A plan for {plan.target}"
    limit = bytes_text(plan.limit_bytes)
    sign, kind = SIGNS[plan.verdict]
    sentence = "Fit unknown: device memory not known"
    if plan.verdict is not None:
        sentence = f"{plan.verdict.capitalize()} into {limit}"
    if plan.verdict == "may not fit":
        sentence += f": {SETTLES}; {error_text(Target.of(plan.target))}"
    most = "most" if plan.objective == "throughput" else "least"
    by = f", by the numbers of {plan.hardware}: the {most} {plan.objective}"
    verdicts = [(kind, f"{sign} {sentence}")]
    head = element("head", "Meshwright plan", title, plan.target, by, verdicts, plan_figures(plan))
    sections = {
        "plan": plan_section(plan),
        "batches": plan_batches(plan),
        "mesh": {"picture": mesh_picture(plan.mesh), "table": plan_axes(plan)},
        "layouts": plan_layouts(plan),
    }
    return page_of(f"{plan.name} on {plan.target}" if plan.name else title, head, sections)


def pair_page(pair: Pair) -> str:
    """Two dry runs side by side."""
    title = f"{pair.first.name}: {' and '.join(pair.titles)}"
    both = f"{pair_title(pair.first)}, {pair_title(pair.second)}"
    one, two = pair.titles
    columns = (
        Column("figure", "words"),
        Column(one, "num"),
        Column(two, "num"),
        Column("ratio", "num"),
        Column("side by side"),
    )
    caption = "All figures of one device, or of one step"
    table = element(
        "table", "pair-table", caption, columns, [_pair_row(row) for row in pair.rows], shown=60
    )
    return page_of(
        title,
        element("head", "Meshwright dry runs", title, "", both),
        {"figures": {"table": table}},
    )


def page_of(title: str, head: Markup, sections: Mapping[str, Mapping[str, object] | None]) -> str:
    """A document with those of the sections that are there, and links to them."""
    there = {name: section for name, section in sections.items() if section is not None}
    page = environment().get_template("page.html")
    return page.render(
        title=title,
        head_of_page=head,
        sections=there,
        links=_LINKS,
        style=source("page.css"),
        script=source("page.js"),
        digest=_digest(),
    )


@functools.cache
def _digest() -> str:
    """Of the script, by which the page's policy lets it run and no other."""
    return base64.b64encode(hashlib.sha256(source("page.js").encode()).digest()).decode()


# Dry runs


def _run_head(run: DryRun) -> Markup:
    sign, kind = SIGNS[run.verdict]
    fit = fit_text(run)
    verdicts = [(kind, f"{sign} {fit[0].upper()}{fit[1:]}")]
    if run.is_analytic:
        verdicts.append(("maybe", f"By the {analytic_text(run)}"))
    verdicts += [("warning", f"✗ Error: {error}") for error in run.errors]
    under = f", {run.target.num_devices:,} devices, mesh {axes_text(run.axes, ' × ')}"
    return element(
        "head", "Meshwright dry run", run.name, str(run.target), under, verdicts, _run_figures(run)
    )


def _run_figures(run: DryRun) -> list[tuple[str, str, str]]:
    memory = run.memory
    of = "" if memory.available_bytes is None else f"of {bytes_text(memory.available_bytes)}"
    near, seconds = "", run.estimate
    if seconds is not None and seconds.step_time_s:
        how = not run.is_analytic, seconds.hardware, run.target
        near = range_text(seconds.step_time_s, *how)
    figures = [
        ("peak of a device", bytes_text(memory.peak_bytes), of),
        ("time of a step", seconds_text(run.step_time_s), f"estimated; {near}" if near else ""),
        ("MFU", share_text(run.mfu), "of the peak FLOP/s" if run.mfu is not None else ""),
        ("bound by", run.bound_by or UNKNOWN, ""),
        ("FLOPs of a device", flops_text(run.flops), "in a step"),
    ]
    if run.ticks is None:
        share = share_text(run.replicated_share)
        figures.insert(4, ("replicated", share, "of all devices' FLOPs"))
    if run.samples_per_s:
        figures.append(("samples per second", f"{run.samples_per_s:,.0f}", "of all devices"))
    if run.tokens_per_s:
        figures.append(("tokens per second", f"{run.tokens_per_s:,.0f}", "of all devices"))
    if run.compiled is not None or run.is_analytic:
        more = "see their remedies" if run.unexpected else "all asked for"
        figures.append(("unexpected collectives", str(len(run.unexpected)), more))
    return figures


def _axes(run: DryRun) -> Markup:
    links = () if run.hardware is None else links_of(run.target, run.hardware, run.axes)
    lies = {link.axis: str(link).partition(" lies on ")[2] for link in links if link.size > 1}
    columns = (Column("axis"), Column("devices", "num"), Column("is taken to lie on"))
    rows = [(axis, Cell(str(size), size), lies.get(axis, "-")) for axis, size in run.axes]
    caption = f"The axes of its {run.target.num_devices:,} devices"
    return element("table", "axes-table", caption, columns, rows, shown=None)


def _notes(run: DryRun) -> dict[str, object] | None:
    """What was assumed, and where the numbers of the hardware are from."""
    notes = [*run.notes, *(run.estimate.assumptions if run.estimate else ())]
    table = None
    if run.hardware is not None and run.hardware.sources:
        columns = (Column("number"), Column("source", "path"))
        caption = f"The numbers of {run.hardware.name}, and where they are from"
        table = element(
            "table", "sources-table", caption, columns, run.hardware.sources, shown=None
        )
    if not notes and table is None:
        return None
    return {"notes": [f"{n[:1].upper()}{n[1:]}".rstrip(".") + "." for n in notes], "table": table}


# Two of them


def _pair_row(row: Row) -> tuple[Cell, ...]:
    name, first, second, ratio = row_cells(row)
    both = row.first or 0.0, row.second or 0.0
    whole = max(both) or 1.0
    parts = Part("first", both[0], first, "blue"), Part("second", both[1], second, "orange")
    return (
        Cell(name),
        Cell(first, row.first),
        Cell(second, row.second),
        Cell(ratio, row.ratio),
        Cell(element("lines", [element("bar", [part], whole, name) for part in parts]), row.ratio),
    )
