"""The views of values in a notebook: small HTML, readable on a light page and on a dark one.

Everything that comes from the user is escaped by the template. Colours are those of the page that
the view stands on; pictures keep their own paper.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..layouts.layout import Layout
from ..layouts.mesh import axes_text
from ..units import UNKNOWN, bytes_text, seconds_text, share_text
from .drawing import Drawn, Section, draw_svg
from .drawing.tiling import Tiling
from .drawing.words import copies_text
from .figures import memory_figures
from .page.elements import macro, source
from .text.equivalence import HEADINGS, closing, opening, rows_of, verdict
from .text.explanation import explanation_row

if TYPE_CHECKING:
    from ..equivalence.judging import Equivalence
    from ..layouts.explain import Explanation
    from ..layouts.layout_map import LayoutMap
    from ..layouts.mesh import Mesh
    from ..planning.beside import Comparison
    from ..planning.measurement import Measured
    from ..planning.report import DryRun
    from ..planning.search.plan import Option, Plan

_MOST_ROWS = 200  # of a table; a notebook keeps all that it shows
_FITS = {True: ("good", "fits"), False: ("bad", "does not fit")}
_UNKNOWN_FIT = "soft", "fit unknown: device memory not known"


@dataclass(frozen=True)
class _Table:
    """Rows under their headings; the columns ``right`` hold numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Iterable[int] = ()

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        return self.rows[:_MOST_ROWS]


@dataclass(frozen=True)
class _View:
    """What a view may hold, in this order; ``verdicts`` are pairs of a class and a text."""

    title: str
    verdict: tuple[str, str] | None = None
    picture: tuple[str, str] | None = None  # its data, and what it shows
    table: _Table | None = None
    reasons: Sequence[str] = ()
    notes: Sequence[str] = ()
    parts: Sequence[_Part] = ()
    text: str = ""
    is_folded: bool = True
    hint: str = ""
    closing: tuple[str, str] | None = None

    def __str__(self) -> str:
        return str(macro("notebook.html", "view")(self, source("notebook.css")))


@dataclass(frozen=True)
class _Part:
    """A part of a view that unfolds."""

    verdict: tuple[str, str]
    is_open: bool
    table: _Table
    notes: Sequence[str] = field(default=())


def mesh_view(mesh: Mesh) -> str:
    # As an image, which notebooks show that are not trusted, too.
    data = base64.b64encode(draw_svg(Section("", mesh)).encode()).decode()
    return str(_View(f"Mesh {mesh.axes_text}", picture=(data, f"mesh {mesh.axes_text}")))


def layout_view(layout: Layout) -> str:
    specs = [str(Layout([spec])).strip("[]") for spec in layout.specs]
    rows = [(str(dim), spec) for dim, spec in enumerate(specs)]
    if not layout.is_bound:
        return str(_View(f"Layout {layout}", table=_Table(("dim", "axes"), rows, (0,))))
    counts = tuple(layout.num_shards(dim) for dim in range(layout.rank))
    copies = copies_text(Tiling.of(Drawn("", counts, layout)))
    title = f"Layout {layout.unbound()} on {layout.bound_mesh().axes_text}: {copies}"
    cells = [(*row, str(count)) for row, count in zip(rows, counts, strict=True)]
    return str(_View(title, table=_Table(("dim", "axes", "pieces"), cells, right=(0, 2))))


def layout_map_view(layouts: LayoutMap) -> str:
    rows = [(pattern, layouts.text_of(pattern)) for pattern in layouts]
    return str(_View(f"LayoutMap, {len(rows)} layouts", table=_Table(("pattern", "layout"), rows)))


def explanation_view(found: Explanation) -> str:
    rows = []
    for placed in found.placed:
        variable, dims, layout, _, why = explanation_row(placed)
        rows.append((variable, dims, layout, bytes_text(placed.bytes_per_device), why))
    held = f"{bytes_text(found.bytes_per_device)} per device"
    title = f"{len(rows)} variables on {found.mesh.axes_text}, {held}"
    headings = ("variable", "dims", "layout", "per device", "why")
    return str(_View(title, table=_Table(headings, rows, right=(3,))))


def dry_run_view(run: DryRun) -> str:
    unexpected = f"{len(run.collectives)}, of which {len(run.unexpected)} unexpected"
    rows = [
        *((figure.name, figure.text) for figure in memory_figures(run.memory)),
        ("step time, estimated", seconds_text(run.step_time_s)),
        ("bound by", run.bound_by or UNKNOWN),
        ("MFU", share_text(run.mfu)),
        ("collectives", unexpected),
    ]
    view = _View(
        f"{run.name} on {run.target} ({axes_text(run.axes)}): ",
        _UNKNOWN_FIT if run.fits is None else _FITS[run.fits],
        table=_Table(("of one device", ""), rows, right=(1,)),
        notes=run.notes,
        text=str(run),
        hint="report.save('report.html') writes the page with pictures.",
    )
    return str(view)


def plan_view(plan: Plan) -> str:
    options = {"chosen": plan.chosen}
    options |= {"runner-up": plan.runners_up[0]} if plan.runners_up else {}
    options |= {"data parallel": plan.data_parallel} if plan.data_parallel else {}
    headings = ("", "mesh", "ZeRO", "micro-batches", "step", "peak")
    mesh = axes_text(plan.axes)
    view = _View(
        f"Plan for {plan.target}: {mesh}, ZeRO {plan.zero}, remat {plan.how.remat!r}",
        table=_Table(headings, [_option(*each) for each in options.items()], (4, 5)),
        reasons=plan.why,
        notes=plan.notes,
        text=str(plan),
    )
    return str(view)


def _option(name: str, option: Option) -> tuple[str, ...]:
    numbers = str(option.zero), str(option.accumulate), seconds_text(option.time_s)
    return name, axes_text(option.axes), *numbers, bytes_text(option.held_bytes)


def measured_view(seen: Measured) -> str:
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
    title = f"{seen.name} on {seen.device} ({axes_text(seen.axes)}), {len(times)} steps"
    return str(_View(title, table=_Table(("of one device", "", ""), rows, right=(1,))))


def comparison_view(comparison: Comparison) -> str:
    return str(_View("", text=str(comparison), is_folded=False))


def equivalence_view(found: Equivalence) -> str:
    parts = [
        _Part(
            ("good" if each.equal else "bad", verdict(each)),
            is_open=not each.equal,
            table=_Table(HEADINGS, rows_of(each), right=range(1, 6)),
            notes=each.notes,
        )
        for each in found.meshes
    ]
    end = "good" if found.equal else "bad", closing(found)
    return str(_View(opening(found), parts=parts, closing=end))
