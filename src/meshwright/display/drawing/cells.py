"""Where the cells of a grid stand in a picture: flat, or as planes stacked like floors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .canvas import Point
from .tiling import Grid

MOST_CELLS = 64  # per direction; more are drawn as one cell for several
MOST_PLANES = 16
_FLOOR_GAP = 10.0  # between planes; less where there are many
_LEAN = 0.55  # how far, in heights of a cell, one row of a floor stands left of the row behind it


class Cell(NamedTuple):
    """One cell: its number in the grid, its corners, and its middle."""

    number: int
    corners: tuple[Point, ...]
    middle: Point


@dataclass(frozen=True)
class Arrangement:
    """A grid that has been given sizes; ``cell_width`` and ``cell_height`` are in pixels."""

    grid: Grid
    cell_width: float
    cell_height: float
    stacks: int = 1  # planes side by side
    gap: float = _FLOOR_GAP

    @property
    def steps(self) -> tuple[int, int, int]:
        """How many planes, rows and columns of the grid one drawn cell stands for."""
        return (
            -(-self.grid.planes // MOST_PLANES),
            -(-self.grid.rows // MOST_CELLS),
            -(-self.grid.columns // MOST_CELLS),
        )

    @property
    def drawn(self) -> tuple[int, int, int]:
        """How many planes, rows and columns are drawn."""
        sizes = self.grid[:3]
        planes, rows, columns = (-(-n // step) for n, step in zip(sizes, self.steps, strict=True))
        return planes, rows, columns

    @property
    def stories(self) -> int:
        """How many planes stand over each other."""
        return -(-self.drawn[0] // self.stacks)

    @property
    def lean(self) -> float:
        """How far each row is shifted against the next; none in a flat picture."""
        return _LEAN * self.cell_height if self.grid.planes > 1 else 0.0

    @property
    def floor_width(self) -> float:
        """Width of one plane."""
        return self.drawn[2] * self.cell_width + self.drawn[1] * self.lean

    @property
    def floor_height(self) -> float:
        """Height of one plane."""
        return self.drawn[1] * self.cell_height

    @property
    def width(self) -> float:
        """Width of the whole."""
        return self.stacks * (self.floor_width + _FLOOR_GAP) - _FLOOR_GAP

    @property
    def height(self) -> float:
        """Height of the whole."""
        return self.stories * (self.floor_height + self.gap) - self.gap

    def floor_corner(self, plane: int) -> Point:
        """Top left corner of the box of one drawn plane; planes follow each other downwards."""
        stack, story = divmod(plane, self.stories)
        return stack * (self.floor_width + _FLOOR_GAP), story * (self.floor_height + self.gap)

    def cells(self) -> Iterator[Cell]:
        """All drawn cells, in the grid's order; the whole begins at (0, 0)."""
        planes, rows, columns = self.drawn
        plane_step, row_step, column_step = self.steps
        for plane in range(planes):
            for row in range(rows):
                for column in range(columns):
                    flat_row = plane * plane_step * self.grid.rows + row * row_step
                    number = flat_row * self.grid.columns + column * column_step
                    if number < self.grid.filled:
                        yield self._cell(number, plane, row, column)

    def _cell(self, number: int, plane: int, row: int, column: int) -> Cell:
        x, y = self.floor_corner(plane)
        rows = self.drawn[1]

        def corner(row: int, column: int) -> Point:
            shift = (rows - row) * self.lean
            return x + shift + column * self.cell_width, y + row * self.cell_height

        corners = (
            corner(row, column),
            corner(row, column + 1),
            corner(row + 1, column + 1),
            corner(row + 1, column),
        )
        middle = (
            sum(px for px, _ in corners) / 4,
            sum(py for _, py in corners) / 4,
        )
        return Cell(number, corners, middle)


def arrange(
    grid: Grid,
    width: float,
    height: float,
    widest: float,
    highest: float,
    most_stacks: int = MOST_PLANES,
) -> Arrangement:
    """The arrangement with the largest cells that fits a box; cells are never larger than asked.

    >>> fitted = arrange(Grid.full(1, 4, 2), width=160, height=100, widest=40.0, highest=28.0)
    >>> fitted.cell_width, fitted.cell_height, fitted.width, fitted.height
    (40.0, 25.0, 80.0, 100.0)
    """
    planes = Arrangement(grid, 1, 1).drawn[0]
    tries = [
        _fit(grid, stacks, width, height, widest, highest)
        for stacks in range(1, min(planes, most_stacks) + 1)
    ]

    def worth(tried: Arrangement) -> float:
        even = 1.0 if planes % tried.stacks == 0 else 0.7
        return even * min(tried.cell_width, 1.6 * tried.cell_height)

    return max(tries, key=worth)


def _fit(
    grid: Grid, stacks: int, width: float, height: float, widest: float, highest: float
) -> Arrangement:
    unit = Arrangement(grid, 1.0, 1.0, stacks)
    planes, rows, columns = unit.drawn
    stories = -(-planes // stacks)
    floor_width = (width - (stacks - 1) * _FLOOR_GAP) / stacks
    gap = min(_FLOOR_GAP, 0.3 * height / stories)
    floor_height = (height - (stories - 1) * gap) / stories
    cell_height = min(floor_height / rows, highest)
    lean = _LEAN * cell_height if grid.planes > 1 else 0.0
    # A floor that leans too far for its width is made flatter rather than narrower than half.
    if rows * lean > floor_width / 2:
        cell_height *= floor_width / 2 / (rows * lean)
        lean = _LEAN * cell_height
    cell_width = min((floor_width - rows * lean) / columns, widest)
    return Arrangement(grid, cell_width, cell_height, stacks, gap)
