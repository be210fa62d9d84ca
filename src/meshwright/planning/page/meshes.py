"""The mesh of a report: its devices along its axes, floors over each other for a third one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ...drawing.canvas import Canvas, Point, clip_text, text_width
from ...drawing.cells import Arrangement, arrange
from ...drawing.painting import LABELLED, Look, paint_cells
from ...drawing.palette import FAINT, INK, SOFT, paint
from ...drawing.tiling import mesh_grid
from ...drawing.words import axes_text, devices_text, numbers_text
from ...hlo.links import links_of
from ...layouts.mesh import Mesh
from .grid import Cell, Column, grid
from .markup import Html, section, tag
from .pictures import Picture

if TYPE_CHECKING:
    from ..report import DryRun

_WIDTH, _HEIGHT = 250.0, 320.0  # of the devices at most
_TOP = 34.0  # room for the name of the last axis


def mesh_section(run: DryRun) -> Html:
    """The section on the mesh."""
    mesh = Mesh(dict(run.axes))
    links = () if run.hardware is None else links_of(run.target, run.hardware, run.axes)
    lies = {each.axis: str(each).partition(" lies on ")[2] for each in links if each.size > 1}
    columns = (Column("axis"), Column("devices", "num"), Column("is taken to lie on"))
    rows = [(axis, Cell(str(size), size), lies.get(axis, "-")) for axis, size in run.axes]
    table = grid("axes-table", f"The axes of its {mesh.size:,} devices", columns, rows, None)
    figure = tag("figure", mesh_picture(mesh))
    return section("mesh", "The mesh", tag("div", figure, table, class_="beside"))


class _Frame(NamedTuple):
    """A mesh whose cells have been given sizes; it stands ``left`` pixels from the edge."""

    mesh: Mesh
    fitted: Arrangement
    labelled: bool  # each cell bears its number

    @property
    def left(self) -> float:
        ranges = 0.0 if self.labelled else text_width(str(self.mesh.size), 11) * 2 + 12
        return (38.0 if len(self.mesh.axes) > 1 else 4.0) + ranges

    @property
    def lean(self) -> float:
        """How far the front of a floor stands left of its back."""
        return self.fitted.drawn[1] * self.fitted.lean

    @property
    def across(self) -> str:
        """The last axis in words."""
        axis, size = self.mesh.axes[-1]
        wrapped = len(self.mesh.axes) == 1 and self.fitted.grid.rows > 1
        return f"{axis} = {size}" + f", in rows of {self.fitted.grid.columns}" * wrapped

    @property
    def beside(self) -> str:
        """The axis that runs along the leaning side of floors, in words."""
        return "" if len(self.mesh.axes) < 3 else "{} = {}".format(*self.mesh.axes[-2])

    @property
    def width(self) -> float:
        """Of the whole picture, its texts included."""
        right = 22 + text_width(self.beside, 13) if self.beside else 10
        least = self.lean + text_width(self.across, 13) + 10
        return self.left + max(self.fitted.width + right, least)


def mesh_picture(mesh: Mesh) -> Html:
    """The devices of a mesh as cells, with its axes and the devices' numbers."""
    fitted = arrange(mesh_grid(mesh), _WIDTH, _HEIGHT, 46, 34, most_stacks=1)
    widest = text_width(str(mesh.size), 12) + 4
    labelled = fitted.cell_height >= LABELLED and fitted.cell_width >= widest
    frame = _Frame(mesh, fitted, labelled)
    colours = paint(0, 1)

    def look(position: int) -> Look:
        return Look(colours.fill, colours.ink, [str(position)] if labelled else [], "")

    canvas = Picture("mesh")
    paint_cells(canvas, fitted, frame.left, _TOP, look, finest=1.6)
    _across(canvas, frame)
    if len(mesh.axes) > 1:
        _down(canvas, frame)
    if not labelled:
        _ranges(canvas, frame)
    told = f"{devices_text(mesh)}: {axes_text(mesh)}"
    return canvas.done(frame.width, _TOP + fitted.height + 14, "The mesh", told)


def _across(canvas: Canvas, frame: _Frame) -> None:
    """The last axis, along the columns."""
    begin = frame.left + frame.lean
    end = begin + frame.fitted.drawn[2] * frame.fitted.cell_width
    _arrow(canvas, (begin, _TOP - 9), (end, _TOP - 9))
    canvas.text(begin, _TOP - 17, frame.across, 13, fill=INK)


def _down(canvas: Canvas, frame: _Frame) -> None:
    """The other axes: down the rows, or down the floors and along their leaning side."""
    fitted = frame.fitted
    outer = frame.mesh.axes[: -2 if frame.beside else -1]
    told = ", ".join(f"{axis} = {size}" for axis, size in outer)
    told = clip_text(told, max(fitted.height, 120.0), 13)
    _arrow(canvas, (28, _TOP), (28, _TOP + fitted.height))
    middle = _TOP + fitted.height / 2
    canvas.text(20, middle, told, 13, turned=True, text_anchor="middle", fill=INK)
    if frame.beside:
        right, foot = frame.left + fitted.width + 9, _TOP + fitted.floor_height
        _arrow(canvas, (right, _TOP), (right - frame.lean, foot))
        beside = right - frame.lean / 2 + 10
        canvas.text(beside, (_TOP + foot) / 2 + 5, frame.beside, 13, fill=INK)


def _ranges(canvas: Canvas, frame: _Frame) -> None:
    """The numbers of the devices of each floor, or of each row, where cells bear none."""
    fitted, size = frame.fitted, frame.mesh.size
    planes, rows, _ = fitted.drawn
    count = planes if planes > 1 else rows
    step = fitted.floor_height + fitted.gap if planes > 1 else fitted.cell_height
    high = fitted.floor_height if planes > 1 else fitted.cell_height
    each = math.prod(fitted.grid[:3]) // (fitted.grid.planes if planes > 1 else fitted.grid.rows)
    each *= fitted.steps[0] if planes > 1 else fitted.steps[1]
    every = max(1, math.ceil(15 / step))  # so that no two texts touch
    for number in range(0, count, every):
        last = min(size, (number + 1) * each) - 1
        told = numbers_text(range(number * each, last + 1))
        y = _TOP + number * step + high / 2 + 4
        canvas.text(frame.left - 8, y, told, 11, text_anchor="end", fill=SOFT)


def _arrow(canvas: Canvas, start: Point, end: Point) -> None:
    canvas.line([start, end], stroke=FAINT, stroke_width=1.3)
    length = math.dist(start, end) or 1.0
    x, y = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    barbs = [(end[0] - 6 * x - s * 3.5 * y, end[1] - 6 * y + s * 3.5 * x) for s in (-1, 1)]
    canvas.polygons([[barbs[0], end, barbs[1]]], fill=FAINT)
