"""Elimination and prices, by straight enumeration, and beside CP-SAT."""

from __future__ import annotations

import itertools
import math
import random
import time

import numpy as np
import pytest
from small_graphs import transformer

from meshwright.planning.search import Choices, Space, search
from meshwright.planning.search.clique_tables import tables_of
from meshwright.planning.search.compact import compact
from meshwright.planning.search.eliminate import Elimination
from meshwright.planning.search.frame import frame_of
from meshwright.planning.search.lagrangian import relaxed
from meshwright.planning.search.setting import setting_of
from meshwright.planning.search.solve import GAP, solve_memory, solve_time
from meshwright.targets.hardware import hardware_of
from meshwright.targets.target import Target

H100 = Target.of("h100:8")


@pytest.mark.parametrize("seed", range(8))
def test_the_least_sum_is_that_of_enumeration(seed):
    """Five units of four sets of axes, of which some pairs clash, and tables over up to three."""
    draw, values = random.Random(seed), np.random.default_rng(seed)
    scopes = [tuple(sorted(draw.sample(range(5), draw.randint(0, 3)))) for _ in range(6)]
    pairs = {pair for scope in scopes for pair in itertools.combinations(scope, 2)}
    clashes = {pair for pair in sorted(pairs) if draw.random() < 0.5}
    clashes |= {(v, u) for u, v in clashes}

    def fine(units, sets):
        of_unit = dict(zip(units, sets, strict=True))
        return not any(of_unit.get(u, 0) & of_unit.get(v, 0) for u, v in clashes)

    tables = []
    for scope in scopes:
        rows = [s for s in itertools.product(range(4), repeat=len(scope)) if fine(scope, s)]
        tables.append((scope, np.array(rows, np.int64).reshape(len(rows), len(scope))))
    costs = [values.random(len(rows)) for _, rows in tables]

    def total(sets):
        places = [[sets[unit] for unit in scope] == rows[:, :] for scope, rows in tables]
        return sum(
            float(cost[place.all(axis=1)][0]) for cost, place in zip(costs, places, strict=True)
        )

    elimination = Elimination.of(tables, 2, frozenset(clashes))
    least, sets = elimination.least(costs)
    met = {unit for scope in scopes for unit in scope}
    every = itertools.product(*(range(4) if unit in met else (0,) for unit in range(5)))
    expected = min(total(sets) for sets in every if fine(range(5), sets))
    assert least == pytest.approx(expected)
    assert set(sets) == met
    assert total([sets.get(unit, 0) for unit in range(5)]) == pytest.approx(least)


@pytest.mark.parametrize("zero", [0, 3])
def test_prices_bound_what_the_solver_finds(zero):
    """For limits from the smallest peak to the peak of the fastest."""
    hardware = hardware_of(H100)
    problem = compact(transformer(32, 512, 1024, 8, 128, 4096, blocks=1))
    setting = setting_of((("a", 4), ("b", 2)), H100, hardware)
    tables = tables_of(frame_of(problem, setting, 1), Choices(zero))
    time_s, free = tables.free
    assert time_s == pytest.approx(tables.time_s(free))
    deadline = time.monotonic() + 60
    least = solve_memory(tables, deadline, None).masks
    assert least is not None
    smallest, largest = (int(tables.peaks(masks).max()) for masks in (least, free))
    met = 0
    for share in (0.1, 0.5, 0.7, 0.9):
        limit = int(smallest + share * (largest - smallest))
        result, expected = relaxed(tables, limit), solve_time(tables, limit, deadline)
        best_s = math.inf if expected.masks is None else tables.time_s(expected.masks)
        assert result.bound_s <= best_s * (1 + 1e-6)
        if result.masks is not None:
            assert tables.peaks(result.masks).max() <= limit
            assert best_s * (1 - GAP) <= result.time_s == pytest.approx(tables.time_s(result.masks))
            met += 1
    assert met >= 3


def test_the_least_time_with_a_split_is_that_of_tables_without_other_options():
    problem = compact(transformer(32, 512, 1024, 8, 128, 4096, blocks=1))
    setting = setting_of((("a", 4), ("b", 2)), H100, hardware_of(H100))
    frame = frame_of(problem, setting, 1)
    tables = tables_of(frame, Choices())
    for unit, masks in frame.options.items():
        fixed = {**frame.options, unit: masks[-1:]}
        alone = tables_of(frame_of(problem, setting, 1, fixed), Choices())
        assert tables.least_time_with_s(unit, masks[-1]) == pytest.approx(alone.least_time_s)


@pytest.mark.full
def test_what_is_too_entangled_is_left_to_the_solver(monkeypatch):
    """The same answers, of CP-SAT alone."""
    graph, hardware = transformer(32, 512, 1024, 8, 128, 4096, blocks=1), hardware_of(H100)
    space = Space(accumulate=(1, 2), remat=("none",))
    limit = 2 * 10**9

    def best():
        return search(graph, H100, hardware, limit_bytes=limit, space=space, limit_s=60)

    by_elimination = best()
    monkeypatch.setattr("meshwright.planning.search.eliminate._MOST_ROWS", 0)
    by_solver = best()
    assert by_elimination.is_proven
    assert by_solver.is_proven
    one, other = (result.candidates[0].cost for result in (by_elimination, by_solver))
    assert one.peak_bytes <= limit
    assert one.time_s == pytest.approx(other.time_s, rel=0.01)
