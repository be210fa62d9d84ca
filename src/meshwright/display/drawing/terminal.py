"""A sheet in the terminal, and ``show``, which prints what is given to it.

Pieces are named A, B, C, ...: devices with the same letter hold copies of the same piece, so that
the picture says everything where there is no colour, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...errors import LayoutError
from ...layouts.layout import Layout
from ...layouts.mesh import Mesh
from ...units import bytes_text
from .palette import Paint, paint
from .sheet import Drawn, Items, Section, Sheet, as_sheet
from .tiling import Grid, Tiling, device_numbers, mesh_grid
from .words import (
    DOT,
    copies_text,
    devices_text,
    dims_text,
    direction_texts,
    directions_text,
    letters,
    numbers_shorter,
    plain,
    specs_text,
)

_MOST_CELLS = 64  # a grid with more is shown in part
_MOST = {"planes": 4, "rows": 8, "columns": 8}
_MOST_IN_PART = {"planes": 3, "rows": 5, "columns": 8}
_INDENT = 2


def draw_text(items: Items, title: str = "") -> RenderableType:
    """The same picture as :func:`draw_svg` for Rich to print; it keeps to the width that is there.

    Raises :class:`LayoutError` for a layout that is unbound or does not fit.

    >>> bias = Drawn("bias", (128,), Layout(["model"], Mesh({"batch": 2, "model": 2})))
    >>> Console(width=60, color_system=None).print(draw_text(bias))
    mesh  batch=2 down, model=2 across · 4 devices
    ...
    """
    return _TextSheet(as_sheet(items, title))


def show(what: Any, dims: Sequence[int] | None = None, *, name: str = "") -> None:
    """Print how a tensor lies on its mesh: a layout with dims, or anything that has a sharding.

    ``what`` is a bound :class:`Layout`, a :class:`Mesh`, a JAX array, a Keras variable, or what
    :func:`draw_text` takes. ``name`` is its title. ``dims`` belong to a layout; without them only
    its pieces are shown. Raises :class:`LayoutError` for what has no layout, or does not fit it.

    >>> show(Layout(["model"], Mesh({"model": 2})), dims=[6])
    mesh  model=2 across · 2 devices
    ...
    """
    sized = not isinstance(what, Layout) or dims is not None
    Console().print(_TextSheet(as_sheet(_as_items(what, dims, name)), sized))


def _as_items(what: Any, dims: Sequence[int] | None, name: str) -> Items:
    if isinstance(what, Layout):
        counts = [what.num_shards(dim) for dim in range(what.rank)]
        return Drawn(name or "layout", tuple(counts if dims is None else dims), what, itemsize=0)
    if dims is not None:
        raise LayoutError(
            f"dims={tuple(dims)} belong to a Layout; received a {type(what).__name__}, which "
            "has dims of its own or none; leave dims out."
        )
    if isinstance(what, Mesh):
        return Section("", what)
    if isinstance(what, Sheet | Section | Drawn | list | tuple):
        return what
    return _drawn_array(what, name)


def _drawn_array(what: Any, name: str) -> Drawn:
    array: Any = what if hasattr(what, "sharding") else getattr(what, "value", None)
    if getattr(array, "sharding", None) is None:
        raise LayoutError(
            f"{type(what).__name__} has no layout to show. Pass a Layout with dims, a Mesh, a JAX "
            "array, or a Keras variable that has been built."
        )
    dims = tuple(array.shape)
    layout = Layout.from_sharding(array.sharding, len(dims))
    return Drawn(name or getattr(what, "path", "array"), dims, layout, array.dtype.itemsize)


@dataclass(frozen=True)
class _TextSheet:
    """A sheet that Rich can print."""

    sheet: Sheet
    sized: bool = True  # whether the dims are the user's, or only as many as there are pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = _Page(console, options, self.sized)
        if self.sheet.title:
            yield page.text(self.sheet.title, "bold")
        if self.sheet.note:
            yield page.text(self.sheet.note)
        for number, section in enumerate(self.sheet.sections):
            if number or self.sheet.title or self.sheet.note:
                yield Text("")
            yield from page.section(section)


@dataclass(frozen=True)
class _Page:
    """What the terminal offers, and the parts that are drawn on it."""

    console: Console
    options: ConsoleOptions
    sized: bool

    def text(self, words: str, style: str = "") -> Text:
        """One text in the signs that the terminal has."""
        return Text(plain(words) if self.options.ascii_only else words, style=style)

    def indented(self, part: RenderableType) -> RenderableType:
        """Something under its heading."""
        return Padding(part, (0, 0, 0, _INDENT), expand=False)

    def section(self, section: Section) -> Iterator[RenderableType]:
        """A mesh, then its tensors."""
        mesh = section.mesh
        if section.title:
            yield self.text(section.title, "bold")
        if section.note:
            yield self.text(section.note, "italic")
        kind = self.text(f"  {directions_text(mesh)} {DOT} {devices_text(mesh)}")
        yield Text.assemble(self.text(mesh.name or "mesh", "bold"), kind)
        yield self.beside(self.grids(mesh_grid(mesh), self._bare_cell(mesh)))
        for tensor in section.tensors:
            yield Text("")
            yield from self.tensor(Tiling.of(tensor))
        if len(section.tensors) > 1 and section.bytes_per_device:
            yield Text("")
            yield self.text(
                f"together: {bytes_text(section.nbytes)} {DOT} "
                f"{bytes_text(section.bytes_per_device)} per device"
            )

    def tensor(self, tiling: Tiling) -> Iterator[RenderableType]:
        """A tensor: its name, its pieces beside the devices that hold them, and its bytes."""
        tensor = tiling.drawn
        size = [dims_text(tensor.dims)] if self.sized else []
        whole = [bytes_text(tensor.nbytes)] if tensor.itemsize else []
        heading = f" {DOT} ".join([*size, *whole, specs_text(tensor.layout)])
        yield Text.assemble(self.text(tensor.name, "bold"), self.text(f"  {heading}"))
        if len(tensor.dims) > 2 and self.sized:
            yield self.indented(self.text(f" {DOT} ".join(direction_texts(tiling))))
        pieces = self.grids(tiling.grid, self._piece_cell(tiling))
        devices = self.grids(mesh_grid(tiling.mesh), self._device_cell(tiling))
        yield self.beside(pieces, devices)
        size_text = (
            f"each {dims_text(tiling.local_dims)}" if self.sized and tiling.pieces > 1 else ""
        )
        share = f"{bytes_text(tensor.bytes_per_device)} per device" if tensor.itemsize else ""
        facts = [fact for fact in (copies_text(tiling), size_text, share) if fact]
        yield self.indented(self.text(f" {DOT} ".join(facts)))

    def beside(self, *groups: list[RenderableType]) -> RenderableType:
        """Groups of tables on one line, parted by ``on``; under each other where it is narrow."""
        line = Table.grid(padding=(0, 1))
        line.add_row(*_joined(groups, self.text("\non", "dim")))
        if self._width_of(line) + _INDENT <= self.options.max_width:
            return self.indented(line)
        return self.indented(Group(*(Columns(group) for group in groups)))

    def _width_of(self, part: RenderableType) -> int:
        wide = self.options.update_width(10_000)
        return Measurement.get(self.console, wide, part).maximum

    def grids(self, grid: Grid, cell: Callable[[int, int], Text]) -> list[RenderableType]:
        """A grid as tables, one per plane; what does not fit is left out and marked so."""
        planes = _first_and_last(grid.planes, _most(grid, "planes"))
        mark = self.text("…", "dim")
        return [mark if plane is None else self._table(grid, plane, cell) for plane in planes]

    def _table(self, grid: Grid, plane: int, cell: Callable[[int, int], Text]) -> Table:
        rows = self._rows(grid, plane, cell)
        table = Table(box=box.SQUARE, show_header=False, padding=(0, 0), border_style="dim")
        for column in zip(*rows, strict=True):
            width = max(text.cell_len for text in column)
            table.add_column(no_wrap=True)
            for text in column:
                text.align("center", width)  # in the text, so that its colour fills the cell
        for row in rows:
            table.add_row(*row)
        return table

    def _rows(self, grid: Grid, plane: int, cell: Callable[[int, int], Text]) -> list[list[Text]]:
        """The cells of one plane, in as many columns as there is room for."""
        room = self.options.max_width - _INDENT - 1
        rows: list[list[Text]] = []
        for most in range(_most(grid, "columns"), 3, -1):
            columns = _first_and_last(grid.columns, most)
            width = max(room // len(columns) - 1, 5)
            rows = [
                [self._cell(grid, (plane, row, column), cell, width) for column in columns]
                for row in _first_and_last(grid.rows, _most(grid, "rows"))
            ]
            widths = [max(text.cell_len for text in column) for column in zip(*rows, strict=True)]
            if sum(widths) + len(widths) <= room:
                break
        return rows

    def _cell(
        self,
        grid: Grid,
        place: tuple[int, int | None, int | None],
        cell: Callable[[int, int], Text],
        room: int,
    ) -> Text:
        plane, row, column = place
        if row is None or column is None:
            return self.text("…", "dim")
        number = (plane * grid.rows + row) * grid.columns + column
        return cell(number, room) if number < grid.filled else Text("")

    # What stands in a cell

    def _bare_cell(self, mesh: Mesh) -> Callable[[int, int], Text]:
        numbers = device_numbers(mesh)
        return lambda position, room: self.text(f" {numbers[position]} ")

    def _piece_cell(self, tiling: Tiling) -> Callable[[int, int], Text]:
        numbers = device_numbers(tiling.mesh)

        def cell(piece: int, room: int) -> Text:
            holders = [numbers[position] for position in tiling.holders(piece)]
            ways = [_named(tiling, piece, way) for way in numbers_shorter(holders)]
            fitting = [way for way in ways if len(way) + 2 <= room] or ways[-1:]
            return self.text(f" {fitting[0]} ", _style(paint(piece, tiling.pieces)))

        return cell

    def _device_cell(self, tiling: Tiling) -> Callable[[int, int], Text]:
        numbers = device_numbers(tiling.mesh)

        def cell(position: int, room: int) -> Text:
            piece = tiling.piece_of[position]
            colours = paint(piece, tiling.pieces)
            copy = Paint(colours.pale, colours.pale, "#1B2430")
            style = _style(colours if tiling.is_first_copy(position) else copy)
            return self.text(f" {_named(tiling, piece, str(numbers[position]))} ", style)

        return cell


def _joined(groups: Sequence[list[RenderableType]], word: Text) -> list[RenderableType]:
    """All the tables in one list, with a word between the groups."""
    joined = list(groups[0])
    for group in groups[1:]:
        joined += [word, *group]
    return joined


def _named(tiling: Tiling, piece: int, holders: str) -> str:
    return holders if tiling.pieces == 1 else f"{letters(piece)}: {holders}"


def _style(colours: Paint) -> str:
    return f"{colours.ink} on {colours.fill}"


def _most(grid: Grid, direction: str) -> int:
    return (_MOST if grid.filled <= _MOST_CELLS else _MOST_IN_PART)[direction]


def _first_and_last(count: int, most: int) -> list[int | None]:
    """Which of ``count`` are shown: all, or the first few and the last with ``None`` between."""
    if count <= most:
        return list(range(count))
    return [*range(min(most - 2, 3)), None, count - 1]
