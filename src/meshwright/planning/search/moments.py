"""What is alive when, in counts that do not depend on the layout: the planner's peak is linear.

The peak of a layout is the fullest moment, each array counted with its bytes under that layout. So
CP-SAT holds layouts to a limit with the same figure that is reported. Which arrays there are
and how long they live is read from the step once for each platform (``lifetimes.py``).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .choices import Choices, Remat
from .lifetimes import Lifetime, Timeline, timeline_of

if TYPE_CHECKING:
    from .compact import Compact, Piece, Work

_NOTHING = -1
_COMPARED = 1500  # moments; to compare more with each other takes longer than it saves
_SUMMED = 32  # columns whose sum is looked at before they are


def alive(problem: Compact, choices: Choices) -> np.ndarray:
    """What is alive when: rows of moments, columns of pieces, then of works, then of sums."""
    differs = {"cpu": (1, 2, 3)}.get(problem.platform, (3,))  # levels of ZeRO
    zero = choices.zero if choices.zero in differs else 0
    return _alive(problem, choices.remat, choices.accumulate, zero)


@functools.lru_cache(maxsize=16)
def _alive(problem: Compact, remat: Remat, accumulate: int, zero: int) -> np.ndarray:
    on_cpu = problem.platform == "cpu"
    beside = accumulate if on_cpu else 1
    result = _moments(problem, remat, zero, beside, accumulate > 1)
    if accumulate == 1:
        return result
    sums = np.array([count for _, count in problem.parameters], result.dtype)
    return np.concatenate([result, np.tile(sums, (len(result), 1))], axis=1)


@functools.lru_cache(maxsize=16)
def _moments(problem: Compact, remat: Remat, zero: int, beside: int, is_looped: bool) -> np.ndarray:
    """How many of each piece are alive at each operation, equal moments once."""
    timeline = timeline_of(problem, zero, remat, is_looped)
    running, events = _running(problem, timeline), _Events.of(timeline.lifetimes)
    is_run_beside = beside > 1 and bool(timeline.ahead)
    places = np.arange(len(running)) if is_run_beside else events.fullest(running)
    most = beside * len(timeline.lifetimes)  # that can be alive
    dtype = np.int16 if most < 1 << 15 else np.int32  # hundreds of MB for long models
    sizes = events.sums(places, len(problem.pieces), dtype)
    if is_run_beside:
        rows = [
            piece.kind == "activation" and problem.batch in piece.scope for piece in problem.pieces
        ]
        others = np.minimum(sizes, sizes[list(timeline.ahead)]) * np.array(rows, sizes.dtype)
        sizes = sizes + (beside - 1) * others
    is_running = running[places, None] == np.arange(len(problem.works))
    return _undominated(np.concatenate([sizes, is_running], axis=1, dtype=dtype)).astype(np.int64)


class _Events(NamedTuple):
    """By how much the count of a piece changes, and when; sorted by time."""

    times: np.ndarray
    pieces: np.ndarray
    changes: np.ndarray

    @classmethod
    def of(cls, lifetimes: Sequence[Lifetime]) -> _Events:
        events: Counter[tuple[int, int]] = Counter()
        for life in lifetimes:
            events[life.first, life.piece] += 1
            events[life.last + 1, life.piece] -= 1
        rows = sorted((*event, change) for event, change in events.items() if change)
        times, pieces, changes = np.array(rows, np.int64).reshape(-1, 3).T
        return cls(times, pieces, changes)

    def fullest(self, running: np.ndarray) -> np.ndarray:
        """The moments that neither of their neighbours is at least as full as, one of equal ones.

        They are found without the counts, which take 500 MB for the moments of a NASNet.
        ``running`` has the work of each moment that needs room, or ``_NOTHING``.
        """
        grows, shrinks = np.zeros((2, len(running) + 1), bool)
        grows[self.times[self.changes > 0]] = True
        shrinks[self.times[self.changes < 0]] = True
        is_idle, is_same = running == _NOTHING, running[1:] == running[:-1]
        below = np.zeros(len(running), bool)
        below[:-1] = ~shrinks[1:-1] & (is_idle[:-1] | is_same)
        below[1:] |= ~grows[1:-1] & (is_idle[1:] | is_same) & ~below[:-1]
        return np.flatnonzero(~below)

    def sums(self, moments: np.ndarray, pieces: int, dtype: type[np.integer]) -> np.ndarray:
        """How many of each piece there are: rows of ``moments``, which rise, columns of pieces."""
        result = np.zeros((len(moments) + 1, pieces), dtype)
        np.add.at(result, (np.searchsorted(moments, self.times), self.pieces), self.changes)
        return np.cumsum(result[:-1], axis=0, dtype=dtype, out=result[:-1])


def _running(problem: Compact, timeline: Timeline) -> np.ndarray:
    """The work of each moment that needs room, or ``_NOTHING``."""
    needs_room = [_needs_room(work, problem.pieces) for work in problem.works]
    result = np.full(max(timeline.length, 1), _NOTHING)
    for operation, when in timeline.runs:
        work = problem.work_of[operation]
        if needs_room[work]:
            result[when] = work
    return result


def _needs_room(work: Work, pieces: tuple[Piece, ...]) -> bool:
    """Whether an operation may hold copies of its own, of what is gathered or moved."""
    shared = ("parameter", "cast", "gradient")
    shares = any(pieces[p].kind in shared for p in work.operands + work.results)
    return bool(work.whole or work.moves or shares)


def _undominated(rows: np.ndarray) -> np.ndarray:
    """Moments that no other moment is at least as full as, whatever the layout.

    First those beside each other, since memory grows and shrinks in runs; then all, if few.
    """
    differing = np.ascontiguousarray(rows[:, (rows != rows[:1]).any(axis=0)])
    places = np.arange(len(rows))
    while len(places) > 1:
        here = differing[places]
        below = np.zeros(len(places), bool)
        below[:-1] = (here[:-1] <= here[1:]).all(axis=1)
        below[1:] |= (here[1:] <= here[:-1]).all(axis=1) & ~below[:-1]
        if not below.any():
            break
        places = places[~below]
    kept_at = {differing[place].tobytes(): place for place in places}
    places = np.array(list(kept_at.values()), np.int64)
    if len(places) > _COMPARED:
        return rows[places]
    return rows[_unbeaten(differing, places)]


def _unbeaten(rows: np.ndarray, places: np.ndarray) -> list[int]:
    """Of some rows, those that none of them is at least as large as in all columns.

    One that is, is so in the sums of columns beside each other as well, which are few.
    """
    order = places[np.argsort(-rows[places].sum(axis=1), kind="stable")]
    starts = np.arange(0, rows.shape[1], _SUMMED)
    short = np.add.reduceat(rows, starts, axis=1) if len(starts) else rows
    result = np.zeros(len(order), np.int64)
    count = 0
    for place in order:
        above = result[:count][(short[result[:count]] >= short[place]).all(axis=1)]
        if not (rows[above] >= rows[place]).all(axis=1).any():
            result[count] = place
            count += 1
    return result[:count].tolist()
