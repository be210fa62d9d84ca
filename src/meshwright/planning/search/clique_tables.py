"""All assignments on one mesh as tables, so that costs become linear in what is chosen.

Each clique of units (``frame.py``) has a row per assignment of axes to them. Repeated blocks are
one clique, as they are one set of units.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .choices import Choices
from .frame import Corner, Frame, Options
from .moments import alive


@dataclass(frozen=True, eq=False)
class Clique:
    """Units that are chosen for together.

    ``masks`` has a row per assignment and a column per unit; ``time_s`` is what the assignment
    costs of the terms that count here, and ``bytes_of`` has a row for each place in ``columns``.
    """

    corner: Corner
    columns: tuple[int, ...]
    choices: Choices

    @property
    def units(self) -> tuple[int, ...]:
        return self.corner.units

    @property
    def masks(self) -> np.ndarray:
        return self.corner.masks

    @functools.cached_property
    def time_s(self) -> np.ndarray:
        """Seconds per assignment."""
        return self.corner.time_s(self.choices.zero, self.choices.remat)

    @functools.cached_property
    def bytes_of(self) -> np.ndarray:
        """Bytes of each column per assignment; only worked out where memory is short."""
        return self.corner.bytes_of(self.columns, self.choices.zero)

    def time_with_s(self, unit: int, mask: int) -> np.ndarray:
        """The same, infinite where a unit has other axes than these."""
        if unit not in self.units:
            return self.time_s
        return np.where(self.masks[:, self.units.index(unit)] == mask, self.time_s, np.inf)

    def row(self, masks: dict[int, int]) -> int:
        """The row of an assignment."""
        row = np.array([masks.get(unit, 0) for unit in self.units], np.int64)
        return int(np.flatnonzero((self.masks == row).all(axis=1))[0])


@dataclass(frozen=True, eq=False)
class Tables:
    """One mesh and one set of choices; ``alive`` counts columns at each moment."""

    frame: Frame
    choices: Choices
    cliques: tuple[Clique, ...]
    alive: np.ndarray

    @property
    def options(self) -> Options:
        """The sets of axes of each unit that can be split."""
        return self.frame.options

    @functools.cached_property
    def free(self) -> tuple[float, dict[int, int]] | None:
        """The least seconds of any assignment, and that; ``None`` where it is not known."""
        elimination = self.frame.elimination
        if elimination is None:
            return None
        return elimination.least([clique.time_s for clique in self.cliques])

    @functools.cached_property
    def floor_s(self) -> float:
        """Each clique by itself at its fastest."""
        return float(sum(clique.time_s.min() for clique in self.cliques))

    @property
    def least_time_s(self) -> float:
        """No assignment is faster, as far as is known."""
        return self.floor_s if self.free is None else self.free[0]

    def least_time_with_s(self, unit: int, mask: int) -> float:
        """No assignment that gives a unit these axes is faster, as far as is known."""
        times = [clique.time_with_s(unit, mask) for clique in self.cliques]
        elimination = self.frame.elimination
        return (
            float(sum(t.min() for t in times))
            if elimination is None
            else elimination.least(times)[0]
        )

    @property
    def least_bytes(self) -> int:
        """No assignment has a smaller peak: each column by itself at its smallest."""
        least = np.zeros(self.alive.shape[1], np.int64)
        for clique in self.cliques:
            least[list(clique.columns)] = clique.bytes_of.min(axis=1)
        return int((self.alive @ least).max())

    def time_s(self, masks: dict[int, int]) -> float:
        """Seconds of an assignment."""
        return float(sum(clique.time_s[clique.row(masks)] for clique in self.cliques))

    def peaks(self, masks: dict[int, int]) -> np.ndarray:
        """Bytes at every moment under an assignment."""
        sizes = np.zeros(self.alive.shape[1], np.int64)
        for clique in self.cliques:
            sizes[list(clique.columns)] = clique.bytes_of[:, clique.row(masks)]
        return self.alive @ sizes

    def sizes_at(self, moment: int) -> list[np.ndarray]:
        """Bytes at one moment, per assignment of each clique."""
        counts = self.alive[moment]
        return [counts[list(clique.columns)] @ clique.bytes_of for clique in self.cliques]


def tables_of(frame: Frame, choices: Choices) -> Tables:
    """What every assignment costs under one set of choices."""
    counts = alive(frame.problem, choices)
    used = set(np.flatnonzero(counts.any(axis=0)).tolist())
    cliques = tuple(
        Clique(corner, tuple(place for place in corner.columns if place in used), choices)
        for corner in frame.corners
    )
    return Tables(frame, choices, cliques, counts)
