"""Cells with their paint and numbers, bars, and the legend that explains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .canvas import Canvas, Point, text_width
from .cells import Arrangement, Cell
from .palette import FAINT, INK, PAPER, RULE, SOFT, paint

LABELLED = 13.0  # a cell lower than this bears no number
BARE = "#E6EAF0"  # the paint of a cell that holds nothing yet


class Look(NamedTuple):
    """How one cell looks: its paint, the ways to label it from the fullest to the shortest."""

    fill: str
    ink: str
    labels: Sequence[str]
    title: str
    halo: str | None = None


def paint_cells(
    canvas: Canvas,
    fitted: Arrangement,
    x: float,
    y: float,
    look: Callable[[int], Look],
    finest: float = 3.0,
) -> None:
    """Draw every cell of a grid whose box begins here, parted by lines if not finer than asked."""
    smallest = min(fitted.cell_width, fitted.cell_height)
    gap = 1.5 if smallest > 10 else 0.6 if smallest > 3 else 0.4 if smallest > finest else 0.0
    border = {"stroke": PAPER, "stroke_width": gap} if gap else {"shape_rendering": "crispEdges"}
    looks = {cell: look(cell.number) for cell in fitted.cells()}
    alike: dict[tuple[str, str], list[Cell]] = {}
    for cell, appearance in looks.items():
        alike.setdefault((appearance.fill, appearance.title), []).append(cell)
    for (fill, title), cells in alike.items():
        shapes = ([(x + px, y + py) for px, py in cell.corners] for cell in cells)
        canvas.polygons(shapes, title, fill=fill, **border)
    if fitted.cell_height >= LABELLED:
        for cell, appearance in looks.items():
            _label(canvas, fitted, cell, appearance, x, y)


def _label(canvas: Canvas, fitted: Arrangement, cell: Cell, look: Look, x: float, y: float) -> None:
    size = 12.0 if fitted.cell_height >= 15 else 11.0
    lines = _fitting(look.labels, fitted.cell_width - 4, fitted.cell_height - 2, size)
    halo = {"stroke": look.halo, "stroke_width": 3, "paint_order": "stroke"} if look.halo else {}
    x, y = x + cell.middle[0], y + cell.middle[1] + 0.36 * size
    for number, line in enumerate(lines):
        lower = (number - (len(lines) - 1) / 2) * (size + 3)
        canvas.text(x, y + lower, line, size, text_anchor="middle", fill=look.ink, **halo)


def _fitting(labels: Sequence[str], width: float, height: float, size: float) -> list[str]:
    """The lines of the fullest label that fits, equally many parts in each; none if none fits."""
    most = int((height + 3) // (size + 3))
    for label in labels:
        parts = label.split(", ")
        for count in range(1, min(most, len(parts)) + 1):
            lines = _in_lines(parts, -(-len(parts) // count))
            if len(lines) <= most and all(text_width(line, size) <= width for line in lines):
                return lines
    return []


def _in_lines(parts: Sequence[str], in_each: int) -> list[str]:
    joined = [", ".join(parts[i : i + in_each]) for i in range(0, len(parts), in_each)]
    return joined if in_each == 1 else [f"{line}," for line in joined[:-1]] + joined[-1:]


LEGEND = {
    "piece": "a piece, and the device that holds it",
    "copy": "another copy of it, striped or pale",
    "number": "number of a device",
    "bar": "share on each device",
}


def draw_sample(canvas: Canvas, sample: str, x: float, y: float) -> None:
    """A sample for the legend, left of a text with its baseline at ``y``."""
    colours = paint(0, 2)
    if sample == "bar":
        draw_bar(canvas, x, y - 7, 20, 0.5)
        return
    fill = {"piece": colours.fill, "copy": canvas.hatch(colours.fill, colours.pale)}
    canvas.rect(x, y - 12, 20.0, 16.0, fill=fill.get(sample, BARE))
    if sample == "number":
        canvas.text(x + 10, y, "7", 12, text_anchor="middle", fill=INK)


def draw_arrow(canvas: Canvas, start: Point, end: Point) -> None:
    """A line with an open head."""
    canvas.line([start, end], stroke=FAINT, stroke_width=1.3)
    length = math.dist(start, end) or 1.0
    x, y = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    barbs = [(end[0] - 5 * x - s * 3.5 * y, end[1] - 5 * y + s * 3.5 * x) for s in (-1, 1)]
    canvas.line([barbs[0], end, barbs[1]], stroke=FAINT, stroke_width=1.3)


def draw_bar(canvas: Canvas, x: float, y: float, width: float, share: float) -> None:
    canvas.rect(x, y, width, 4.0, rx=2, fill=RULE)
    canvas.rect(x, y, max(share * width, 1.5), 4.0, rx=2, fill=SOFT)
