"""A tensor in the SVG: its pieces, and under them the devices that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...layouts.mesh import Mesh
from ...units import bytes_text
from .canvas import MONO, Canvas, clip_text, text_width, wrap_path, wrap_text
from .cells import Arrangement, arrange
from .painting import Look, draw_bar, paint_cells
from .palette import INK, SOFT, paint
from .tiling import Tiling, device_numbers, mesh_grid
from .words import (
    DOT,
    copies_text,
    dims_text,
    hidden_text,
    numbers_shorter,
    piece_text,
    size_text,
    specs_text,
)

COLUMN = 166.0  # width of a tensor with all its texts
LINE, SPEC_LINE = 18.0, 16.0
_EDGE = 18.0  # room left of a tensor and over it, for the sizes of its dims
_BOX = (140.0, 112.0)  # width and height of the box of a tensor
_MOST_TITLES = 64  # explanations that appear when pointing; more would bloat the file


class Frame(NamedTuple):
    """What the tensors of one row share, so that they stand level."""

    spec_lines: int
    hidden_lines: int
    box_height: float  # of each tensor
    arrangement: Arrangement  # of the mesh under each tensor
    name_lines: int = 1

    @classmethod
    def around(cls, mesh: Mesh, tilings: Sequence[Tiling]) -> Frame:
        """The frame into which all these fit."""
        return cls(
            max((len(_spec_lines(tiling)) for tiling in tilings), default=1),
            max((1 if hidden_text(tiling) else 0 for tiling in tilings), default=0),
            _BOX[1] if tilings else 0.0,
            arrange(mesh_grid(mesh), COLUMN - _EDGE, 128, widest=32, highest=24),
            max((len(_name_lines(tiling)) for tiling in tilings), default=1),
        )

    @property
    def glyph_top(self) -> float:
        """Where the box of the tensor begins, from the top of the row."""
        return (1 + self.name_lines) * LINE + self.spec_lines * SPEC_LINE + _EDGE + 8

    @property
    def mesh_top(self) -> float:
        """Where the mesh under the tensor begins."""
        return self.glyph_top + self.box_height + self.hidden_lines * SPEC_LINE + 16

    @property
    def mesh_bottom(self) -> float:
        """Where the mesh ends."""
        return self.mesh_top + self.arrangement.height

    @property
    def height(self) -> float:
        """Height of the whole row."""
        return self.mesh_bottom + (2 * LINE + 14 if self.box_height else 0)


def draw_tensor(canvas: Canvas, tiling: Tiling, frame: Frame, x: float, y: float) -> None:
    """One tensor: its texts, its pieces, and under them the devices that hold the pieces."""
    _tensor_heading(canvas, tiling, frame, x, y)
    _pieces(canvas, tiling, x + _EDGE, y + frame.glyph_top)
    if hidden_text(tiling):
        below = y + frame.glyph_top + _BOX[1] + SPEC_LINE
        text = clip_text(hidden_text(tiling), COLUMN - _EDGE, 12)
        canvas.text(x + _EDGE, below, text, 12, fill=SOFT)
    _holders(canvas, tiling, frame.arrangement, x + _EDGE, y + frame.mesh_top)
    _tensor_footing(canvas, tiling, x + _EDGE, y + frame.mesh_bottom)


def _tensor_heading(canvas: Canvas, tiling: Tiling, frame: Frame, x: float, y: float) -> None:
    tensor = tiling.drawn
    for number, line in enumerate(_name_lines(tiling)):
        canvas.text(x, y + 13 + number * LINE, line, 15, font_weight=700, fill=INK)
    y += (frame.name_lines - 1) * LINE
    size = f"{dims_text(tensor.dims)} {DOT} {bytes_text(tensor.nbytes)}"
    if text_width(size, 13) > COLUMN:
        size = clip_text(dims_text(tensor.dims), COLUMN, 13)
    canvas.text(x, y + 13 + LINE, size, 13, fill=SOFT)
    for number, line in enumerate(_spec_lines(tiling)):
        baseline = y + 13 + 2 * LINE + number * SPEC_LINE
        canvas.text(x, baseline, line, 12, font_family=MONO, fill=INK)


def _name_lines(tiling: Tiling) -> list[str]:
    """The name in one line or two, so that the layers of a stack differ."""
    return wrap_path(tiling.drawn.name, COLUMN, 15, bold=True)


def _spec_lines(tiling: Tiling) -> list[str]:
    """The layout in as many lines as it needs."""
    lines = wrap_text(specs_text(tiling.drawn.layout), COLUMN, 12, mono=True)
    return [clip_text(line, COLUMN, 12, mono=True) for line in lines]


def _pieces(canvas: Canvas, tiling: Tiling, x: float, y: float) -> None:
    width, height = _proportions(tiling)
    grid = tiling.grid
    # Floors leave room beside them for the size of the dim that runs along their leaning side.
    beside = text_width(_side_text(tiling), 12) if grid.planes > 1 else 0.0
    box = min(_BOX[0], COLUMN - _EDGE - beside)
    _, rows, columns = Arrangement(grid, 1, 1).drawn
    fitted = arrange(grid, box, _BOX[1], width / columns, height / rows, most_stacks=1)
    y += (_BOX[1] - fitted.height) / 2
    numbers = device_numbers(tiling.mesh)

    def look(piece: int) -> Look:
        holders = [numbers[position] for position in tiling.holders(piece)]
        colours = paint(piece, tiling.pieces)
        title = piece_text(tiling, piece, numbers) if tiling.pieces <= _MOST_TITLES else ""
        return Look(colours.fill, colours.ink, numbers_shorter(holders), title)

    paint_cells(canvas, fitted, x, y, look)
    _sizes(canvas, tiling, fitted, x, y)


def _proportions(tiling: Tiling) -> tuple[float, float]:
    """Width and height of a tensor in pixels: between its true proportions and a square."""
    along = tiling.directions
    if not along.columns:
        return 34.0, 34.0
    if not along.rows:
        return _BOX[0], 30.0
    rows, columns = (
        math.prod(max(tiling.drawn.dims[dim], 1) for dim in dims)
        for dims in (along.rows, along.columns)
    )
    ratio = (rows / columns) ** 0.35
    width, height = min(_BOX[0], _BOX[1] / ratio), min(_BOX[1], _BOX[0] * ratio)
    # Thin tensors are made as wide as the numbers in their pieces need.
    grid = tiling.grid
    wide, high = min(grid.columns * 24.0, _BOX[0]), min(grid.rows * 15.0, _BOX[1])
    return max(width, wide, 36.0), max(height, high, 30.0)


def _sizes(canvas: Canvas, tiling: Tiling, fitted: Arrangement, x: float, y: float) -> None:
    """The sizes of the drawn dims, along the edges where they run."""
    along = tiling.directions
    lean = fitted.drawn[1] * fitted.lean
    across = fitted.drawn[2] * fitted.cell_width
    if along.columns:
        text = _edge_text(tiling, along.columns, COLUMN - _EDGE)
        # A text that is wider than its tensor begins where the tensor begins.
        start = x + lean + max((across - text_width(text, 12)) / 2, 0 if not lean else -lean)
        canvas.text(start, y - 7, text, 12, fill=SOFT)
    down = along.planes if lean else along.rows
    if down:
        text = _edge_text(tiling, down, _BOX[1] + 12)
        middle = y + fitted.height / 2
        canvas.text(x - 7, middle, text, 12, turned=True, text_anchor="middle", fill=SOFT)
    if lean:
        beside = x + across + 8
        canvas.text(beside, y + fitted.floor_height, _side_text(tiling), 12, fill=SOFT)


def _edge_text(tiling: Tiling, dims: Sequence[int], room: float) -> str:
    """The size of dims along an edge, as much of it as there is room for."""
    text = size_text(tiling, dims)
    if text_width(text, 12) > room:
        text = text.partition(" =")[0]
    return clip_text(text, room, 12)


def _side_text(tiling: Tiling) -> str:
    """The size of the dim along the leaning side of floors; there is little room."""
    return clip_text(size_text(tiling, tiling.directions.rows).partition(" =")[0], 60, 12)


def _holders(canvas: Canvas, tiling: Tiling, fitted: Arrangement, x: float, y: float) -> None:
    numbers = device_numbers(tiling.mesh)
    titles = tiling.mesh.size <= _MOST_TITLES
    striped = min(fitted.cell_width, fitted.cell_height) > 9

    def look(position: int) -> Look:
        piece = tiling.piece_of[position]
        colours = paint(piece, tiling.pieces)
        title = (
            f"device {numbers[position]}: {piece_text(tiling, piece, numbers)}" if titles else ""
        )
        label = [str(numbers[position])]
        if tiling.is_first_copy(position):
            return Look(colours.fill, colours.ink, label, title)
        fill = canvas.hatch(colours.fill, colours.pale) if striped else colours.pale
        return Look(fill, INK, label, title, halo=colours.pale)

    paint_cells(canvas, fitted, x, y, look)


def _tensor_footing(canvas: Canvas, tiling: Tiling, x: float, y: float) -> None:
    tensor = tiling.drawn
    width = COLUMN - _EDGE
    share = tensor.bytes_per_device / tensor.nbytes if tensor.nbytes else 0.0
    canvas.text(x, y + 20, copies_text(tiling), 13, fill=INK)
    canvas.text(x, y + 38, f"{bytes_text(tensor.bytes_per_device)} per device", 13, fill=SOFT)
    draw_bar(canvas, x, y + 46, width, share)
