"""Workers and servers that die, freeze and come back: totals stay exact."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
from adding import Totals
from clusters import WAIT_S, trained_on, wait_for_workers
from models import wait_for

from meshwright.errors import ClusterError, MeshwrightWarning, TaskError, UnreachableError
from meshwright.launch.local import LocalCluster
from meshwright.launch.spec import ClusterSpec
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.strategy import ParameterServer
from meshwright.testing import run_in_fresh_process

pytestmark = pytest.mark.alone


def run_with_kills(workers: int, num_kills: int, seed: int, delay_s: float) -> dict:
    """Kill workers that have joined, each once, at random instants of their work."""
    lots = random.Random(seed)
    with trained_on(workers, limit_s=550) as (cluster, strategy, coordinator):
        totals = Totals(strategy, coordinator, 0.001, delay_s)
        killed: set[int] = set()
        while len(killed) < num_kills:
            if coordinator.stats()["queued"] < 100:
                totals.schedule(20)
            time.sleep(lots.random() * 0.2)
            stats = coordinator.stats()["workers"].items()
            at_work = [(w, one["pid"]) for w, one in stats if one["done"]]
            at_work = [(w, pid) for w, pid in at_work if pid == cluster.pid(w)]
            if at_work:
                chosen, pid = lots.choice(at_work)
                cluster.restart(chosen)  # SIGKILL; and no growing delay before the next start
                killed.add(pid)
        totals.check(WAIT_S)
        wait_for(lambda: coordinator.stats()["workers_lost"] >= num_kills)
        return coordinator.stats()


def test_workers_import_nothing_heavy_for_their_steps():
    code = "import sys, adding; print(*sys.modules)"
    loaded = run_in_fresh_process(code, {"PYTHONPATH": str(Path(__file__).parent)}).split()
    assert "adding" in loaded
    assert not {"jax", "keras", "numpy", "pytest"} & set(loaded)


def test_a_few_kills():
    assert run_with_kills(2, num_kills=3, seed=1, delay_s=0.0)["retried"] > 0


@pytest.mark.full
@pytest.mark.xdist_group("hundred_kills")  # one after the other: each keeps two cores busy
@pytest.mark.parametrize("workers", [2, 4])
def test_a_hundred_kills_some_between_the_pushes_to_two_servers(workers):
    stats = run_with_kills(workers, num_kills=100, seed=workers, delay_s=0.01)
    assert stats["duplicates"] > 0  # a step of a dead worker had reached one server


@pytest.mark.full
def test_a_frozen_worker_is_noticed_and_finds_itself_refused_when_it_wakes():
    with trained_on(2, dead_after_s=1.0) as (cluster, strategy, coordinator):
        totals = Totals(strategy, coordinator, 0.002)
        wait_for_workers(coordinator, 2)
        totals.schedule(100)
        time.sleep(0.1)
        frozen = cluster.pid("worker:0")
        os.kill(frozen, signal.SIGSTOP)
        totals.schedule(100)
        begun_s = time.monotonic()
        totals.check(WAIT_S)
        assert time.monotonic() - begun_s < 10  # dead_after_s=1.0, and the work
        wait_for(lambda: coordinator.stats()["workers_lost"] == 1)
        assert set(coordinator.stats()["workers"]) == {"worker:1"}
        os.kill(frozen, signal.SIGCONT)
        wait_for_workers(coordinator, 2)
        totals.schedule(200)
        totals.check(WAIT_S)
        assert cluster.pid("worker:0") == frozen
        assert coordinator.stats()["workers"]["worker:0"]["done"] > 0  # a new incarnation


def two_counters(strategy):
    """A variable on each of two servers, and a function that adds one to both."""
    first, second = (strategy.variable(0, dtype="int64") for _ in range(2))

    def step():
        time.sleep(0.001)
        first.assign_add(1)
        second.assign_add(1)

    return first, second, step


@pytest.mark.full
def test_a_server_that_dies_is_restored_and_what_was_lost_is_told_exactly():
    with trained_on(2, snapshot_every=50) as (cluster, strategy, coordinator):
        first, second, step = two_counters(strategy)
        count = 0
        for kill in range(4):
            for _ in range(300):
                coordinator.schedule(step)
            count += 300
            while coordinator.stats()["done"] < count - 100:
                time.sleep(0.01)
            cluster.kill(f"ps:{kill % 2}", signal.SIGKILL)
            time.sleep(1.0)
            with contextlib.suppress(MeshwrightWarning):
                coordinator.join(WAIT_S)
        lost = {"ps:0": set(), "ps:1": set()}
        for loss in coordinator.losses:
            assert not lost[loss.server] & set(loss.steps)
            lost[loss.server] |= set(loss.steps)
            assert len(loss.steps) <= 2 * 50
        assert len(coordinator.losses) == 4
        assert lost["ps:0"] | lost["ps:1"]  # else this test shows nothing
        assert first.read() == count - len(lost["ps:0"])
        assert second.read() == count - len(lost["ps:1"])


@pytest.mark.full
def test_a_server_that_does_not_answer_is_named():
    with trained_on(1, 1, dead_after_s=60.0) as (cluster, strategy, coordinator):
        total = strategy.variable(0)
        add = total.assign_add
        coordinator.schedule(add, args=(1,))
        coordinator.join(WAIT_S)
        frozen = cluster.pid("ps:0")
        os.kill(frozen, signal.SIGSTOP)
        try:
            coordinator.schedule(add, args=(1,))
            with pytest.raises(
                UnreachableError, match=r"(?s)join has waited.*waits for ps:0: step"
            ):
                coordinator.join(2.0)
        finally:
            os.kill(frozen, signal.SIGCONT)
        coordinator.join(WAIT_S)
        assert total.read() == 2


@pytest.mark.full
def test_a_frozen_server_is_noticed_and_replaced_and_what_was_lost_is_told_exactly():
    with trained_on(2, snapshot_every=50, dead_after_s=1.5) as (cluster, strategy, coordinator):
        first, second, step = two_counters(strategy)
        count = 0
        while count < 200:
            count += schedule_and_wait(coordinator, step, 40)
        frozen = cluster.pid("ps:0")
        wait_for(lambda: "ps:0" in coordinator._dispatcher._beats._last_beats)
        begun_s = time.monotonic()
        os.kill(frozen, signal.SIGSTOP)
        for _ in range(400):
            coordinator.schedule(step)
        wait_for(lambda: cluster.generation("ps:0") == 1)
        assert time.monotonic() - begun_s < 5  # dead_after_s, and a beat or two
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            coordinator.join(WAIT_S)
            wait_for(lambda: coordinator.losses)
        assert any("ps:0 (pid" in str(one.message) for one in warned)
        assert any("killed, and is started again" in str(one.message) for one in warned)
        count += 400
        lost = {step for loss in coordinator.losses for step in loss.steps}
        assert first.read() == count - len(lost)
        assert second.read() == count
        assert cluster.pid("ps:0") != frozen


def schedule_and_wait(coordinator, function, count: int) -> int:
    for _ in range(count):
        coordinator.schedule(function)
    coordinator.join(WAIT_S)
    return count


@pytest.mark.full
def test_a_function_that_ends_its_workers_is_found_out():
    with trained_on(2, 1) as (_, strategy, coordinator):
        total = strategy.variable(0)

        def deadly():
            total.assign_add(100)
            os._exit(3)

        value = coordinator.schedule(deadly)
        with pytest.raises(TaskError, match="deadly was begun 10 times"):
            coordinator.join(WAIT_S)
        with pytest.raises(TaskError):
            value.fetch(WAIT_S)
        coordinator.schedule(total.assign_add, args=(1,))
        coordinator.join(WAIT_S)
        assert total.read() == 1


def test_a_server_that_is_not_there_is_named():
    spec = ClusterSpec({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]})
    with pytest.raises(
        UnreachableError, match=r"ps:0 at tcp://127\.0\.0\.1:3 .* (0\.[5-9]|[1-9]\.\d) s"
    ):
        ParameterServer(spec, timeout_s=0.5)


@pytest.mark.parametrize(
    "options",
    [{"restart_servers": False}, pytest.param({"max_restarts": 0}, marks=pytest.mark.full)],
)
def test_a_server_that_is_given_up_is_named_at_once_whatever_waits_for_it(options):
    with (
        LocalCluster(1, 1, heartbeat_s=0.2, logs=False, **options) as cluster,
        ParameterServer(cluster, heartbeat_s=0.2, dead_after_s=2.0) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        total = strategy.variable(0)
        coordinator.schedule(total.assign_add, args=(1,)).fetch(WAIT_S)
        cluster.kill("ps:0", signal.SIGKILL)
        value = coordinator.schedule(total.assign_add, args=(1,))
        for wait in (coordinator.join, value.fetch, total.read, coordinator.join):
            begun_s = time.monotonic()
            with pytest.raises(TaskError, match="ps:0 has ended") as caught:
                wait()
            assert time.monotonic() - begun_s < 2.0
            assert caught.value.task == "ps:0"
        cluster.close()
        for wait in (coordinator.join, value.fetch, total.read, coordinator.done):
            with pytest.raises(TaskError, match="the cluster is closed: its workers and servers"):
                wait()


def test_a_second_coordinator_of_a_cluster_is_refused_and_the_first_loses_no_step():
    with trained_on(1, 1) as (cluster, strategy, coordinator):
        total = strategy.variable(0, name="total")
        coordinator.schedule(total.assign_add, args=(1,)).fetch(WAIT_S)
        with ParameterServer(cluster) as other:
            with pytest.raises(ClusterError, match=r"chief:0 cannot listen at .* already in use"):
                ClusterCoordinator(other)
            coordinator.schedule(total.assign_add, args=(1,)).fetch(WAIT_S)
            assert total.read() == 2
            strategy.close()
            total = other.variable(0, name="total")
            ClusterCoordinator(other).schedule(total.assign_add, args=(1,)).fetch(WAIT_S)
            assert total.read() == 3


@pytest.mark.full
def test_snapshots_that_cannot_be_written_are_told_and_a_fence_ends_no_server():
    with trained_on(2, 1, snapshot_every=10, dead_after_s=1.0) as (cluster, strategy, coordinator):
        snapshots = cluster._folder / "snapshots"
        total = strategy.variable(0, dtype="int64")
        wait_for_workers(coordinator, 2)
        wait_for(lambda: snapshots.exists())
        shutil.rmtree(snapshots)
        snapshots.touch()  # a file in its place: nothing can be written there, as on a full disk
        frozen = cluster.pid("worker:0")
        os.kill(frozen, signal.SIGSTOP)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            count = schedule_and_wait(coordinator, functools.partial(total.assign_add, 1), 60)
            wait_for(lambda: coordinator.stats()["workers_lost"] == 1)
            wait_for(lambda: coordinator.done() and any("cannot" in str(w.message) for w in warned))
        os.kill(frozen, signal.SIGCONT)
        (message,) = [str(one.message) for one in warned if "cannot write" in str(one.message)]
        assert re.match(r"ps:0 cannot write snapshots: .* \d+ updates would be lost", message)
        assert cluster.generation("ps:0") == 0
        assert total.read() == count


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:ps.0 died and was restored")
def test_losses_never_lag_behind_what_is_read():
    with (
        LocalCluster(1, 1, heartbeat_s=0.2, logs=False, snapshot_every=None) as cluster,
        ParameterServer(cluster, heartbeat_s=20.0, dead_after_s=60.0) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        total = strategy.variable(0)
        for by_a_worker in (False, True):
            total.assign(0)
            wait_for(lambda: (cluster._folder / "snapshots" / "ps0.snapshot").exists())
            for _ in range(5):
                coordinator.schedule(total.assign_add, args=(1,))
            coordinator.join(WAIT_S)
            cluster.restart("ps:0")
            read = coordinator.schedule(total.read).fetch if by_a_worker else total.read
            assert read() == 0
            assert [len(loss.steps) for loss in coordinator.losses] == [5] * (1 + by_a_worker)
