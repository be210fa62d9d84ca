"""The tick table of a pipeline as an SVG: stages below each other, ticks from left to right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..text.ticks import MARKS, tick_table_title
from .canvas import Canvas, Point
from .palette import INK, PAPER, RULE, SOFT, paint

if TYPE_CHECKING:
    from ...stages.table import TickTable

_MARGIN, _NAMES, _HIGH = 24.0, 64.0, 24.0
_WIDE, _NARROW = 22.0, 2.0  # of a pass
_NUMBERED = 64  # passes of a stage, up to which each has its number
_ROOM = 14.0  # of a number
_HUES = {"forward": 0, "backward": 1, "weights": 2, "loss": 3}  # pieces of the palette
_LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "weights": "gradients of weights",
    "loss": "after the blocks",
}


def tick_table_svg(table: TickTable, of_stages: Sequence[float] = ()) -> str:
    """The text of an SVG file: a box for each pass, as wide as the share of the FLOPs that its
    stage has, if ``of_stages`` says them.

    >>> import meshwright as mw
    >>> tick_table_svg(mw.Pipeline("stage", 4).table(2)).startswith("<svg")
    True
    """
    return _picture(table, _WIDE, PAPER, RULE, of_stages)


def tick_table_picture(table: TickTable, of_stages: Sequence[float] = ()) -> str:
    """The same for a page, without a paper of its own; of many ticks without numbers. A pass is as
    wide as the share of the FLOPs that its stage has, if ``of_stages`` says them."""
    starts = _starts(table, [1.0] * table.stages)
    wide = _WIDE if starts[-1] - starts[0] <= _NUMBERED else _NARROW
    return _picture(table, wide, "none", "none", of_stages)


def _picture(
    table: TickTable, most: float, paper: str, rule: str, of_stages: Sequence[float] = ()
) -> str:
    canvas = Canvas("ticks")
    title = tick_table_title(table, of_stages)
    largest = max(of_stages, default=0.0) or 1.0
    wide = [most * share / largest for share in of_stages] or [most] * table.stages
    y = _MARGIN + 18
    canvas.text(_MARGIN, y, title, 15, font_weight=700, fill=INK)
    y += 14
    starts = _starts(table, wide)
    for stage in range(table.stages):
        canvas.text(_MARGIN, y + 16, f"stage {stage}", 12, fill=SOFT)
        canvas.line([(_MARGIN + _NAMES, y + _HIGH), (starts[-1], y + _HIGH)], stroke=RULE)
        _stage(canvas, table, stage, starts, y, wide[stage], most == _WIDE)
        y += _HIGH
    y, x = y + 24, _MARGIN
    for kind, text in _LEGEND.items():
        if any(work.kind == kind for _, _, work in table.works()):
            canvas.rect(x, y - 11, 14, 14, rx=2, fill=paint(_HUES[kind], 8).fill)
            canvas.text(x + 20, y, text, 12, fill=SOFT)
            x += 36 + 7 * len(text)
    width = max(starts[-1], 680.0) + _MARGIN
    return canvas.finish(width, y + 16, title, _description(table), paper, rule)


def _stage(
    canvas: Canvas,
    table: TickTable,
    stage: int,
    starts: list[float],
    y: float,
    wide: float,
    is_numbered: bool,
) -> None:
    """The passes of one stage; those without numbers are one shape for each kind."""
    shapes: dict[str, list[list[Point]]] = defaultdict(list)
    for x, row in zip(starts, table.ticks, strict=False):
        for work in row[stage]:
            if not is_numbered:
                low, high, right = y + 2, y + _HIGH - 2, x + wide
                shapes[work.kind].append([(x, low), (right, low), (right, high), (x, high)])
            else:
                colours = paint(_HUES[work.kind], 8)
                canvas.rect(x, y + 2, max(1.0, wide - 1), _HIGH - 4, rx=2, fill=colours.fill)
                if wide >= _ROOM:
                    canvas.text(x + 3, y + 16, str(work.micro_batch), 10, fill=colours.ink)
            x += wide
    for kind, of_kind in shapes.items():
        canvas.polygons(of_kind, fill=paint(_HUES[kind], 8).fill)


def _starts(table: TickTable, wide: Sequence[float]) -> list[float]:
    """Where each tick begins, and where the last one ends, by the widths of each stage's passes."""
    starts = [_MARGIN + _NAMES]
    for row in table.ticks:
        widths = [len(works) * width for works, width in zip(row, wide, strict=True)]
        starts.append(starts[-1] + max(min(wide), *widths))
    return starts


def _description(table: TickTable) -> str:
    """The picture in words, for readers that cannot see it."""
    lines = []
    for stage in range(table.stages):
        works = [w for row in table.ticks for w in row[stage]]
        passes = " ".join(f"{MARKS[w.kind]}{w.micro_batch}" for w in works)
        lines.append(f"Stage {stage}: {passes}.")
    return " ".join(lines)
