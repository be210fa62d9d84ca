"""Tables that a reader can sort and filter; without scripts, and in print, they are whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .markup import Child, Html, tag

Kind = Literal["num", "path", "dims", "word", "words"]


@dataclass(frozen=True)
class Column:
    """A column: its heading, and what it holds.

    Numbers stand at the right, paths break anywhere, dims and a word stay on a line, words have
    room.
    """

    title: str
    kind: Kind | None = None


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number by which it is sorted where its text will not do."""

    shown: Child
    key: float | int | None = None


Row = Sequence[Cell | str]


def spelled(axes: tuple[str, ...]) -> str:
    """Axes of a mesh as one text.

    >>> spelled(("batch", "model")), spelled(())
    ('batch, model', '-')
    """
    return ", ".join(axes) or "-"


def grid(
    name: str,
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    shown: int | None = 20,
    marks: Sequence[bool] = (),
) -> Html:
    """A table; on screen the first ``shown`` rows, and the rest on demand.

    With ``shown=None`` its order means something, and it is not sorted. ``marks`` says of each row
    whether it is to stand out.
    """
    head = tag("tr", [tag("th", each.title, scope="col", class_=each.kind) for each in columns])
    marked = [*marks, *[False] * (len(rows) - len(marks))]
    body = [
        tag(
            "tr",
            [_cell(column, cell) for column, cell in zip(columns, row, strict=True)],
            class_="marked" if mark else None,
        )
        for row, mark in zip(rows, marked, strict=True)
    ]
    table = tag(
        "table", tag("caption", caption), tag("thead", head), tag("tbody", body), class_="grid"
    )
    return tag("div", table, class_="tablebox", id=name, data_shown=shown)


def _cell(column: Column, cell: Cell | str) -> Html:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    shown = tag("span", cell.shown or "", class_="v")
    return tag("td", shown, class_=column.kind, data_v=cell.key, data_of=column.title)
