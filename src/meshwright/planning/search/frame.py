"""All assignments on one mesh, whatever the level of ZeRO: cliques of units and what rows cost.

Units that meet in a piece or a work form a clique, which has a row per assignment of axes to them:
the cost of a step is a sum of functions of a few variables each, as in a weighted constraint
network. A clique that lies within another is part of it, and each cost is counted in one clique
alone, the smallest that has all of its units, so that the costs of all cliques add up to the step.

A term depends on the level of ZeRO only if it touches what ZeRO shares out, which the batch's axes
decide: there the batch is one of the term's units. All others are worked out once for all levels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from .choices import EVERY_REMAT, Choices, Remat
from .compact import Compact, Piece, Work
from .cost import columns, divides, held_bytes
from .eliminate import Elimination
from .setting import Setting
from .terms import Lay, is_shared, least_seconds_per_flop, parameter_spent, work_spent

Options = dict[int, tuple[int, ...]]  # the sets of axes of each unit that can be split


@dataclass(frozen=True, eq=False)
class Corner:
    """Units that are chosen for together; ``masks`` has a row per assignment, a column per unit.

    ``works`` and ``columns`` are the places of what costs time and holds bytes here, and in no
    other corner.
    """

    units: tuple[int, ...]
    masks: np.ndarray
    lay: Lay
    works: tuple[int, ...]
    columns: tuple[int, ...]
    every: list[Piece | Work]  # all columns
    cache: dict[object, np.ndarray] = field(default_factory=dict)

    def time_s(self, zero: int, remat: Remat) -> np.ndarray:
        """Seconds of each row."""
        level = min(zero, 2)  # from there on only parameters differ
        key = "time", zero, remat
        if key not in self.cache:
            total = self._parameters_s(zero)
            # In the order of the works, that sums are the same in each process.
            for runs in dict.fromkeys(self.lay.problem.works[place].runs for place in self.works):
                works_s = self._works_s(0, False, runs) + self._works_s(level, True, runs)
                total = total + runs[EVERY_REMAT.index(remat)] * works_s
            self.cache[key] = total
        return self.cache[key]

    def _works_s(self, level: int, shares: bool, runs: tuple[int, ...]) -> np.ndarray:
        """What works take that are done so often with remat, recomputing apart: of those whose
        results ZeRO shares, or the others."""
        key = "works", level, shares, runs
        if key not in self.cache:
            problem, lay = self.lay.problem, self._at(level)
            total = np.zeros(lay.rows)
            for place in self.works:
                work = problem.works[place]
                if work.is_free or work.runs != runs or _shares(problem, work) != shares:
                    continue
                spent = work_spent(lay, work)
                total += problem.counts[place] * (spent.compute_s + spent.communication_s)
            self.cache[key] = total
        return self.cache[key]

    def _parameters_s(self, zero: int) -> np.ndarray:
        total, lay = np.zeros(self.lay.rows), self._at(zero)
        counted = dict(lay.problem.parameters)
        for place in self.columns if zero else ():
            if place in counted:
                spent = parameter_spent(lay, lay.problem.pieces[place])
                total += counted[place] * spent.communication_s
        return total

    def bytes_of(self, places: tuple[int, ...], zero: int) -> np.ndarray:
        """Bytes of each row, for some of the columns."""
        sizes = [self._bytes_at(place, zero) for place in places]
        return np.stack(sizes) if sizes else np.zeros((0, self.lay.rows), np.int64)

    def _bytes_at(self, place: int, zero: int) -> np.ndarray:
        column = self.every[place]
        if isinstance(column, Work):
            level = zero if zero > 1 else 0
        else:
            level = 3 if is_shared(column, zero) else 0
        key = "held", place, level
        if key not in self.cache:
            self.cache[key] = held_bytes(self._at(level), column)
        return self.cache[key]

    def _at(self, zero: int) -> Lay:
        """The rows at a level of ZeRO; what does not depend on that is kept for all of them."""
        return replace(self.lay, choices=replace(self.lay.choices, zero=zero))


@dataclass(frozen=True, eq=False)
class Frame:
    """One mesh and number of micro-batches."""

    problem: Compact
    setting: Setting
    accumulate: int
    options: Options
    corners: tuple[Corner, ...]

    @functools.cached_property
    def elimination(self) -> Elimination | None:
        """How the best rows of all corners are found; ``None`` where they are too entangled."""
        return Elimination.of(
            [(corner.units, corner.masks) for corner in self.corners],
            len(self.setting.axes),
            self.problem.clashes,
        )


def frame_of(
    problem: Compact, setting: Setting, accumulate: int, options: Options | None = None
) -> Frame:
    """The cliques of a mesh, and in which of them each work and each column is.

    ``options`` are all that units have, unless they are given.
    """
    options = _options(problem, setting, accumulate) if options is None else options
    free = frozenset(options)
    works = [(_scope_of_work(problem, work) & free) for work in problem.works]
    every = columns(problem, Choices(accumulate=accumulate))
    scopes = [(_scope_of_column(problem, column) & free) for column in every]
    cliques = _maximal([*works, *scopes, *(frozenset((unit,)) for unit in free), frozenset()])
    # The smallest clique that has all units of a term, so that small tables hold most of the work.
    home = {
        scope: min((len(c), i) for i, c in enumerate(cliques) if scope <= c)[1]
        for scope in {*works, *scopes}
    }
    at_home: list[tuple[list[int], list[int]]] = [([], []) for _ in cliques]
    for place, scope in enumerate(works):
        at_home[home[scope]][0].append(place)
    for place, scope in enumerate(scopes):
        at_home[home[scope]][1].append(place)
    corners = []
    for units, (own, moments) in zip(cliques, at_home, strict=True):
        lay = _lay(problem, setting, accumulate, units, options)
        masks = [lay.masks[unit] for unit in sorted(units)]
        rows = np.stack(masks, axis=1) if masks else np.zeros((1, 0), np.int64)
        corners.append(Corner(tuple(sorted(units)), rows, lay, tuple(own), tuple(moments), every))
    return Frame(problem, setting, accumulate, options, tuple(corners))


def least_shared_s(problem: Compact, setting: Setting) -> float:
    """Arithmetic and memory traffic alone, shared by all devices of the mesh."""
    every, pieces, total = float(np.max(setting.size_of)), problem.pieces, 0.0
    for work, count in zip(problem.works, problem.counts, strict=True):
        moved = sum(count * pieces[place].nbytes for place, count in work.far_counts)
        flops_s = work.flops * least_seconds_per_flop(setting, work)
        runs = count * work.times * min(work.runs)
        total += runs * max(flops_s, moved * setting.seconds_per_byte)
    return total / every


def _options(problem: Compact, setting: Setting, accumulate: int) -> Options:
    """The sets of axes of each unit that can be split at all."""
    result = {}
    for place in sorted(problem.laid_out):
        if (place, place) in problem.clashes or problem.units[place].size == 1:
            continue
        masks = tuple(
            mask
            for mask in range(setting.everything + 1)
            if divides(problem, setting.axes, place, mask, accumulate if mask else 1)
        )
        if len(masks) > 1:
            result[place] = masks
    return result


def _scope_of_work(problem: Compact, work: Work) -> frozenset[int]:
    scope = set(work.units | work.summed | work.whole)
    shares = False
    for place in (*work.operands, *work.results):
        shares |= problem.pieces[place].is_shareable
    for place in {*work.operands, *work.results, *work.far, *work.near}:
        scope |= problem.pieces[place].scope
    for move in work.moves:
        scope |= {move.source, move.target}
    return frozenset(scope | _batch(problem, shares))


def _scope_of_column(problem: Compact, column: Piece | Work) -> frozenset[int]:
    if isinstance(column, Work):
        return _scope_of_work(problem, column)
    shares = column.is_shareable or column.kind == "accumulator"
    return column.scope | _batch(problem, shares)


def _batch(problem: Compact, shares: bool) -> frozenset[int]:
    """The batch, where ZeRO makes a cost depend on it."""
    return frozenset((problem.batch,) if shares and problem.batch is not None else ())


def _shares(problem: Compact, work: Work) -> bool:
    """Whether the time of a work depends on the level of ZeRO."""
    return any(problem.pieces[place].is_shareable for place in work.results)


def _maximal(scopes: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    result: list[frozenset[int]] = []
    for scope in sorted(set(scopes), key=lambda scope: (-len(scope), sorted(scope))):
        if not any(scope <= other for other in result):
            result.append(scope)
    return result


def _lay(
    problem: Compact, setting: Setting, accumulate: int, units: frozenset[int], options: Options
) -> Lay:
    """Every assignment of a clique in which no two units that meet share an axis."""
    # Unit by unit, leaving out what clashes at once: all products first would not fit in memory.
    order = sorted(units)
    rows = np.zeros((1, 0), np.int64)
    for place, unit in enumerate(order):
        numbers = np.array(options[unit], np.int64)
        grown = np.concatenate(
            [np.repeat(rows, len(numbers), axis=0), np.tile(numbers, len(rows))[:, None]], axis=1
        )
        fine = np.ones(len(grown), bool)
        for before, other in enumerate(order[:place]):
            if (unit, other) in problem.clashes:
                fine &= (grown[:, before] & grown[:, place]) == 0
        rows = grown[fine]
    masks = {unit: rows[:, place] for place, unit in enumerate(order)}
    return Lay(problem, setting, Choices(accumulate=accumulate), masks, len(rows))
