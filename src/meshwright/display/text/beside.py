"""What was measured, alone and beside a dry run, and two dry runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...layouts.mesh import axes_text
from ...units import bytes_text, quantity_text, seconds_text
from ..figures import axes_list
from .columns import Columns, Line, Paragraphs, paragraphs

if TYPE_CHECKING:
    from ...planning.beside import CollectiveRow, Comparison, Pair, Row
    from ...planning.measurement import Measured
    from ...planning.report import DryRun


def comparison_text(comparison: Comparison) -> Paragraphs:
    """A prediction beside a measurement."""
    head = ("", "predicted", "measured", "ratio", "")
    rows = [(*row_cells(row), row.note) for row in comparison.rows]
    parts: list[str | Line | Columns] = [
        Line(comparison.title, "bold"),
        Columns([head, *rows], right=(1, 2, 3)),
    ]
    if comparison.collectives:
        head = ("kind", "axes", "count", "measured", "bytes", "measured", "time", "measured")
        table = Columns([head, *map(_collective, comparison.collectives)], right=range(2, 8))
        parts += ["", Line("collectives of one step", "bold"), table]
    return paragraphs(parts, [f"note: {note}" for note in comparison.notes])


def pair_text(pair: Pair) -> Paragraphs:
    """Two dry runs side by side."""
    heading = ("", *pair.titles, "ratio")
    table = Columns([heading, *map(row_cells, pair.rows)], right=(1, 2, 3))
    return paragraphs(pair_title(pair.first), pair_title(pair.second), "", table)


def pair_title(run: DryRun) -> str:
    """One of two dry runs in a line."""
    how = ", not compiled" if run.is_analytic else ""
    return f"{run.name} on {run.target} ({axes_text(run.axes)}{how})"


def row_cells(row: Row) -> tuple[str, str, str, str]:
    """Name, both figures and their ratio."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    first, second = (quantity_text(value, row.unit) for value in (row.first, row.second))
    return row.name, first, second, ratio


def _collective(row: CollectiveRow) -> tuple[str, ...]:
    counts = ("?" if count is None else f"{count:,g}" for count in row.count)
    return (
        row.kind,
        axes_list(row.axes),
        *counts,
        *map(bytes_text, row.nbytes),
        *map(seconds_text, row.time_s),
    )


def measured_text(measured: Measured) -> Paragraphs:
    """What steps took where they ran."""
    times = measured.step_times_s
    nbytes = (
        measured.parameter_bytes + measured.slot_bytes + measured.state_bytes + measured.input_bytes
    )
    step = f"{seconds_text(min(times))} to {seconds_text(max(times))}"
    rows = [
        ("step", seconds_text(measured.step_time_s), step),
        ("arrays", bytes_text(nbytes), f"{nbytes:,} bytes of one device"),
    ]
    if measured.peak_bytes is not None:
        rows.append(
            (
                "peak",
                bytes_text(measured.peak_bytes),
                f"{measured.peak_bytes:,}: {measured.peak_is}",
            )
        )
    for collective in measured.collectives or ():
        over = f"{collective.count:g} in a step, over {axes_list(collective.axes)}"
        rows.append((collective.kind, seconds_text(collective.time_s), over))
    return paragraphs(Line(measured_title(measured), "bold"), Columns(rows, right=(1,)))


def measured_title(measured: Measured) -> str:
    """What was measured, where, and in how many steps."""
    count = len(measured.step_times_s)
    return f"{measured.name} on {measured.device} ({axes_text(measured.axes)}), {count} steps"
