"""Pictures of a page: how a tensor is cut over a mesh, and the mesh with its axes.

Their colours are those of paper. The page's style sheet knows them and turns them for dark rooms.
"""

from __future__ import annotations

import math

from markupsafe import Markup

from ...layouts.mesh import Mesh
from ..drawing import Drawn
from ..drawing.canvas import Canvas, text_width
from ..drawing.cells import Arrangement, arrange
from ..drawing.key import AxisTexts, draw_axes
from ..drawing.painting import LABELLED, Look, paint_cells
from ..drawing.palette import SOFT, paint
from ..drawing.tensor import COLUMN, Frame, draw_tensor
from ..drawing.tiling import Tiling, mesh_grid
from ..drawing.words import copies_text, devices_text, directions_text, numbers_text, specs_text

_ROOM = 14.0  # around the picture of a tensor
_WIDTH, _HEIGHT = 250.0, 320.0  # of the devices at most
_TOP = 34.0  # room for the name of the last axis


def tiling_picture(name: str, tensor: Drawn) -> Markup:
    """A tensor cut into its pieces, and under it the devices that hold them.

    ``name`` is one for the picture that no other of the page has.
    """
    tiling = Tiling.of(tensor)
    frame = Frame.around(tiling.mesh, [tiling])
    canvas = Canvas(name)
    draw_tensor(canvas, tiling, frame, _ROOM, _ROOM)
    text = f"{specs_text(tensor.layout)}: {copies_text(tiling)}"
    return _finish(canvas, COLUMN + 2 * _ROOM, frame.height + 2 * _ROOM, tensor.name, text)


def _finish(canvas: Canvas, width: float, height: float, title: str, text: str) -> Markup:
    """The picture, without a paper of its own."""
    return Markup(canvas.finish(width, height, title, text, "none", "none"))


def mesh_picture(mesh: Mesh) -> Markup:
    """The devices of a mesh as cells, with its axes and the devices' numbers."""
    fitted = arrange(mesh_grid(mesh), _WIDTH, _HEIGHT, 46, 34, most_stacks=1)
    widest = text_width(str(mesh.size), 12) + 4
    labelled = fitted.cell_height >= LABELLED and fitted.cell_width >= widest
    ranges = 0.0 if labelled else text_width(str(mesh.size), 11) * 2 + 12
    left = (38.0 if len(mesh.axes) > 1 else 4.0) + ranges
    colours = paint(0, 1)

    def look(position: int) -> Look:
        return Look(colours.fill, colours.ink, [str(position)] if labelled else [], "")

    canvas = Canvas("mesh")
    paint_cells(canvas, fitted, left, _TOP, look, finest=1.6)
    draw_axes(canvas, mesh, fitted, left, _TOP, gap=10 + ranges)
    if not labelled:
        _ranges(canvas, mesh, fitted, left)
    texts = AxisTexts.of(mesh, fitted.grid)
    right = fitted.width + (22 + text_width(texts.aside, 13) if texts.aside else 10)
    above = fitted.drawn[1] * fitted.lean + text_width(texts.across, 13) + 10
    text = f"{devices_text(mesh)}: {directions_text(mesh)}"
    width, height = left + max(right, above), _TOP + fitted.height + 14
    return _finish(canvas, width, height, "The mesh", text)


def _ranges(canvas: Canvas, mesh: Mesh, fitted: Arrangement, left: float) -> None:
    """The numbers of the devices of each floor, or of each row, where cells bear none."""
    planes, rows, _ = fitted.drawn
    count = planes if planes > 1 else rows
    step = fitted.floor_height + fitted.gap if planes > 1 else fitted.cell_height
    high = fitted.floor_height if planes > 1 else fitted.cell_height
    area = math.prod(fitted.grid[:3]) // (fitted.grid.planes if planes > 1 else fitted.grid.rows)
    area *= fitted.steps[0] if planes > 1 else fitted.steps[1]
    every = max(1, math.ceil(15 / step))  # so that no two texts touch
    for number in range(0, count, every):
        last = min(mesh.size, (number + 1) * area) - 1
        text = numbers_text(range(number * area, last + 1))
        y = _TOP + number * step + high / 2 + 4
        canvas.text(left - 8, y, text, 11, text_anchor="end", fill=SOFT)
