"""The least sum of tables over a few units each, exactly: one unit after the other is eliminated.

All tables that have a unit are joined, and of rows that differ in nothing else the best is kept
(Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter, "Bucket elimination", 1999).
The work grows with the number of rows of the largest join, which is exponential in how many units
meet at a time (the induced width of the order). The dims of a step meet few others: a block's dims
those of the block, and all blocks share theirs.

Which rows are joined does not depend on their values. So the joins are made once for a mesh, and
each level of ZeRO, each kind of remat and each price of memory only adds numbers along them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_MOST_ROWS = 200_000  # of tables that are joined
_BITS = 62

Clashes = frozenset[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class _Table:
    """Rows of sets of axes, a column per unit; ``rows_of`` is each row's place in joined tables."""

    units: tuple[int, ...]
    rows: np.ndarray
    rows_of: tuple[tuple[int, np.ndarray], ...]

    def keys(self, units: Sequence[int], bits: int) -> np.ndarray:
        """A number per row, the same where these units are."""
        result = np.zeros(len(self.rows), np.int64)
        for unit in units:
            result = result << bits | self.rows[:, self.units.index(unit)]
        return result


@dataclass(frozen=True, eq=False)
class _Step:
    """A unit is eliminated: ``sets`` has its axes in each joined row, which lie in groups that
    begin at ``starts`` and have ``keys``."""

    unit: int
    others: tuple[int, ...]
    rows_of: tuple[tuple[int, np.ndarray], ...]
    sets: np.ndarray
    starts: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True, eq=False)
class Elimination:
    """The order of elimination and all joins, for any values of the rows."""

    steps: tuple[_Step, ...]
    ends: tuple[int, ...]  # tables without units
    bits: int

    @classmethod
    def of(
        cls, tables: Sequence[tuple[tuple[int, ...], np.ndarray]], bits: int, clashes: Clashes
    ) -> Elimination | None:
        """Of tables of ``(units, rows)``; ``None`` where a join is too large.

        No two units that clash share an axis in any row.

        >>> rows = np.array([[0, 0], [0, 1], [1, 0]])
        >>> found = Elimination.of([((0, 1), rows), ((1, 2), rows)], 1, frozenset())
        >>> least, sets = found.least([np.array([3.0, 1.0, 2.0]), np.array([5.0, 4.0, 1.0])])
        >>> least, sorted(sets.items())
        (2.0, [(0, 0), (1, 1), (2, 0)])
        """
        remaining = {place: _Table(*entry, ()) for place, entry in enumerate(tables)}
        steps: list[_Step] = []
        meets = _meetings(remaining.values())
        while meets:
            # The unit that meets fewest others first: the usual order ("min-width"), near enough
            # to the best, which is NP-hard to find.
            unit = min(meets, key=lambda unit: (len(meets[unit]), unit))
            beside = meets.pop(unit)
            for other in beside - {unit}:  # all of which the table that is left has
                meets[other] = (meets[other] | beside) - {unit}
            if bits * len(beside) > _BITS:
                return None
            joined = _joined(remaining, unit, bits, clashes)
            if joined is None:
                return None
            step, table = _without(joined, unit, bits)
            for place, _ in step.rows_of:
                del remaining[place]
            remaining[len(tables) + len(steps)] = table
            steps.append(step)
        return cls(tuple(steps), tuple(remaining), bits)

    def least(self, values: Sequence[np.ndarray]) -> tuple[float, dict[int, int]]:
        """The least sum of one value of each table, and the axes of all units there."""
        tables, sums = list(values), []
        for step in self.steps:
            total = np.zeros(len(step.sets))
            for place, rows in step.rows_of:
                total += tables[place][rows]
            sums.append(total)
            tables.append(np.minimum.reduceat(total, step.starts))
        # Backwards: the units that a step depends on were eliminated after it and are known by now.
        result: dict[int, int] = {}
        for step, total in zip(reversed(self.steps), reversed(sums), strict=True):
            key = 0
            for unit in step.others:
                key = key << self.bits | result[unit]
            group = int(np.searchsorted(step.keys, key))
            begin = int(step.starts[group])
            end = step.starts[group + 1] if group + 1 < len(step.starts) else len(total)
            result[step.unit] = int(step.sets[begin + int(np.argmin(total[begin:end]))])
        return float(sum(tables[place][0] for place in self.ends)), result


def _meetings(tables: Iterable[_Table]) -> dict[int, set[int]]:
    """By unit those that some table has with it, and itself."""
    meets: dict[int, set[int]] = {}
    for table in tables:
        for unit in table.units:
            meets.setdefault(unit, set()).update(table.units)
    return meets


def _joined(tables: dict[int, _Table], unit: int, bits: int, clashes: Clashes) -> _Table | None:
    """All tables that have a unit as one, the small ones first."""
    having = [
        _Table(table.units, table.rows, ((place, np.arange(len(table.rows))),))
        for place, table in tables.items()
        if unit in table.units
    ]
    first, *rest = sorted(having, key=lambda table: len(table.rows))
    for other in rest:
        result = _join(first, other, bits, clashes)
        if result is None:
            return None
        first = result
    return first


def _join(one: _Table, other: _Table, bits: int, clashes: Clashes) -> _Table | None:
    shared = [unit for unit in one.units if unit in other.units]
    more = [unit for unit in other.units if unit not in one.units]
    keys, own_keys = other.keys(shared, bits), one.keys(shared, bits)
    order = np.argsort(keys, kind="stable")
    begins = np.searchsorted(keys[order], own_keys, side="left")
    counts = np.searchsorted(keys[order], own_keys, side="right") - begins
    if counts.sum() > _MOST_ROWS:
        return None
    mine = np.repeat(np.arange(len(own_keys)), counts)
    within = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
    yours = order[begins[mine] + within]
    columns = [other.units.index(unit) for unit in more]
    rows = np.concatenate([one.rows[mine], other.rows[yours][:, columns]], axis=1)
    units = (*one.units, *more)
    fine = np.ones(len(rows), bool)
    for place, unit in enumerate(units[len(one.units) :], len(one.units)):
        for before, neighbor in enumerate(one.units):
            if (unit, neighbor) in clashes:
                fine &= (rows[:, before] & rows[:, place]) == 0
    rows_of = [(place, at[mine[fine]]) for place, at in one.rows_of]
    rows_of += [(place, at[yours[fine]]) for place, at in other.rows_of]
    return _Table(units, rows[fine], tuple(rows_of))


def _without(table: _Table, unit: int, bits: int) -> tuple[_Step, _Table]:
    """The step that eliminates a unit, and the table that it leaves."""
    others = tuple(sorted(neighbour for neighbour in table.units if neighbour != unit))
    keys = table.keys(others, bits)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    rows = table.rows[order]
    step = _Step(
        unit,
        others,
        tuple((place, at[order]) for place, at in table.rows_of),
        rows[:, table.units.index(unit)],
        starts,
        keys[starts],
    )
    columns = [table.units.index(other) for other in others]
    return step, _Table(others, rows[starts][:, columns], ())
