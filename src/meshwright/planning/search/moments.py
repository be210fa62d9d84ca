"""What is alive when, in counts that do not depend on the layout: the planner's peak is linear.

The peak of a layout is the fullest moment, each array counted with its bytes under that layout. So
CP-SAT holds layouts to a limit with the same figure that is reported. Which arrays there are
and how long they live is read from the step once for each platform (``lifetimes.py``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from .choices import Choices, Remat
from .lifetimes import timeline_of

if TYPE_CHECKING:
    from .compact import Compact, Piece, Work

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
    most = beside * len(timeline.lifetimes)  # that can be alive
    dtype = np.int16 if most < 1 << 15 else np.int32  # hundreds of MB for long models
    changes = np.zeros((timeline.length + 1, len(problem.pieces)), dtype)
    for life in timeline.lifetimes:
        changes[life.first, life.piece] += 1
        changes[life.last + 1, life.piece] -= 1
    sizes = np.cumsum(changes, axis=0, dtype=dtype, out=changes)[: max(timeline.length, 1)]
    if beside > 1 and timeline.ahead:
        rows = [
            piece.kind == "activation" and problem.batch in piece.scope for piece in problem.pieces
        ]
        others = np.minimum(sizes, sizes[list(timeline.ahead)]) * np.array(rows, sizes.dtype)
        sizes = sizes + (beside - 1) * others
    running = np.zeros((len(sizes), len(problem.works)), dtype)
    needs_room = [_needs_room(work, problem.pieces) for work in problem.works]
    for operation, when in timeline.runs:
        work = problem.work_of[operation]
        if needs_room[work]:
            running[when, work] = True
    return _undominated(np.concatenate([sizes, running], axis=1)).astype(np.int64)


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
