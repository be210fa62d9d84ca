"""Consistency with several workers: what one process would do, and how far they may be apart."""

from __future__ import annotations

import time

import numpy as np
import pytest
from clusters import WAIT_S, trained_on, wait_for_workers

from meshwright.ps.shared.consistency import Backup, Stale
from meshwright.ps.worker.context import current

pytestmark = pytest.mark.alone

SGD = {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9}}


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    lots = np.random.default_rng(5)
    x = lots.normal(size=(rows, 3)).astype("float32")
    return x, x @ np.array([1.0, -2.0, 0.5], "float32")


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (2 / len(x)) * x.T @ (x @ w - y)


@pytest.mark.full_for("3")
@pytest.mark.parametrize("kills", [0, 3])
def test_a_barrier_equals_one_big_batch_also_when_workers_die(kills):
    rounds, half = 20 + 20 * kills, 8
    x, y = data(rounds * 2 * half)
    with trained_on(2, consistency="sync") as (cluster, strategy, coordinator):
        w = strategy.variable(np.zeros(3, "float32"))

        def step(x, y):
            time.sleep(0.01 if kills else 0)
            strategy.apply_gradients(SGD, [(gradient(w.read(), x, y), w)])

        for first in range(0, len(x), half):
            rows = slice(first, first + half)
            coordinator.schedule(step, args=(x[rows], y[rows]))
        hits = 0  # kills of a worker that takes part; a new one may be starting still
        for kill in range(kills):
            done = coordinator.stats()["done"]
            while coordinator.stats()["done"] < done + 10:
                time.sleep(0.005)
            hits += f"worker:{kill % 2}" in coordinator.stats()["workers"]
            cluster.restart(f"worker:{kill % 2}")  # SIGKILL, and a new start
        coordinator.join(WAIT_S)
        result = w.read()
        assert coordinator.stats()["workers_lost"] >= hits >= min(kills, 1)
    expected, moving = np.zeros(3, "float32"), np.zeros(3, "float32")
    for first in range(0, len(x), 2 * half):
        rows = slice(first, first + 2 * half)
        moving = 0.9 * moving - 0.1 * gradient(expected, x[rows], y[rows])
        expected = expected + moving
    np.testing.assert_allclose(result, expected, rtol=1e-4)


@pytest.mark.full
def test_stale_workers_are_never_further_apart_than_said():
    with trained_on(2, consistency=Stale(2)) as (_, strategy, coordinator):
        starts = strategy.variable(np.zeros(2, "int64"))

        def step():
            context = current()
            own = np.zeros(2, "int64")
            own[context.index] = 1
            counts = starts.read()  # steps that each worker has done
            time.sleep(0.02 if context.index else 0.001)
            starts.assign_add(own)
            return context.index, counts

        wait_for_workers(coordinator, 2)  # one that comes later begins with the slowest's clock
        values = [coordinator.schedule(step) for _ in range(60)]
        coordinator.join(WAIT_S)
        done = {0: 0, 1: 0}
        for index, counts in coordinator.fetch(values):
            done[index] += 1
            # When it began, it had done counts[index] steps, and the other not fewer than 2 less.
            assert counts[index] - counts[1 - index] <= 2
        assert sum(done.values()) == 60
        assert min(done.values()) >= 28  # the fast one had to wait


@pytest.mark.full
def test_backup_workers_do_not_wait_for_the_slowest():
    with trained_on(3, consistency=Backup(1)) as (_, strategy, coordinator):
        w = strategy.variable(np.zeros((), "float32"))
        plain = {"class_name": "SGD", "config": {"learning_rate": 1.0}}

        def step():
            time.sleep(0.4 if current().index == 0 else 0.01)
            strategy.apply_gradients(plain, [(np.float32(-1), w)])

        wait_for_workers(coordinator, 3)
        begun_s = time.monotonic()
        for _ in range(60):
            coordinator.schedule(step)
        coordinator.join(WAIT_S)
        took_s = time.monotonic() - begun_s
        stats = coordinator.stats()
        assert stats["dropped"] > 0
        # Every round of two or three steps moved w by the mean of its gradients, by 1.
        assert 20 <= w.read() <= 30
        assert took_s < 0.4 * 20  # a barrier would wait for the slowest in each of 20 rounds
