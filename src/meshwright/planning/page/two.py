"""Two reports side by side: their figures as a table, with a bar for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .bars import Part, bar
from .grid import Cell, Column, grid
from .markup import Html, section, tag

if TYPE_CHECKING:
    from ..pair import Pair, PairedRow


def pair_head(pair: Pair) -> Html:
    """The top of the page: what is compared."""
    return tag(
        "header",
        tag("p", "Meshwright dry runs", class_="over"),
        tag("h1", f"{pair.first.name}: {' and '.join(pair.titles)}"),
        [tag("p", line, class_="under") for line in str(pair).splitlines()[:2]],
    )


def pair_section(pair: Pair) -> Html:
    """Every figure of both."""
    one, two = pair.titles
    columns = (
        Column("figure", "words"),
        Column(one, "num"),
        Column(two, "num"),
        Column("ratio", "num"),
        Column("side by side"),
    )
    rows = [_row(each) for each in pair.rows]
    table = grid("pair-table", "All figures of one device, or of one step", columns, rows, 60)
    return section("figures", "Both side by side", table)


def _row(row: PairedRow) -> tuple[Cell, ...]:
    name, first, second, ratio = row.cells
    return (
        Cell(name),
        Cell(first, row.first),
        Cell(second, row.second),
        Cell(ratio, row.ratio),
        Cell(_bars(row), row.ratio),
    )


def _bars(row: PairedRow) -> list[Html]:
    both = (row.first or 0.0, row.second or 0.0)
    whole = max(both) or 1.0
    paints = zip(("first", "second"), both, row.cells[1:3], ("blue", "orange"), strict=True)
    return [bar([Part(*part)], whole, row.name) for part in paints]
