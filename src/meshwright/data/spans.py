"""Which rows of an epoch each process reads: arithmetic over spans of rows, the same everywhere.

What is left of an epoch is a list of spans in the order in which they are read. Every process works
out from it what all of them read, so nothing has to be sent, and any other number of processes can
go on with what is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Dealing = Literal["file", "block", "batch"]


class Span(NamedTuple):
    """Rows ``start`` to ``stop`` of a file; data without files are one."""

    file: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


Spans = tuple[Span, ...]


class Step(NamedTuple):
    """The spans that one process reads for a step, or for the last one all rows that are left."""

    spans: Spans
    is_rest: bool = False


def row_count(spans: Sequence[Span]) -> int:
    """The rows of all spans.

    >>> row_count([Span(0, 2, 5), Span(1, 0, 4)])
    7
    """
    return sum(span.rows for span in spans)


def cut(spans: Sequence[Span], rows: int) -> tuple[Spans, Spans]:
    """The first ``rows`` rows, and those behind.

    >>> first, rest = cut((Span(0, 0, 3), Span(1, 0, 3)), 4)
    >>> first[1], rest
    (Span(file=1, start=0, stop=1), (Span(file=1, start=1, stop=3),))
    """
    first: list[Span] = []
    for place, span in enumerate(spans):
        if span.rows > rows:
            middle = span.start + rows
            head = (span._replace(stop=middle),) if rows else ()
            return (*first, *head), (span._replace(start=middle), *spans[place + 1 :])
        first.append(span)
        rows -= span.rows
    return tuple(first), ()


def dealt(spans: Spans, processes: int, dealing: Dealing) -> tuple[Spans, ...]:
    """What each process is given: whole spans, the fullest process last, or blocks of equal size.

    >>> spans = tuple(Span(i, 0, rows) for i, rows in enumerate((5, 3, 4)))
    >>> [row_count(mine) for mine in dealt(spans, 2, "file")]
    [5, 7]
    >>> [row_count(mine) for mine in dealt(spans, 2, "block")]
    [6, 6]
    """
    if dealing == "file" and len(spans) >= processes:
        fullest = [(0, process) for process in range(processes)]
        owner: dict[int, int] = {}
        for place in sorted(range(len(spans)), key=lambda place: -spans[place].rows):
            rows, process = heapq.heappop(fullest)
            owner[place] = process
            heapq.heappush(fullest, (rows + spans[place].rows, process))
        return tuple(
            tuple(span for place, span in enumerate(spans) if owner[place] == process)
            for process in range(processes)
        )
    total, result = row_count(spans), []
    for process in range(processes):
        share = (process + 1) * total // processes - process * total // processes
        mine, spans = cut(spans, share)
        result.append(mine)
    return tuple(result)


class Round(NamedTuple):
    """Steps in which every process reads on in its share; the rows ``behind`` are in no share."""

    shares: tuple[Spans, ...]
    steps: int
    behind: Spans = ()

    def unread(self, rows: int) -> Spans:
        """What is left where each process has read ``rows`` rows of its own."""
        return tuple(span for mine in self.shares for span in cut(mine, rows)[1]) + self.behind


def rounds(rest: Spans, processes: int, rows: int, dealing: Dealing) -> Iterator[Round]:
    """The rounds of what is left of an epoch, with ``rows`` rows of each process in a step.

    Where files end at different steps, what is left then is dealt in blocks. At the end fewer rows
    are left than a step takes; they come in no round, and of blocks they lie together.

    >>> files = (Span(0, 0, 6), Span(1, 0, 2))
    >>> [(one.steps, list(map(row_count, one.shares))) for one in rounds(files, 2, 1, "file")]
    [(2, [6, 2]), (2, [2, 2])]
    """
    if dealing == "batch":
        yield from _batches(rest, processes, rows)
        return
    while total := row_count(rest) // (processes * rows) * processes * rows:
        has_files = dealing == "file" and len(rest) >= processes
        first, behind = (rest, ()) if has_files else cut(rest, total)
        shares = dealt(first, processes, dealing)
        one_round = Round(shares, min(map(row_count, shares)) // rows, behind)
        if one_round.steps:
            yield one_round
            rest = one_round.unread(one_round.steps * rows)
        dealing = "block"


def steps_of(
    rest: Spans, index: int, processes: int, rows: int, dealing: Dealing
) -> Iterator[Step]:
    """What process ``index`` reads for each step; the rows that are left come last, to everybody.

    >>> [step.spans for step in steps_of((Span(0, 0, 7),), 1, 2, 2, "batch")]
    [(Span(file=0, start=2, stop=4),), (Span(file=0, start=4, stop=7),)]
    """
    unread = rest
    for one_round in rounds(rest, processes, rows, dealing):
        mine = one_round.shares[index]
        for _ in range(one_round.steps):
            spans, mine = cut(mine, rows)
            yield Step(spans)
        unread = one_round.unread(one_round.steps * rows)
    if dealing == "batch":
        unread = cut(rest, row_count(rest) // (processes * rows) * processes * rows)[1]
    if unread:
        yield Step(unread, is_rest=True)


def after(rest: Spans, steps: int, processes: int, rows: int, dealing: Dealing) -> Spans:
    """What is left of an epoch after ``steps`` more steps.

    >>> after((Span(0, 0, 7),), 1, 2, 2, "block")
    (Span(file=0, start=4, stop=7),)
    """
    if dealing == "batch":
        return cut(rest, steps * processes * rows)[1]
    for one_round in rounds(rest, processes, rows, dealing):
        if steps < one_round.steps:
            return one_round.unread(steps * rows)
        steps -= one_round.steps
        rest = one_round.unread(one_round.steps * rows)
    return () if steps else rest


def _batches(rest: Spans, processes: int, rows: int) -> Iterator[Round]:
    """A round for each step, of one batch that the processes share."""
    while row_count(rest) >= processes * rows:
        batch, rest = cut(rest, processes * rows)
        yield Round(dealt(batch, processes, "block"), 1)
