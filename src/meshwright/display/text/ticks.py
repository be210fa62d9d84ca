"""The tick table of a pipeline: a line for each stage, a column for each tick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .columns import Columns, Line, Paragraphs, paragraphs

if TYPE_CHECKING:
    from ...stages.table import TickTable, Work

MARKS = {"forward": "F", "backward": "B", "weights": "W", "loss": "L"}
_MOST = 24  # ticks in a line


def tick_table_text(table: TickTable, of_stages: Sequence[float] = ()) -> Paragraphs:
    """Every tick of every stage, in blocks of lines that fit a page; ``of_stages`` are the shares
    of FLOPs."""
    rows: list[list[str]] = [[] for _ in range(table.stages)]
    for row in table.ticks:
        for cells, works in zip(rows, row, strict=True):
            cells.append(cell(works, table.repeats))
    blocks = [
        Columns(
            [("tick", *map(str, range(begin, min(begin + _MOST, len(table.ticks)))))]
            + [(f"stage {n}", *cells[begin : begin + _MOST]) for n, cells in enumerate(rows)]
        )
        for begin in range(0, len(table.ticks), _MOST)
    ]
    kinds = "F forward, B backward, W gradients of weights" if table.splits_backward else ""
    legend = kinds or "F forward, B backward"
    legend += ", L what comes after the blocks, with its gradients" * table.shares_loss
    runs = "; the number after the point is the run of blocks" if table.repeats > 1 else ""
    title = Line(tick_table_title(table, of_stages), "bold")
    return paragraphs(title, blocks, f"{legend}{runs}")


def tick_table_title(table: TickTable, of_stages: Sequence[float] = ()) -> str:
    """The table in one line: what is idle as the shares of FLOPs of its stages have it."""
    runs = f", {table.repeats} runs of blocks each" if table.repeats > 1 else ""
    return (
        f"{table.schedule}: {table.stages} stages{runs}, {table.micro_batches} micro-batches, "
        f"{len(table.ticks)} ticks, idle {table.idle_share(of_stages=of_stages):.1%}, "
        f"at most {max(table.in_flight)} in flight"
    )


def cell(works: Sequence[Work], repeats: int) -> str:
    """What a stage does at one tick: ``F3 B0``, or ``F3.1`` with the run of blocks."""
    return " ".join(
        f"{MARKS[work.kind]}{work.micro_batch}" + (f".{work.repeat}" if repeats > 1 else "")
        for work in works
    )
