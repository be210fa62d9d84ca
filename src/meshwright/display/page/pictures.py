"""Pictures of a page: how a tensor is cut over a mesh, and the mesh with its axes.

Their colours are those of paper. The page's style sheet knows them and turns them for dark rooms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from markupsafe import Markup

from ...layouts.mesh import Mesh
from ..drawing import Drawn
from ..drawing.canvas import Canvas, clip_text, text_width
from ..drawing.cells import Arrangement, arrange
from ..drawing.painting import LABELLED, Look, draw_arrow, paint_cells
from ..drawing.palette import INK, SOFT, paint
from ..drawing.tensor import COLUMN, Frame, draw_tensor
from ..drawing.tiling import Tiling, mesh_grid
from ..drawing.words import copies_text, devices_text, directions_text, numbers_text, specs_text

_ROOM = 14.0  # around the picture of a tensor
_WIDTH, _HEIGHT = 250.0, 320.0  # of the devices at most
_TOP = 34.0  # room for the name of the last axis


def tiling_picture(name: str, drawn: Drawn) -> Markup:
    """A tensor cut into its pieces, and under it the devices that hold them.

    ``name`` is one for the picture that no other of the page has.
    """
    tiling = Tiling.of(drawn)
    frame = Frame.around(tiling.mesh, [tiling])
    canvas = Canvas(name)
    draw_tensor(canvas, tiling, frame, _ROOM, _ROOM)
    text = f"{specs_text(drawn.layout)}: {copies_text(tiling)}"
    return _finish(canvas, COLUMN + 2 * _ROOM, frame.height + 2 * _ROOM, drawn.name, text)


def _finish(canvas: Canvas, width: float, height: float, title: str, text: str) -> Markup:
    """The picture, without a paper of its own."""
    return Markup(canvas.finish(width, height, title, text, "none", "none"))


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


def mesh_picture(mesh: Mesh) -> Markup:
    """The devices of a mesh as cells, with its axes and the devices' numbers."""
    fitted = arrange(mesh_grid(mesh), _WIDTH, _HEIGHT, 46, 34, most_stacks=1)
    widest = text_width(str(mesh.size), 12) + 4
    labelled = fitted.cell_height >= LABELLED and fitted.cell_width >= widest
    frame = _Frame(mesh, fitted, labelled)
    colours = paint(0, 1)

    def look(position: int) -> Look:
        return Look(colours.fill, colours.ink, [str(position)] if labelled else [], "")

    canvas = Canvas("mesh")
    paint_cells(canvas, fitted, frame.left, _TOP, look, finest=1.6)
    _across(canvas, frame)
    if len(mesh.axes) > 1:
        _down(canvas, frame)
    if not labelled:
        _ranges(canvas, frame)
    text = f"{devices_text(mesh)}: {directions_text(mesh)}"
    return _finish(canvas, frame.width, _TOP + fitted.height + 14, "The mesh", text)


def _across(canvas: Canvas, frame: _Frame) -> None:
    """The last axis, along the columns."""
    begin = frame.left + frame.lean
    end = begin + frame.fitted.drawn[2] * frame.fitted.cell_width
    draw_arrow(canvas, (begin, _TOP - 9), (end, _TOP - 9))
    canvas.text(begin, _TOP - 17, frame.across, 13, fill=INK)


def _down(canvas: Canvas, frame: _Frame) -> None:
    """The other axes: down the rows, or down the floors and along their leaning side."""
    fitted = frame.fitted
    outer = frame.mesh.axes[: -2 if frame.beside else -1]
    text = ", ".join(f"{axis} = {size}" for axis, size in outer)
    text = clip_text(text, max(fitted.height, 120.0), 13)
    draw_arrow(canvas, (28, _TOP), (28, _TOP + fitted.height))
    middle = _TOP + fitted.height / 2
    canvas.text(20, middle, text, 13, turned=True, text_anchor="middle", fill=INK)
    if frame.beside:
        right, foot = frame.left + fitted.width + 9, _TOP + fitted.floor_height
        draw_arrow(canvas, (right, _TOP), (right - frame.lean, foot))
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
        text = numbers_text(range(number * each, last + 1))
        y = _TOP + number * step + high / 2 + 4
        canvas.text(frame.left - 8, y, text, 11, text_anchor="end", fill=SOFT)
