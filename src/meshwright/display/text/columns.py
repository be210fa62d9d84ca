"""Texts made of lines and of columns: plain for ``print`` and files, by Rich in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_GAP = 2  # spaces between columns
_NARROW = 16  # a column of this width or less is not broken in a terminal


class Line(NamedTuple):
    """A line of its own, in a style of Rich's where there are colours."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Columns:
    """Rows of cells that stand under each other; those of the columns ``right`` end together.

    The rows numbered ``marked`` stand out in a terminal.

    >>> print(Columns([("peak", "9 KiB"), ("slots", "12 KiB")], right=(1,)))
      peak    9 KiB
      slots  12 KiB
    """

    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    indent: int = 2
    marked: Collection[int] = ()

    @property
    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(*self.rows, strict=True)]

    def __str__(self) -> str:
        lines = (
            (" " * _GAP).join(
                cell.rjust(width) if place in self.right else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, self._widths, strict=True))
            )
            for row in self.rows
        )
        return "\n".join(f"{' ' * self.indent}{line}".rstrip() for line in lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        widths = self._widths
        needed = sum(min(width, _NARROW) + _GAP for width in widths) + self.indent
        if (
            needed > options.max_width
        ):  # there, lines that go on below read better than slim columns
            yield Text(str(self))
            return
        table = Table.grid(padding=(0, _GAP, 0, 0))
        for place, width in enumerate(widths):
            side = "right" if place in self.right else "left"
            table.add_column(justify=side, no_wrap=width <= _NARROW, overflow="fold")
        for number, row in enumerate(self.rows):
            table.add_row(*map(Text, row), style="red" if number in self.marked else "")
        yield Padding(table, (0, 0, 0, self.indent), expand=False)


@dataclass(frozen=True)
class Paragraphs:
    """Lines and columns one after the other."""

    parts: tuple[str | Line | Columns, ...]

    def __str__(self) -> str:
        return "\n".join(part.text if isinstance(part, Line) else str(part) for part in self.parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for part in self.parts:
            if isinstance(part, Columns):
                yield part
            else:
                yield Text(*part) if isinstance(part, Line) else Text(part)


Content = str | Line | Columns | Iterable["Content"]


def paragraphs(*parts: Content) -> Paragraphs:
    """All the parts in one text; a list of parts counts as its members."""
    return Paragraphs(tuple(_flat(parts)))


def _flat(parts: Iterable[Content]) -> Iterator[str | Line | Columns]:
    for part in parts:
        if isinstance(part, str | Line | Columns):
            yield part
        else:
            yield from _flat(part)


def print_text(*texts: object) -> None:
    """Print texts, parted by empty lines: in colours and to its width where this is a terminal."""
    from rich.console import Console

    for number, text in enumerate(texts):
        if number:
            print()
        if sys.stdout.isatty():
            Console(highlight=False).print(text, markup=False)
        else:
            print(text)


def first_rows(rows: Sequence[Sequence[str]], most: int) -> list[Sequence[str]]:
    """The first rows, and one that says how many more there are."""
    if len(rows) <= most:
        return list(rows)
    more = f"... and {len(rows) - most} more"
    return [*rows[:most], (*("",) * (len(rows[0]) - 1), more)]
