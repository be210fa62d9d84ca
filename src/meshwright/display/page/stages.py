"""The stages of a pipeline on a page: what each has, and what it does at each tick."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from ..drawing.ticks import tick_table_picture
from ..text.explanation import STAGE_HEADINGS, stage_row
from .elements import Cell, Column, element

if TYPE_CHECKING:
    from ...planning.report import DryRun


def stages_section(run: DryRun) -> dict[str, object] | None:
    """The section on stages, of a pipeline."""
    if run.ticks is None:
        return None
    kinds = None, "words", "num", "num"
    columns = [Column(*options) for options in zip(STAGE_HEADINGS, kinds, strict=True)]
    rows = []
    for share in run.stages:
        name, has, flops, nbytes = stage_row(share)
        rows.append((name, has, Cell(flops, share.flops_share), Cell(nbytes, share.held_bytes)))
    return {
        "picture": Markup(
            tick_table_picture(run.ticks, [share.flops_share for share in run.stages])
        ),
        "table": element(
            "table", "stages-table", "What each stage computes, forward", columns, rows, None
        ),
    }
