"""The mesh in the SVG, with its axes, before the tensors that lie on it."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...layouts.mesh import Mesh
from ...units import bytes_text
from .canvas import Canvas, clip_text, text_width
from .cells import Arrangement, arrange
from .painting import BARE, LABELLED, Look, draw_arrow, draw_bar, paint_cells
from .palette import INK, SOFT
from .sheet import Section
from .tensor import LINE, Frame
from .tiling import Grid, device_numbers, mesh_grid
from .words import devices_text, numbers_text

KEY = 200.0  # width of the mesh with all its texts
_EDGE = 30.0  # room left of the mesh for the name of an axis


def draw_key(canvas: Canvas, section: Section, frame: Frame, x: float, y: float) -> None:
    """The mesh of a section with its axes, and what all the tensors take on each device."""
    mesh = section.mesh
    grid = mesh_grid(mesh)
    solid = grid.planes > 1
    height = frame.mesh_bottom - frame.glyph_top - 10
    fitted = arrange(grid, KEY - _EDGE - (56 if solid else 8), height, 46, 36, most_stacks=1)
    numbers = device_numbers(mesh)
    longest = text_width(str(max(numbers)), 12) + 4
    labelled = fitted.cell_height >= LABELLED and fitted.cell_width >= longest
    _key_heading(canvas, mesh, fitted, labelled, x, y)
    x, top = x + _EDGE, y + frame.mesh_bottom - (height + fitted.height) / 2

    def look(position: int) -> Look:
        return Look(BARE, INK, [str(numbers[position])] if labelled else [], "")

    paint_cells(canvas, fitted, x, top, look, finest=1.6)
    draw_axes(canvas, mesh, fitted, x, top, room=KEY - _EDGE)
    _key_footing(canvas, section, x, y + frame.mesh_bottom)


def _key_heading(
    canvas: Canvas, mesh: Mesh, fitted: Arrangement, labelled: bool, x: float, y: float
) -> None:
    name = clip_text(mesh.name or "mesh", KEY, 15, bold=True)
    canvas.text(x, y + 13, name, 15, font_weight=700, fill=INK)
    lines = [devices_text(mesh)] if labelled else [devices_text(mesh), _order(mesh, fitted)]
    for number, line in enumerate(lines):
        canvas.text(x, y + 13 + (1 + number) * LINE, clip_text(line, KEY, 13), 13, fill=SOFT)


def _order(mesh: Mesh, fitted: Arrangement) -> str:
    """Which devices the cells are, where there is no room for numbers in them."""
    together = math.prod(fitted.steps)
    way = "row by row" if len(mesh.axes) < 3 else "plane by plane"
    order = f"{together} in a cell" if together > 1 else way
    return f"{numbers_text(device_numbers(mesh))}, {order}"


class AxisTexts(NamedTuple):
    """The axes of a mesh in words, by where they run in its picture; some may be empty."""

    down: str
    aside: str  # along the leaning side of floors
    across: str

    @classmethod
    def of(cls, mesh: Mesh, grid: Grid) -> AxisTexts:
        texts = [f"{axis} = {size}" for axis, size in mesh.axes]
        if len(texts) == 1:
            wrapped = f", in rows of {grid.columns}" if grid.rows > 1 else ""
            return cls("", "", f"{texts[0]}{wrapped}")
        if len(texts) == 2:
            return cls(texts[0], "", texts[1])
        return cls(", ".join(texts[:-2]), *texts[-2:])


def draw_axes(
    canvas: Canvas,
    mesh: Mesh,
    fitted: Arrangement,
    x: float,
    y: float,
    room: float = math.inf,
    gap: float = 9.0,
) -> None:
    """The axes of a mesh whose cells begin here: along the columns, down the rows or from floor to
    floor ``gap`` pixels left of them, and along the leaning side of floors.

    ``room`` is what there is right of ``x``; longer texts are cut.
    """
    down, aside, across = AxisTexts.of(mesh, fitted.grid)
    lean = fitted.drawn[1] * fitted.lean
    begin = x + lean
    draw_arrow(canvas, (begin, y - 9), (begin + fitted.drawn[2] * fitted.cell_width, y - 9))
    canvas.text(begin, y - 17, clip_text(across, room - lean, 13), 13, fill=INK)
    if down:
        draw_arrow(canvas, (x - gap, y), (x - gap, y + fitted.height))
        _turned(canvas, x - gap - 8, y, fitted.height, down)
    if aside:
        side = x + fitted.width - lean + 9  # right of the lower right corner of the first floor
        draw_arrow(canvas, (side + lean, y), (side, y + fitted.floor_height))
        beside = side + lean / 2 + 8
        text = clip_text(aside, room - (beside - x), 13)
        canvas.text(beside, y + fitted.floor_height / 2 + 9, text, 13, fill=INK)


def _turned(canvas: Canvas, x: float, y: float, height: float, text: str) -> None:
    """A text that reads upwards beside something; one that is longer begins at its foot."""
    if text_width(text, 13) <= height:
        canvas.text(x, y + height / 2, text, 13, turned=True, text_anchor="middle", fill=INK)
    else:
        text = clip_text(text, max(height, 120), 13)
        canvas.text(x, y + height, text, 13, turned=True, fill=INK)


def _key_footing(canvas: Canvas, section: Section, x: float, y: float) -> None:
    if not section.tensors:
        return
    share = section.bytes_per_device / section.nbytes if section.nbytes else 0.0
    width = KEY - _EDGE - 8
    canvas.text(x, y + 20, f"{bytes_text(section.nbytes)} together", 13, fill=INK)
    canvas.text(x, y + 38, f"{bytes_text(section.bytes_per_device)} per device", 13, fill=SOFT)
    draw_bar(canvas, x, y + 46, width, share)
