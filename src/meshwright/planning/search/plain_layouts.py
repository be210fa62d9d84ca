"""What a dry run looks at beside the planner's best: plainer layouts, which it may underrate."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from .candidates import Candidate
from .choices import EVERY_REMAT, Choices, Layouts
from .compact import Compact
from .cost import divides
from .request import Request


def plainer(request: Request, best: Candidate, parallel: Candidate | None) -> Iterator[Candidate]:
    """The best with less ZeRO; data parallel as it is, fully sharded, and with tables cut by rows.

    As far as they fit. The model takes nothing to overlap, and compilers hide collectives: it may
    prefer to share out what costs nothing, to split more than it need, or to gather too little.
    """

    def those_that_fit(every: Iterable[Layouts]) -> Iterator[Candidate]:
        yield from (one for one in map(request.candidate, every) if request.fits(one.cost))

    zero = best.layouts.choices.zero
    yield from those_that_fit(_at_level(best.layouts, level) for level in (0, 1) if level < zero)
    if parallel is None:
        return
    yield from those_that_fit([parallel.layouts, *_with_tables(request.problem, parallel.layouts)])
    yield from itertools.islice(those_that_fit(_fully_sharded(parallel.layouts)), 1)


def _at_level(layouts: Layouts, zero: int) -> Layouts:
    return replace(layouts, choices=replace(layouts.choices, zero=zero))


def _fully_sharded(parallel: Layouts) -> Iterator[Layouts]:
    """FSDP: ZeRO of level 3 (Rajbhandari et al. 2020), and that with more and more remat."""
    for remat in EVERY_REMAT:
        yield replace(parallel, choices=Choices(zero=3, remat=remat))


def _with_tables(problem: Compact, parallel: Layouts) -> Iterator[Layouts]:
    """Data parallel with tables cut by rows along the same axes, as recommenders are trained.

    The search never lays two dims of one operation along one axis. Of a look-up XLA can do so: each
    device asks all for the rows that it wants (Naumov et al., "Deep Learning Recommendation Model",
    2019).
    """
    everything = 2 ** len(parallel.axes) - 1
    axes = tuple(name for name, _ in parallel.axes)
    rules = tuple(
        (problem.units[unit].family, axes)
        for unit in rows_of_tables(problem)
        if divides(problem, parallel.axes, unit, everything, 1)
    )
    if rules:
        yield replace(parallel, rules=(*parallel.rules, *rules))


def rows_of_tables(problem: Compact) -> list[int]:
    """Units that are looked up, and that no array has beside the rows of the batch."""
    looked_up = {
        unit
        for work in problem.works
        if work.kind == "gather"
        and any(problem.pieces[place].kind == "parameter" for place in work.operands)
        for unit in work.summed
    }
    beside = {
        unit for piece in problem.pieces if problem.batch in piece.scope for unit in piece.scope
    }
    return sorted(looked_up - beside)
