"""The best assignment on one mesh, by CP-SAT over booleans (Perron and Furnon, OR-tools).

One boolean per unit and set of axes, one per row of a clique; costs are linear in them. Limits of
memory are added where an answer breaks them, and the answer sought again, as few moments matter.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import PlanError
from ...extras import require
from .clique_tables import Clique, Tables
from .lagrangian import Relaxed

_STEPS = 10**9  # into which the largest time is cut: the solver wants whole numbers
GAP = 0.002  # of the objective: closer than the model is


@dataclass(frozen=True)
class Solved:
    """``masks`` per unit, ``None`` where there is no such assignment; whether that is proven."""

    masks: dict[int, int] | None
    is_proven: bool


def solve_time(
    tables: Tables,
    limit_bytes: int | None,
    deadline_s: float,
    below_s: float | None = None,
    relaxed: Relaxed | None = None,
) -> Solved:
    """The fastest assignment whose peak is within a limit, and that takes less than ``below_s``.

    What is ``known`` of the limit spares the solver some work; an answer is better than its.
    """
    task = _Task(tables)
    times = task.whole_times()
    if relaxed is not None:
        for moment in relaxed.moments:
            task.limit(moment, limit_bytes)
        task.add(times >= int(relaxed.bound_s / task.unit_s) - len(tables.cliques) - 1)
        below_s = min(relaxed.time_s, math.inf if below_s is None else below_s)
    if below_s is not None and below_s < math.inf:
        task.add(times <= int(below_s / task.unit_s) + 1)
    task.minimize(times)
    return _until_true(task, deadline_s, limit_bytes)


def solve_memory(tables: Tables, deadline_s: float, below: int | None = None) -> Solved:
    """The assignment of the smallest peak; of those the fastest, or the most split."""
    task = _Task(tables)
    peak = task.peak()
    if below is not None:
        task.add(peak <= below)
    task.minimize(peak)
    first = _until_true(task, deadline_s, None)
    if first.masks is None:
        return first
    least = int(tables.peaks(first.masks).max())
    task.add(peak <= least)
    task.minimize(-task.splits() if tables.frame.setting.missing else task.whole_times())
    second = _until_true(task, deadline_s, least)
    return second if second.masks is not None else first


def _until_true(task: _Task, deadline_s: float, limit_bytes: int | None) -> Solved:
    """Solve, add the moment that the answer forgot, and solve again until none is left."""
    while True:
        result = task.solve(deadline_s)
        if result.masks is None:
            return result
        peaks = task.tables.peaks(result.masks)
        most = task.allowed(limit_bytes)
        worst = int(np.argmax(peaks))
        if most is None or peaks[worst] <= most:
            return result
        if not task.limit(worst, limit_bytes):
            return Solved(None, is_proven=False)


@dataclass
class _Task:
    """A CP-SAT model of one mesh's tables."""

    tables: Tables
    model: Any = None
    masks: dict[tuple[int, int], Any] = field(default_factory=dict)
    rows: list[list[Any]] = field(default_factory=list)
    unit_s: float = 1.0
    top: Any = None
    solver: Any = None
    limited: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        cp_model = solver_module()
        self.model = cp_model.CpModel()
        for unit, masks in self.tables.options.items():
            for mask in masks:
                self.masks[unit, mask] = self.model.new_bool_var(f"u{unit}_{mask}")
            self.model.add_exactly_one(self.masks[unit, mask] for mask in masks)
        self.rows = [self._rows(place, c) for place, c in enumerate(self.tables.cliques)]
        most = sum(float(c.time_s.max()) for c in self.tables.cliques)
        self.unit_s = max(self.tables.floor_s, most / 1e6, 1e-15) / _STEPS

    def _rows(self, place: int, clique: Clique) -> list[Any]:
        if len(clique.units) == 1:
            return [self.masks[clique.units[0], int(mask)] for (mask,) in clique.masks]
        rows = [self.model.new_bool_var(f"c{place}_{row}") for row in range(len(clique.masks))]
        self.model.add_exactly_one(rows)
        for column, unit in enumerate(clique.units):
            for mask in self.tables.options[unit]:
                lying = np.nonzero(clique.masks[:, column] == mask)[0]
                self.model.add(sum(rows[row] for row in lying) == self.masks[unit, mask])
        return rows

    def add(self, constraint: Any) -> None:
        self.model.add(constraint)

    def minimize(self, objective: Any) -> None:
        self.model.minimize(objective)

    def whole_times(self) -> Any:
        """The time of an assignment in units of ``unit_s``."""
        pairs = [
            (row, int(seconds / self.unit_s))
            for clique, rows in zip(self.tables.cliques, self.rows, strict=True)
            for seconds, row in zip(clique.time_s - clique.time_s.min(), rows, strict=True)
        ]
        return _sum(pairs) + int(self.tables.floor_s / self.unit_s)

    def splits(self) -> Any:
        """How many axes lie along dims, all dims together."""
        return _sum([(variable, mask.bit_count()) for (_, mask), variable in self.masks.items()])

    def peak(self) -> Any:
        """A variable for the peak, which moments are added to as they are met."""
        self.top = self.model.new_int_var(self.tables.least_bytes, 2**60, "peak")
        return self.top

    def allowed(self, limit_bytes: int | None) -> int | None:
        """What the peak of the answer may be."""
        if limit_bytes is not None or self.top is None:
            return limit_bytes
        return int(self.solver.value(self.top))

    def limit(self, moment: int, limit_bytes: int | None) -> bool:
        """Demand that a moment keeps within the limit; whether that is new."""
        if moment in self.limited:
            return False
        self.limited.add(moment)
        counts = self.tables.alive[moment]
        terms: list[tuple[Any, int]] = []
        for clique, rows in zip(self.tables.cliques, self.rows, strict=True):
            nbytes = counts[list(clique.columns)] @ clique.bytes_of if clique.columns else []
            terms += [(row, int(count)) for count, row in zip(nbytes, rows, strict=False) if count]
        most = self.top if limit_bytes is None or self.top is not None else limit_bytes
        self.model.add(_sum(terms) <= most)
        return True

    def solve(self, deadline_s: float) -> Solved:
        cp_model = solver_module()
        self.solver = cp_model.CpSolver()
        self.solver.parameters.num_workers = 1  # more would not answer the same each time
        self.solver.parameters.random_seed = 1
        self.solver.parameters.relative_gap_limit = GAP if self.top is None else 0.0
        self.solver.parameters.max_time_in_seconds = max(0.05, deadline_s - time.monotonic())
        status = self.solver.solve(self.model)
        if status in (cp_model.INFEASIBLE, cp_model.UNKNOWN):
            return Solved(None, is_proven=status == cp_model.INFEASIBLE)
        masks = {
            unit: mask
            for (unit, mask), variable in self.masks.items()
            if self.solver.boolean_value(variable)
        }
        return Solved(masks, is_proven=status == cp_model.OPTIMAL)


def _sum(pairs: list[tuple[Any, int]]) -> Any:
    """A linear expression of ``(boolean, weight)``."""
    expression = solver_module().LinearExpr
    return expression.weighted_sum([variable for variable, _ in pairs], [by for _, by in pairs])


def solver_module() -> Any:
    """OR-tools' CP-SAT. Raises :class:`~meshwright.PlanError` with the pip command."""
    require_solver()
    with _with_own_symbols():
        from ortools.sat.python import cp_model

    return cp_model


@contextlib.contextmanager
def _with_own_symbols() -> Iterator[None]:
    """A library that is loaded here uses its own functions before those of the same name.

    TensorFlow, which Keras Hub imports, offers its Protocol Buffers to every library that comes
    later. OR-tools has another release of them, and would end the process.
    """
    binding = getattr(os, "RTLD_DEEPBIND", None)  # of Linux; elsewhere names say their library
    if binding is None or "tensorflow" not in sys.modules:
        yield
        return
    before = sys.getdlopenflags()
    sys.setdlopenflags(before | binding)
    try:
        yield
    finally:
        sys.setdlopenflags(before)


def require_solver() -> None:
    """Raise :class:`~meshwright.PlanError` if OR-tools is not installed."""
    require("ortools.sat.python", PlanError, "searching for a plan takes OR-tools", "plan")
