"""All assignments on one mesh as tables, so that costs become linear in what is chosen.

Units that meet in a piece or a work form a clique; each clique has a row per assignment of axes to
its units, with what that costs. Repeated blocks are one clique, as they are one set of units.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .choices import Choices
from .compact import Compact, Piece, Work
from .cost import columns, divides, held_bytes
from .moments import alive
from .setting import Setting
from .terms import Lay, parameter_spent, work_spent


@dataclass(frozen=True, eq=False)
class Clique:
    """Units that are chosen for together.

    ``masks`` has a row per assignment and a column per unit; ``time_s`` is what the assignment
    costs of the terms that count here, and ``bytes_of`` has a row for each place in ``columns``.
    """

    units: tuple[int, ...]
    masks: np.ndarray
    time_s: np.ndarray
    columns: tuple[int, ...]
    lay: Lay
    held: tuple[Piece | Work, ...]

    @functools.cached_property
    def bytes_of(self) -> np.ndarray:
        """Bytes of each column per assignment; only worked out where memory is short."""
        nbytes = [held_bytes(self.lay, each) for each in self.held]
        return np.stack(nbytes) if nbytes else np.zeros((0, self.lay.rows), np.int64)


@dataclass(frozen=True, eq=False)
class Tables:
    """One mesh and one set of choices: ``options`` are the sets of axes of each unit that can be
    split, ``alive`` counts columns at each moment."""

    problem: Compact
    setting: Setting
    choices: Choices
    options: dict[int, tuple[int, ...]]
    cliques: tuple[Clique, ...]
    alive: np.ndarray

    @property
    def least_time_s(self) -> float:
        """No assignment is faster: each clique by itself at its best."""
        return float(sum(clique.time_s.min() for clique in self.cliques))

    @property
    def least_bytes(self) -> int:
        """No assignment has a smaller peak: each column by itself at its smallest."""
        least = np.zeros(self.alive.shape[1], np.int64)
        for clique in self.cliques:
            least[list(clique.columns)] = clique.bytes_of.min(axis=1)
        return int((self.alive @ least).max())

    def peaks(self, masks: dict[int, int]) -> np.ndarray:
        """Bytes at every moment under an assignment."""
        held = np.zeros(self.alive.shape[1], np.int64)
        for clique in self.cliques:
            wanted = np.array([masks.get(unit, 0) for unit in clique.units], np.int64)
            (row,) = np.nonzero((clique.masks == wanted).all(axis=1))[0][:1]
            held[list(clique.columns)] = clique.bytes_of[:, row]
        return self.alive @ held


def tables_of(problem: Compact, setting: Setting, choices: Choices) -> Tables:
    """Work out what every assignment on a mesh costs, clique by clique."""
    options = _options(problem, setting, choices)
    free = frozenset(options)
    works = [(_scope_of_work(problem, work, choices) & free) for work in problem.works]
    every = columns(problem, choices)
    scopes = [(_scope_of_column(problem, each, choices) & free) for each in every]
    cliques = _maximal([*works, *scopes, *(frozenset((unit,)) for unit in free), frozenset()])
    home = {
        scope: min((len(c), i) for i, c in enumerate(cliques) if scope <= c)[1]
        for scope in {*works, *scopes}
    }
    return Tables(
        problem=problem,
        setting=setting,
        choices=choices,
        options=options,
        cliques=tuple(
            _clique(
                _lay(problem, setting, choices, units, options),
                tuple(sorted(units)),
                [w for w, scope in enumerate(works) if home[scope] == place],
                [c for c, scope in enumerate(scopes) if home[scope] == place],
                every,
            )
            for place, units in enumerate(cliques)
        ),
        alive=alive(problem, choices),
    )


def _options(problem: Compact, setting: Setting, choices: Choices) -> dict[int, tuple[int, ...]]:
    """The sets of axes of each unit that can be split at all."""
    found = {}
    for place, unit in enumerate(problem.units):
        if (place, place) in problem.clashes or unit.size == 1:
            continue
        masks = tuple(
            mask
            for mask in range(setting.everything + 1)
            if divides(problem, setting.axes, place, mask, choices.accumulate if mask else 1)
        )
        if len(masks) > 1:
            found[place] = masks
    return found


def _scope_of_work(problem: Compact, work: Work, choices: Choices) -> frozenset[int]:
    scope = set(work.units | work.summed | work.whole)
    shares = False
    for place in (*work.operands, *work.results):
        scope |= problem.pieces[place].scope
        shares |= problem.pieces[place].is_shareable
    for move in work.moves:
        scope |= {move.given, move.wanted}
    return frozenset(scope | _batch(problem, choices, shares))


def _scope_of_column(problem: Compact, column: Piece | Work, choices: Choices) -> frozenset[int]:
    if isinstance(column, Work):
        return _scope_of_work(problem, column, choices)
    shares = column.is_shareable or column.kind == "accumulator"
    return column.scope | _batch(problem, choices, shares)


def _batch(problem: Compact, choices: Choices, shares: bool) -> frozenset[int]:
    """The batch, where ZeRO makes a cost depend on it."""
    if choices.zero and shares and problem.batch is not None:
        return frozenset((problem.batch,))
    return frozenset()


def _maximal(scopes: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    kept: list[frozenset[int]] = []
    for scope in sorted(set(scopes), key=lambda scope: (-len(scope), sorted(scope))):
        if not any(scope <= other for other in kept):
            kept.append(scope)
    return kept


def _lay(
    problem: Compact,
    setting: Setting,
    choices: Choices,
    units: frozenset[int],
    options: dict[int, tuple[int, ...]],
) -> Lay:
    """Every assignment of a clique in which no two units that meet share an axis."""
    order = sorted(units)
    rows = np.zeros((1, 0), np.int64)
    for place, unit in enumerate(order):
        each = np.array(options[unit], np.int64)
        grown = np.concatenate(
            [np.repeat(rows, len(each), axis=0), np.tile(each, len(rows))[:, None]], axis=1
        )
        fine = np.ones(len(grown), bool)
        for before, other in enumerate(order[:place]):
            if (unit, other) in problem.clashes:
                fine &= (grown[:, before] & grown[:, place]) == 0
        rows = grown[fine]
    masks = {unit: rows[:, place] for place, unit in enumerate(order)}
    return Lay(problem, setting, choices, masks, len(rows))


def _clique(
    lay: Lay,
    units: tuple[int, ...],
    works: list[int],
    held: list[int],
    every: list[Piece | Work],
) -> Clique:
    problem = lay.problem
    time_s = np.zeros(lay.rows)
    for place in works:
        if problem.works[place].is_free:
            continue
        spent = work_spent(lay, problem.works[place])
        time_s = time_s + problem.counts[place] * (spent.compute_s + spent.communication_s)
    counted = dict(problem.parameters)
    for place in held:
        if place in counted:
            spent = parameter_spent(lay, problem.pieces[place])
            time_s = time_s + counted[place] * spent.communication_s
    return Clique(
        units=units,
        masks=np.stack([lay.masks[unit] for unit in units], axis=1)
        if units
        else np.zeros((1, 0), np.int64),
        time_s=time_s,
        columns=tuple(held),
        lay=lay,
        held=tuple(every[place] for place in held),
    )
