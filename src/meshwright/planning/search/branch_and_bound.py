"""The search: meshes, axes of dims and other choices together, the most promising first.

Each mesh with each set of choices has a bound that no assignment can beat; what cannot beat the
best answers so far is never solved (best-first branch and bound, Land and Doig 1960).
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...hlo.groups import Axes
from ...targets.hardware import Hardware
from ...targets.target import Target
from ..graph import Graph
from .candidates import Candidate, in_words, plain, simplified
from .choices import EVERY_REMAT, Choices, Cost, Layouts
from .clique_tables import Tables, tables_of
from .frame import Frame, frame_of, least_shared_s
from .lagrangian import Relaxed, relaxed
from .meshes import meshes
from .request import EVERYTHING, Objective, Request, Space
from .setting import require_times
from .solve import GAP, solve_memory, solve_time

_CLOSE = 0.995  # what cannot be better than this share of the best is not looked for


@dataclass(frozen=True)
class SearchResult:
    """Answers that keep within the memory, the best first, and whether nothing better can be.

    ``tables`` and ``solved`` say how much was looked at, ``seconds`` how long it took.
    """

    candidates: tuple[Candidate, ...]
    is_proven: bool
    tables: int = field(compare=False)
    solved: int = field(compare=False)
    seconds: float = field(compare=False)


def search(
    graph: Graph,
    target: Target,
    hardware: Hardware,
    *,
    objective: Objective = "time",
    limit_bytes: int | None = None,
    space: Space = EVERYTHING,
    keep: int = 2,
    limit_s: float = 10.0,
    candidates: Iterable[Candidate] = (),
) -> SearchResult:
    """The best layouts of a step on a target, at most one per mesh and set of choices.

    Nothing that is left out is better than the first by more than 1 %, under the model of
    :func:`cost`, unless ``is_proven`` is false: then the seconds ran out. None of the
    ``candidates`` that fit is better than the first, however few the seconds. Raises
    :class:`~meshwright.TargetError` where the hardware's constants do not tell times.
    """
    request = Request(graph, target, hardware, objective, limit_bytes, space)
    return search_for(request, keep, limit_s, candidates)


def search_for(
    request: Request, keep: int, limit_s: float, candidates: Iterable[Candidate] = ()
) -> SearchResult:
    """The same of a request."""
    return _Search(request, keep)(limit_s, candidates)


class _Node(NamedTuple):
    bound: float
    order: int  # of equals, the first that was thought of
    axes: Axes
    choices: Choices
    tables: Tables | None
    relaxed: Relaxed | None


@dataclass
class _Search:
    request: Request
    keep: int
    heap: list[_Node] = field(default_factory=list)
    best: dict[tuple[object, ...], Candidate] = field(default_factory=dict)
    costs: dict[Layouts, Cost] = field(default_factory=dict)
    frames: dict[tuple[Axes, int], Frame] = field(default_factory=dict)
    order: Iterator[int] = field(default_factory=itertools.count)
    built: int = 0
    solved: int = 0
    is_proven: bool = True

    def __call__(self, limit_s: float, candidates: Iterable[Candidate]) -> SearchResult:
        begun = time.monotonic()
        deadline_s = begun + limit_s
        for candidate in candidates:
            self._add(candidate)
        for axes in self._meshes():
            self._push_mesh(axes)
        while self.heap and self._can_help(self.heap[0].bound):
            if time.monotonic() > deadline_s:
                self.is_proven = False
                break
            self._visit(heapq.heappop(self.heap), deadline_s)
        return SearchResult(
            tuple(self._ranked()[: self.keep]),
            self.is_proven,
            self.built,
            self.solved,
            time.monotonic() - begun,
        )

    def _meshes(self) -> Iterable[Axes]:
        request, space = self.request, self.request.space
        if space.axes is not None:
            return (space.axes,)
        how = space.max_axes, space.fewer_devices, request.stages
        return meshes(request.target, request.hardware, *how)

    def _push_mesh(self, axes: Axes) -> None:
        request = self.request
        if request.objective == "time":
            setting = request.setting(axes)
            require_times(setting, request.target, request.hardware)
            bound = least_shared_s(request.problem, setting)
            for zero in self._levels(axes):
                for base in self._bases(zero):
                    self._push(bound, axes, base)
            return
        for choices in self._choices(axes):
            self._push(0.0, axes, choices)

    def _bases(self, zero: int) -> list[Choices]:
        """The choices that may take the least time at a level of ZeRO: without remat, unless that
        spares a loop what it stacks."""
        remat = sorted(self.request.space.remat, key=EVERY_REMAT.index)
        some = remat if self.request.problem.is_spared_by_remat else remat[:1]
        return [Choices(zero, min(self.request.space.accumulate), one) for one in some]

    def _levels(self, axes: Axes) -> Sequence[int]:
        """Levels of ZeRO, which need something to share state out over."""
        zero = self.request.space.zero
        can = any(self.request.divides(axes, mask) for mask in range(1, 2 ** len(axes)))
        return zero if can else (min(zero),)

    def _choices(self, axes: Axes) -> Iterator[Choices]:
        every = itertools.product(
            self._levels(axes), self.request.space.accumulate, self.request.space.remat
        )
        return (
            choices for combination in every if self._is_possible(choices := Choices(*combination))
        )

    def _is_possible(self, choices: Choices) -> bool:
        return choices.accumulate == 1 or self.request.divides((), 0, choices.accumulate)

    def _push(
        self,
        bound: float,
        axes: Axes,
        choices: Choices,
        tables: Tables | None = None,
        relaxed: Relaxed | None = None,
    ) -> None:
        heapq.heappush(self.heap, _Node(bound, next(self.order), axes, choices, tables, relaxed))

    def _visit(self, node: _Node, deadline_s: float) -> None:
        """Give a node its true bound, or solve it."""
        if node.tables is None:
            self.built += 1
            tables = tables_of(self._frame(node.axes, node.choices.accumulate), node.choices)
            is_time = self.request.objective == "time"
            least = tables.least_time_s if is_time else float(tables.least_bytes)
            self._push(max(node.bound, least), node.axes, node.choices, tables)
        elif self.request.objective == "memory":
            self._solve_memory(node.tables, deadline_s)
        elif node.relaxed is None:
            self._solve_free(node, node.tables, deadline_s)
        else:
            self._solve_limited(node.tables, node.relaxed, deadline_s)

    def _frame(self, axes: Axes, accumulate: int) -> Frame:
        key = axes, accumulate
        if key not in self.frames:
            self.frames[key] = frame_of(
                self.request.problem, self.request.setting(axes), accumulate
            )
        return self.frames[key]

    def _solve_free(self, node: _Node, tables: Tables, deadline_s: float) -> None:
        """The fastest of all; where that does not fit, what the limit costs is its new bound."""
        self.solved += 1
        free = None if tables.free is None else tables.free[1]
        if free is None:
            result = solve_time(tables, None, deadline_s, self._worst())
            self.is_proven &= result.is_proven
            free = result.masks
        if free is None:
            return
        if self.request.limit_bytes is None or tables.peaks(free).max() <= self.request.limit_bytes:
            self._keep(tables, free)
            return
        self._push_children(node, tables.time_s(free))
        if tables.least_bytes > self.request.limit_bytes:
            return
        limited = relaxed(tables, self.request.limit_bytes)
        if limited.masks is not None and self._can_help(limited.time_s):
            self._keep(tables, limited.masks)
        if limited.bound_s < float("inf"):
            bound = max(node.bound, limited.bound_s)
            self._push(bound, node.axes, node.choices, tables, limited)

    def _solve_limited(self, tables: Tables, relaxed: Relaxed, deadline_s: float) -> None:
        """The fastest of what fits, unless it is known already."""
        if relaxed.time_s <= relaxed.bound_s * (1 + GAP):
            return
        self.solved += 1
        fits = solve_time(tables, self.request.limit_bytes, deadline_s, self._worst(), relaxed)
        self.is_proven &= fits.is_proven
        if fits.masks is not None:
            self._keep(tables, fits.masks)

    def _push_children(self, node: _Node, least_s: float) -> None:
        """More micro-batches, or recomputing, take more time; they only help what does not fit."""
        bases = self._bases(node.choices.zero)
        if node.choices not in bases:
            return
        for choices in self._choices(node.axes):
            is_own = len(bases) == 1 or choices.remat == node.choices.remat
            if choices.zero == node.choices.zero and choices not in bases and is_own:
                self._push(least_s * _CLOSE, node.axes, choices)

    def _solve_memory(self, tables: Tables, deadline_s: float) -> None:
        self.solved += 1
        worst = self._worst()
        result = solve_memory(tables, deadline_s, None if worst is None else int(worst))
        self.is_proven &= result.is_proven
        if result.masks is not None:
            self._keep(tables, result.masks)

    def _keep(self, tables: Tables, masks: Mapping[int, int]) -> None:
        problem, rank = self.request.problem, self.request.rank
        fixed = self.request.space.axes is not None
        layouts = plain(problem, tables, masks, fixed)
        cost = self._cost(layouts)
        for simpler in [] if fixed else simplified(problem, layouts):
            other = self._cost(simpler)
            if rank(other) <= rank(cost):
                layouts, cost = simpler, other
        if not fixed:
            layouts = in_words(problem, layouts)
        self._add(Candidate(layouts, cost), tables.frame.setting.axes, tables.choices)

    def _add(self, new: Candidate, *key: object) -> None:
        """Keep what fits, the best of each mesh and set of choices, by the names of the search."""
        if not self.request.fits(new.cost):
            return
        at = key or (new.layouts,)
        before = self.best.get(at)
        if before is None or self.request.rank(new.cost) < self.request.rank(before.cost):
            self.best[at] = new

    def _cost(self, layouts: Layouts) -> Cost:
        if layouts not in self.costs:
            self.costs[layouts] = self.request.candidate(layouts).cost
        return self.costs[layouts]

    def _ranked(self) -> list[Candidate]:
        """The answers, the best first; of those that cost the same, and differ in names, one."""
        result: dict[object, Candidate] = {}
        for candidate in self.best.values():
            cost = candidate.cost
            key = candidate.layouts if cost.time_s is None else self.request.rank(cost)
            result.setdefault(key, candidate)
        return _worth_it(
            sorted(result.values(), key=lambda candidate: self.request.rank(candidate.cost))
        )

    def _worst(self) -> float | None:
        """The last of the answers that are kept; ``None`` while there is room for more."""
        ranked = self._ranked()
        return None if len(ranked) < self.keep else self.request.rank(ranked[self.keep - 1].cost)[0]

    def _can_help(self, bound: float) -> bool:
        worst = self._worst()
        return worst is None or bound < _CLOSE * worst


def _worth_it(ranked: Iterable[Candidate]) -> list[Candidate]:
    """Without those that compute as much again as a better one, or more, and hold no less."""
    result: list[Candidate] = []
    fronts: dict[object, list[tuple[int, int]]] = {}
    for option in ranked:
        choices, peak = option.layouts.choices, option.cost.peak_bytes
        again = EVERY_REMAT.index(choices.remat)
        better = fronts.setdefault(
            replace(option.layouts, choices=replace(choices, remat="none")), []
        )
        if not any(less <= again and bytes_ <= peak for less, bytes_ in better):
            better.append((again, peak))
            result.append(option)
    return result
