"""What a limit of memory costs at least, without a solver: a price is put on the bytes of a moment.

Whatever the price, the least of time and price together, less the price of what is allowed, is no
more than what keeps within the limit takes (Everett, "Generalized Lagrange Multiplier Method",
1963). The best price is found by walking along the lower hull of time over bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .clique_tables import Tables
from .eliminate import Elimination

_MOMENTS = 4  # that are looked at
_PRICES = 20  # that are tried of each
_SAME = 1e-9


@dataclass(frozen=True)
class Relaxed:
    """No assignment within the limit takes less than ``bound_s``, infinite where there is none.

    ``masks`` is one that keeps within the limit, if any was met, and takes ``time_s``. ``moments``
    were too full for assignments that take less.
    """

    bound_s: float
    masks: dict[int, int] | None
    time_s: float
    moments: tuple[int, ...]


@dataclass(frozen=True)
class _Point:
    masks: dict[int, int]
    time_s: float
    nbytes: float


def relaxed(tables: Tables, limit_bytes: int) -> Relaxed:
    """How near to a limit prices lead; nowhere, where the least without one is not known."""
    elimination = tables.frame.elimination
    if tables.free is None or elimination is None:
        return Relaxed(tables.least_time_s, None, math.inf, ())
    bound, masks = tables.free
    best: tuple[float, dict[int, int] | None] = math.inf, None
    moments: list[int] = []
    for _ in range(_MOMENTS):
        moment = int(np.argmax(tables.peaks(masks)))
        if moment in moments:
            break
        moments.append(moment)
        walk = _Walk(tables, elimination, moment, limit_bytes)
        least, fits = walk()
        bound = max(bound, least)
        if fits is None:
            return Relaxed(math.inf, None, math.inf, tuple(moments))
        for row in walk.fitting:
            if row.time_s < best[0] and tables.peaks(row.masks).max() <= limit_bytes:
                best = row.time_s, row.masks
        masks = fits.masks
        if tables.peaks(masks).max() <= limit_bytes:
            break
    return Relaxed(bound, best[1], best[0], tuple(moments))


class _Walk:
    """Along the hull of one moment."""

    def __init__(
        self, tables: Tables, elimination: Elimination, moment: int, limit_bytes: int
    ) -> None:
        self._tables = tables
        self._elimination = elimination
        self._limit = limit_bytes
        self._times = [clique.time_s for clique in tables.cliques]
        self._sizes = [table.astype(float) for table in tables.sizes_at(moment)]
        self.fitting: list[_Point] = []

    def __call__(self) -> tuple[float, _Point | None]:
        """The best bound, and the fastest that was met of what fits."""
        assert self._tables.free is not None
        above = self._point(self._tables.free[1])
        below = self._point(self._elimination.least(self._sizes)[1])
        if below.nbytes > self._limit:
            return math.inf, None
        if above.nbytes <= self._limit:
            return above.time_s, above
        self.fitting.append(below)
        bound = above.time_s
        for _ in range(_PRICES):
            price = (below.time_s - above.time_s) / (above.nbytes - below.nbytes)
            priced = [t + price * n for t, n in zip(self._times, self._sizes, strict=True)]
            least, masks = self._elimination.least(priced)
            bound = max(bound, least - price * self._limit)
            point = self._point(masks)
            if least >= (above.time_s + price * above.nbytes) * (1 - _SAME):
                break
            if point.nbytes > self._limit:
                above = point
            else:
                below = point
                self.fitting.append(below)
        return bound, below

    def _point(self, masks: dict[int, int]) -> _Point:
        rows = [clique.row(masks) for clique in self._tables.cliques]
        return _Point(masks, _at(self._times, rows), _at(self._sizes, rows))


def _at(values: Sequence[np.ndarray], rows: Sequence[int]) -> float:
    return float(sum(table[row] for table, row in zip(values, rows, strict=True)))
