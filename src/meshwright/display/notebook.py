"""The views of values in a notebook: small HTML, readable on a light page and on a dark one.

Everything that comes from the user is escaped by the template. Colours are those of the page that
the view stands on; pictures keep their own paper.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..layouts.layout import Layout
from ..layouts.mesh import axes_text
from ..units import UNKNOWN, bytes_text, seconds_text, share_text
from .drawing import Drawn, Section, draw_svg
from .drawing.ticks import tick_table_svg
from .drawing.tiling import Tiling
from .drawing.words import copies_text
from .figures import SETTLES, memory_figures
from .page.elements import macro, source
from .text.beside import measured_title, pair_title, row_cells
from .text.equivalence import HEADINGS, closing, opening, rows_of, verdict
from .text.explanation import explanation_row
from .text.ticks import tick_table_title

if TYPE_CHECKING:
    from markupsafe import Markup

    from ..equivalence.judging import Equivalence
    from ..layouts.explain import Explanation
    from ..layouts.layout_map import LayoutMap
    from ..layouts.mesh import Mesh
    from ..planning.beside import Comparison, Pair
    from ..planning.measurement import Measured
    from ..planning.report import DryRun
    from ..planning.search.plan import Option, Plan
    from ..stages.table import TickTable

_MOST_ROWS = 200  # of a table; a notebook keeps all that it shows
_FITS = {
    "fits": ("good", "fits"),
    "may not fit": ("soft", "may not fit: a compiled dry run settles it"),
    "does not fit": ("bad", "does not fit"),
    None: ("soft", "fit unknown: device memory not known"),
}


def _view(title: str, **parts: Any) -> str:
    """A view with those parts that the template has."""
    return str(macro("notebook.html", "view")(source("notebook.css"), title, **parts))


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()
) -> Markup:
    """Rows under their headings; the columns ``right`` hold numbers."""
    more = max(0, len(rows) - _MOST_ROWS)
    return macro("notebook.html", "table")(headings, rows[:_MOST_ROWS], right, more)


def mesh_view(mesh: Mesh) -> str:
    # As an image, which notebooks show that are not trusted, too.
    data = base64.b64encode(draw_svg(Section("", mesh)).encode()).decode()
    return _view(f"Mesh {mesh.axes_text}", picture=(data, f"mesh {mesh.axes_text}"))


def tick_table_view(table: TickTable) -> str:
    data = base64.b64encode(tick_table_svg(table).encode()).decode()
    return _view(tick_table_title(table), picture=(data, str(table)))


def layout_view(layout: Layout) -> str:
    specs = [str(Layout([spec])).strip("[]") for spec in layout.specs]
    rows = [(str(dim), spec) for dim, spec in enumerate(specs)]
    if not layout.is_bound:
        return _view(f"Layout {layout}", table=_table(("dim", "axes"), rows, (0,)))
    counts = tuple(layout.num_shards(dim) for dim in range(layout.rank))
    copies = copies_text(Tiling.of(Drawn("", counts, layout)))
    title = f"Layout {layout.unbound()} on {layout.bound_mesh().axes_text}: {copies}"
    cells = [(*row, str(count)) for row, count in zip(rows, counts, strict=True)]
    return _view(title, table=_table(("dim", "axes", "pieces"), cells, right=(0, 2)))


def layout_map_view(layouts: LayoutMap) -> str:
    rows = [(pattern, layouts.text_of(pattern)) for pattern in layouts]
    return _view(f"LayoutMap, {len(rows)} layouts", table=_table(("pattern", "layout"), rows))


def explanation_view(explanation: Explanation) -> str:
    rows = []
    for placed in explanation.placed:
        variable, dims, layout, _, why = explanation_row(placed)
        rows.append((variable, dims, layout, bytes_text(placed.bytes_per_device), why))
    share = f"{bytes_text(explanation.bytes_per_device)} per device"
    title = f"{len(rows)} variables on {explanation.mesh.axes_text}, {share}"
    headings = ("variable", "dims", "layout", "per device", "why")
    return _view(title, table=_table(headings, rows, right=(3,)))


def dry_run_view(run: DryRun) -> str:
    unexpected = f"{len(run.collectives)}, of which {len(run.unexpected)} unexpected"
    rows = [
        *((figure.name, figure.text) for figure in memory_figures(run.memory)),
        ("step time, estimated", seconds_text(run.step_time_s)),
        ("bound by", run.bound_by or UNKNOWN),
        ("MFU", share_text(run.mfu)),
        ("collectives", unexpected),
    ]
    return _view(
        f"{run.name} on {run.target} ({axes_text(run.axes)}): ",
        verdict=_FITS[run.verdict],
        table=_table(("of one device", ""), rows, right=(1,)),
        notes=run.notes,
        text=str(run),
        hint="report.save('report.html') writes the page with pictures.",
    )


def plan_view(plan: Plan) -> str:
    options = {"chosen": plan.chosen}
    options |= {"runner-up": plan.runners_up[0]} if plan.runners_up else {}
    options |= {"data parallel": plan.data_parallel} if plan.data_parallel else {}
    headings = ("", "mesh", "ZeRO", "micro-batches", "step", "peak")
    mesh, may_not = axes_text(plan.axes), plan.verdict == "may not fit"
    title = f"Plan for {plan.target}: {mesh}, ZeRO {plan.zero}, remat {plan.how.remat!r}"
    return _view(
        f"{title}: " if may_not else title,
        verdict=("soft", f"may not fit, {SETTLES}") if may_not else None,
        table=_table(headings, [_option(*pair) for pair in options.items()], (4, 5)),
        reasons=[str(reason) for reason in plan.why],
        notes=plan.notes,
        text=str(plan),
    )


def _option(name: str, option: Option) -> tuple[str, ...]:
    numbers = str(option.zero), str(option.accumulate), seconds_text(option.time_s)
    return name, axes_text(option.axes), *numbers, bytes_text(option.held_bytes)


def measured_view(measured: Measured) -> str:
    times = measured.step_times_s
    span = f"{seconds_text(min(times))} to {seconds_text(max(times))}"
    rows = [
        ("step time, median", seconds_text(measured.step_time_s), span),
        ("parameters", bytes_text(measured.parameter_bytes), ""),
        ("slots", bytes_text(measured.slot_bytes), ""),
        ("other state", bytes_text(measured.state_bytes), ""),
        ("inputs", bytes_text(measured.input_bytes), ""),
        ("peak", bytes_text(measured.peak_bytes), measured.peak_is),
    ]
    for collective in measured.collectives or ():
        over = f"{collective.kind} over {', '.join(collective.axes)}"
        rows.append((over, seconds_text(collective.time_s), f"{collective.count:g} per step"))
    table = _table(("of one device", "", ""), rows, right=(1,))
    return _view(measured_title(measured), table=table)


def comparison_view(comparison: Comparison) -> str:
    rows = [(*row_cells(row), row.note) for row in comparison.rows]
    table = _table(("", "predicted", "measured", "ratio", ""), rows, right=(1, 2, 3))
    return _view(comparison.title, table=table, notes=comparison.notes, text=str(comparison))


def pair_view(pair: Pair) -> str:
    titles = f"{pair_title(pair.first)}, {pair_title(pair.second)}"
    rows = [row_cells(row) for row in pair.rows]
    return _view(titles, table=_table(("", *pair.titles, "ratio"), rows, right=(1, 2, 3)))


def equivalence_view(result: Equivalence) -> str:
    parts = [
        {
            "verdict": ("good" if mesh.equal else "bad", verdict(mesh)),
            "is_open": not mesh.equal,
            "table": _table(HEADINGS, rows_of(mesh), right=range(1, 6)),
            "notes": mesh.notes,
        }
        for mesh in result.meshes
    ]
    end = "good" if result.equal else "bad", closing(result)
    return _view(opening(result), parts=parts, closing=end)
