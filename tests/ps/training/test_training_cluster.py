"""Training with real processes: accuracy, deaths, and who talks with whom."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
from deaths import Kill, workers_lost
from training_models import apart, data, dense, ratings, recommender

from meshwright.launch.local import LocalCluster
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.options import Tables
from meshwright.ps.shared.partitioners import FixedShardsPartitioner
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training import Embedding, LocalSGD, table_of

pytestmark = pytest.mark.alone
LIMIT_S = 240.0
HEARTBEAT_S = 0.2


@contextlib.contextmanager
def trained_on(workers: int = 2, ps: int = 2, **options) -> Iterator[tuple]:
    """A cluster and a strategy on it; the process ends if that takes too long."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        environment = {"JAX_PLATFORMS": "cpu"}
        with (
            LocalCluster(
                workers, ps, heartbeat_s=HEARTBEAT_S, logs=False, env=environment
            ) as cluster,
            ParameterServer(
                cluster, heartbeat_s=HEARTBEAT_S, dead_after_s=5.0, **options
            ) as strategy,
        ):
            yield cluster, strategy
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_two_workers_learn_and_no_step_s_parameters_go_through_the_coordinator():
    x, y = data(640)
    model = dense(keras.optimizers.Adam(0.01), keras.layers.BatchNormalization())
    with trained_on() as (_, strategy):
        how = {"batch_size": 16, "epochs": 6, "verbose": 0, "validation_data": (x, y)}
        history = strategy.fit(model, x, y, **how).history
        stats = ClusterCoordinator(strategy).stats()
        through = []
        for steps in (10, 30):
            before = ClusterCoordinator(strategy).stats()["parameter_bytes"]
            strategy.fit(model, x, y, batch_size=16, steps_per_epoch=steps, verbose=0)
            through.append(ClusterCoordinator(strategy).stats()["parameter_bytes"] - before)
        measured = strategy.evaluate(model, x, y, batch_size=16, return_dict=True)
    assert history["val_accuracy"][-1] > 0.93
    assert measured["loss"] == pytest.approx(model.evaluate(x, y, verbose=0)[0], rel=1e-4)
    assert through[0] == through[1]  # the model's own values, when a run begins and ends
    assert stats["result_bytes"] < 6 * 10 * 100  # counts of metrics, by shard of validation
    assert all(worker["done"] > 0 for worker in stats["workers"].values())
    assert int(model.optimizer.iterations) == 280


CLIPPED = {"global_clipnorm": 0.2}, {"clipnorm": 0.1}, {"clipvalue": 0.02}


@pytest.mark.full
def test_synchronous_steps_of_two_workers_are_one_big_batch():
    """Clipping by norms too, of variables that are cut over two servers, while workers die."""
    x, y = data(256)
    how = {"epochs": 2, "shuffle": False, "verbose": 0}
    with trained_on(consistency="sync", partitioner=FixedShardsPartitioner(2)) as (
        cluster,
        strategy,
    ):
        for clipped in ({}, *CLIPPED):
            expected, model = (
                dense(keras.optimizers.SGD(0.2, momentum=0.5, **clipped)) for _ in range(2)
            )
            expected.fit(x, y, batch_size=32, **how)
            kill = Kill(cluster, "worker:1", signal.SIGKILL, 1)
            strategy.fit(model, x, y, batch_size=16, callbacks=[kill], **how)
            assert apart(expected, model) < 2e-6, clipped
            assert int(model.optimizer.iterations) == 16
        assert workers_lost(strategy) > 0


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_die_lose_no_step_and_no_element(how):
    x, y = data(1600)
    model = dense(keras.optimizers.Adam(0.01))
    with trained_on() as (cluster, strategy):
        strategy.fit(model, x, y, batch_size=16, steps_per_epoch=20, verbose=0)
        epochs = (1, 3) if how == signal.SIGKILL else (1,)
        options = {"epochs": 5, "verbose": 0, "validation_data": (x, y), "shuffle": False}
        options["callbacks"] = [Kill(cluster, "worker:1", how, *epochs)]
        try:
            history = strategy.fit(model, x, y, batch_size=16, **options).history
            assert workers_lost(strategy) > 0
        finally:
            with contextlib.suppress(Exception):
                cluster.kill("worker:1", signal.SIGCONT)
        counts = int(model.optimizer.iterations)
    assert counts == 20 + 5 * 100  # every step was applied once
    assert history["accuracy"][-1] > 0.9
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    assert history["val_loss"][-1] == pytest.approx(expected["loss"], rel=1e-4)
    assert history["val_accuracy"][-1] == pytest.approx(expected["accuracy"], rel=1e-6)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::meshwright.MeshwrightWarning")  # what was lost is stated
def test_training_goes_on_when_a_server_dies():
    x, y = data(640)
    model = dense(keras.optimizers.Adam(0.01))
    with trained_on() as (cluster, strategy):
        strategy.fit(model, x, y, batch_size=16, epochs=1, verbose=0)
        kill = Kill(cluster, "ps:0", signal.SIGKILL, 3)
        options = {"epochs": 25, "verbose": 0, "callbacks": [kill]}
        history = strategy.fit(model, x, y, batch_size=16, **options).history
        restarts = cluster.generation("ps:0")
    assert restarts == 1
    assert history["accuracy"][-1] > 0.9


@pytest.mark.full
def test_tables_on_two_servers_and_local_steps():
    x, y = ratings(256)
    model = recommender(keras.optimizers.Adam(0.05), Embedding("table", 4, "hash"))
    with trained_on() as (_, strategy):
        history = strategy.fit(model, x, y, batch_size=16, epochs=15, verbose=0,
                      tables=Tables(["user_table"])).history  # fmt: skip
        rows = table_of(strategy, model, "table").lookup(np.arange(10))
        x, y = data(640)
        averaged = dense(keras.optimizers.SGD(0.3))
        how = {"batch_size": 16, "epochs": 4, "verbose": 0, "local": LocalSGD(every=5)}
        local = strategy.fit(averaged, x, y, **how).history
    assert history["loss"][-1] < 0.95 * history["loss"][0]
    assert rows.shape == (10, 4)
    assert np.abs(rows).max() > 0.05  # beyond what they began with: they were trained
    assert local["accuracy"][-1] > 0.85


@pytest.mark.full
@pytest.mark.parametrize("servers", [1, 3])
def test_a_run_with_tables_goes_on_with_another_number_of_servers(tmp_path, servers):
    x, y = ratings(128)
    how = {"batch_size": 16, "shuffle": False, "verbose": 0}

    def model():
        return recommender(keras.optimizers.Adam(0.05), Embedding("table", 4, "hash"))

    with ParameterServer() as strategy:
        expected = model()
        strategy.fit(expected, x, y, epochs=2, **how)
        rows = table_of(strategy, expected, "table").lookup(np.arange(10))
    with trained_on(1, 2) as (_, strategy):
        strategy.fit(model(), x, y, epochs=1, checkpoint=tmp_path, **how)
    with trained_on(1, servers) as (_, strategy):
        actual = model()
        strategy.fit(actual, x, y, epochs=2, checkpoint=tmp_path, **how)
        table = table_of(strategy, actual, "table")
        assert len(table.shards) == servers
        np.testing.assert_allclose(table.lookup(np.arange(10)), rows, atol=1e-6)
    assert apart(expected, actual) < 1e-6


@pytest.mark.full
def test_twenty_fits_leave_no_more_behind_than_two():
    """Their steps, and the arrays that these brought to the workers."""
    x, y = data(64_000)
    model = dense("sgd")
    with trained_on() as (cluster, strategy):
        coordinator = ClusterCoordinator(strategy)
        bytes_after = {}
        for number in range(1, 21):
            strategy.fit(model, x + number, y, batch_size=16, steps_per_epoch=8, verbose=0)
            if number in (4, 20):
                _wait_until(lambda: not coordinator._packer.forgotten)
                assert len(coordinator._packer._functions) <= 1
                assert all(len(w.functions) <= 1 for w in coordinator._dispatcher.workers.values())
                bytes_after[number] = [_resident_bytes(cluster.pid(f"worker:{w}")) for w in (0, 1)]
    # One fit's arrays are 1.8 MB: sixteen of them would be 28 MB.
    for before, after in zip(bytes_after[4], bytes_after[20], strict=True):
        assert after - before < 12 << 20


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
