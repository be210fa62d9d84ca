"""A dry run as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...equal_layers import short_list
from ...hlo.traffic import alike
from ...layouts.mesh import axes_text
from ...units import bytes_text
from ..figures import (
    SIGNS,
    analytic_text,
    axes_list,
    fit_text,
    how_to_know,
    memory_figures,
    remedies_of,
    tensor_rows,
    time_figures,
)
from .columns import Columns, Content, Line, Paragraphs, first_rows, paragraphs
from .explanation import stage_row
from .ticks import tick_table_title

if TYPE_CHECKING:
    from ...hlo.traffic import Transfer
    from ...planning.report import DryRun

_ROWS = 12  # of a table


def dry_run_text(run: DryRun) -> Paragraphs:
    """The report as a terminal shows it."""
    good = {"good": "bold green", "bad": "bold red", "maybe": "bold"}[SIGNS[run.verdict][1]]
    parts: list[Content] = [
        [Line(f"{run.name} on {run.target} ({axes_text(run.axes)}): {fit_text(run)}", good)]
    ]
    if run.is_analytic:
        parts.append([f"by the {analytic_text(run)}"])
    parts += [[Line(f"error: {error}", "red")] for error in run.errors]
    figures = [
        (name, f"{value:,}", text, meaning)
        for name, value, text, meaning in memory_figures(run.memory)
        if value is not None
    ]
    parts.append([_title("memory of one device"), Columns(figures, right=(1, 2))])
    if run.refusal:
        lines = [[line] for line in run.refusal.strip().splitlines()]
        parts.append([_title("the compiler says"), Columns(lines)])
    if run.tensors:
        title = f"largest of the temporary arrays at the peak, {bytes_text(run.alive_bytes)} in all"
        parts.append([_title(title), _tensors(run)])
    if run.compiled is not None or run.is_analytic:
        parts.append([_title("collectives of one step"), _transfers(run.collectives)])
    if run.estimate is not None:
        parts.append([_title("time of one step, estimated"), _time(run)])
    if run.stages:
        shares = [share.flops_share for share in run.stages]
        title = "branches" if run.ticks is None else tick_table_title(run.ticks, shares)
        rows = [
            (name, flops, nbytes, has) for name, has, flops, nbytes in map(stage_row, run.stages)
        ]
        parts.append([_title(title), Columns(rows, right=(1, 2))])
    if run.unexpected:
        rows = first_rows([(f"! {remedy}",) for remedy in remedies_of(run.unexpected)], _ROWS)
        parts.append([_title("unexpected, and what would remove it"), Columns(rows)])
    parts += [[f"note: {note}"] for note in run.notes]
    return paragraphs(parts[0], *(("", part) for part in parts[1:]))


def _title(text: str) -> Line:
    return Line(text, "bold")


def _time(run: DryRun) -> Columns:
    estimate = run.estimate
    assert estimate is not None
    figures = time_figures(estimate, is_dry_run=not run.is_analytic)
    rows = [(name, text, meaning) for name, _, text, meaning in figures]
    if run.fed is not None and run.samples_per_s:
        rows.append(("samples", f"{run.samples_per_s:,.0f} /s", f"{run.fed.rows:,} in a step"))
    if run.fed is not None and run.tokens_per_s:
        rows.append(("tokens", f"{run.tokens_per_s:,.0f} /s", f"{run.fed.tokens:,} in a step"))
    if estimate.missing:
        rows.append(("unknown", "", ", ".join(estimate.missing) + how_to_know(estimate.target)))
    return Columns(rows, right=(1,))


def _tensors(run: DryRun) -> Columns:
    rows = [
        (f"{count} x", where, phase, "x".join(map(str, dims)) or "scalar", dtype, bytes_text(size))
        for where, phase, dims, dtype, count, size in tensor_rows(run)
    ]
    return Columns(first_rows(rows, _ROWS), right=(0, 5))


def _transfers(transfers: Sequence[Transfer]) -> Columns:
    if not transfers:
        return Columns([("none",)])
    rows, marked = [], set()
    for number, row in enumerate(alike(transfers), start=1):
        first, is_known = row.first, row.count is not None
        if first.is_unexpected:
            marked.add(number)
        rows.append(
            (
                "!" if first.is_unexpected else "",
                first.kind,
                axes_list(first.axes),
                f"{row.count}" if is_known else "?",
                bytes_text(row.nbytes) + ("" if is_known else " each time"),
                ", ".join(first.phases),
                short_list(row.places),
                short_list(first.lines),
            )
        )
    heading = ("", "kind", "axes", "count", "bytes per device", "when", "for", "written in")
    if not any(transfer.lines for transfer in transfers):
        heading, rows = heading[:-1], [row[:-1] for row in rows]
    return Columns([heading, *first_rows(rows, _ROWS)], right=(3, 4), marked=marked)
