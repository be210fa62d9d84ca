"""The tick table of a pipeline as an SVG: stages below each other, ticks from left to right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..text.ticks import MARKS, tick_table_title
from .canvas import Canvas
from .palette import INK, PAPER, RULE, SOFT, paint

if TYPE_CHECKING:
    from ...stages.table import TickTable

_MARGIN, _NAMES, _WIDE, _HIGH = 24.0, 64.0, 22.0, 24.0
_HUES = {"forward": 0, "backward": 1, "weights": 2}  # pieces of the palette
_LEGEND = {"forward": "forward", "backward": "backward", "weights": "gradients of weights"}


def tick_table_svg(table: TickTable) -> str:
    """The text of an SVG file: a box for each pass, as wide as what it takes of its tick.

    >>> import meshwright as mw
    >>> tick_table_svg(mw.Pipeline("stage", 4).table(2)).startswith("<svg")
    True
    """
    canvas = Canvas("ticks")
    title = tick_table_title(table)
    y = _MARGIN + 18
    canvas.text(_MARGIN, y, title, 15, font_weight=700, fill=INK)
    y += 14
    starts = _starts(table)
    for stage in range(table.stages):
        canvas.text(_MARGIN, y + 16, f"stage {stage}", 12, fill=SOFT)
        canvas.line([(_MARGIN + _NAMES, y + _HIGH), (starts[-1], y + _HIGH)], stroke=RULE)
        for x, row in zip(starts, table.ticks, strict=False):
            for work in row[stage]:
                colours = paint(_HUES[work.kind], 8)
                canvas.rect(x, y + 2, _WIDE - 1, _HIGH - 4, rx=2, fill=colours.fill)
                number = str(work.micro_batch)
                canvas.text(x + 3, y + 16, number, 10, fill=colours.ink)
                x += _WIDE
        y += _HIGH
    y, x = y + 24, _MARGIN
    for kind, text in _LEGEND.items():
        if kind != "weights" or table.splits_backward:
            canvas.rect(x, y - 11, 14, 14, rx=2, fill=paint(_HUES[kind], 8).fill)
            canvas.text(x + 20, y, text, 12, fill=SOFT)
            x += 36 + 7 * len(text)
    width = max(starts[-1], 480.0) + _MARGIN
    return canvas.finish(width, y + 16, title, _description(table), PAPER, RULE)


def _starts(table: TickTable) -> list[float]:
    """Where each tick begins, and where the last one ends."""
    starts = [_MARGIN + _NAMES]
    for row in table.ticks:
        starts.append(starts[-1] + _WIDE * max(1, *map(len, row)))
    return starts


def _description(table: TickTable) -> str:
    """The picture in words, for readers that cannot see it."""
    lines = []
    for stage in range(table.stages):
        works = [w for row in table.ticks for w in row[stage]]
        passes = " ".join(f"{MARKS[w.kind]}{w.micro_batch}" for w in works)
        lines.append(f"Stage {stage}: {passes}.")
    return " ".join(lines)
