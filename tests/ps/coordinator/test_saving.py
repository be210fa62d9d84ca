"""Checkpoints of variables: read by any number of servers, with their slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from clusters import WAIT_S, trained_on

import meshwright as mw
from meshwright.errors import CheckpointError, MeshwrightWarning
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.shared.partitioners import FixedShardsPartitioner
from meshwright.ps.strategy import ParameterServer

ADAM = {"class_name": "Adam", "config": {"learning_rate": 0.05}}
SHAPE = (7, 2)


def grow(strategy: ParameterServer, coordinator: ClusterCoordinator, w, steps: int) -> None:
    def step(target):
        strategy.apply_gradients(ADAM, [(w.read() - target, w)])

    for _ in range(steps):
        coordinator.schedule(step, args=(np.arange(14, dtype="float32").reshape(SHAPE),))
        coordinator.join(WAIT_S)  # one after the other, so that there is one right answer


def one_process(steps: int) -> np.ndarray:
    with ParameterServer() as strategy:
        w = strategy.variable("zeros", shape=SHAPE, name="w")
        grow(strategy, ClusterCoordinator(strategy), w, steps)
        return w.read()


def test_it_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    with ParameterServer(partitioner=FixedShardsPartitioner(2)) as strategy:
        w = strategy.variable("zeros", shape=SHAPE, name="w")
        count = strategy.variable(np.int64(3), name="count")
        before = strategy.parameter_bytes
        grow(strategy, ClusterCoordinator(strategy), w, 5)
        path = strategy.save(tmp_path, step=5)
        assert strategy.parameter_bytes == before
        assert ClusterCoordinator(strategy).stats()["parameter_bytes"] == before
        w.read()
        assert strategy.parameter_bytes == before + 14 * 4
    info = mw.read_checkpoint(tmp_path)
    assert (info.step, info.directory) == (5, path)
    assert {a.key for a in info.arrays} == {
        "params/w",
        "params/count",
        "slots/w/momentum",
        "slots/w/velocity",
    }
    with ParameterServer(partitioner=FixedShardsPartitioner(3)) as strategy:
        w = strategy.variable("ones", shape=SHAPE, name="w")
        count = strategy.variable(np.int64(0), name="count")
        assert strategy.restore(tmp_path) == 5
        assert count.read() == 3
        grow(strategy, ClusterCoordinator(strategy), w, 5)
        np.testing.assert_allclose(w.read(), one_process(10), rtol=1e-5)


def test_the_path_is_that_of_what_was_saved_and_not_of_a_later_step(tmp_path: Path):
    with ParameterServer() as strategy:
        w = strategy.variable(1.0, name="w")
        later = strategy.save(tmp_path, step=3)
        w.assign(2.0)
        path = strategy.save(tmp_path, step=1)
        assert (later.name, path.name) == ("step_3", "step_1")
        strategy.restore(later)
        strategy.restore(path)
        assert w.read() == 2.0


def test_a_warning_of_the_coordinator_points_at_the_users_line(tmp_path: Path):
    with ParameterServer() as strategy:
        strategy.variable(1.0, name="w")
        coordinator = ClusterCoordinator(strategy)
        coordinator._dispatcher.records.untold.append("ps:0 was silent.")
        with pytest.warns(MeshwrightWarning, match="ps:0 was silent") as caught:
            strategy.save(tmp_path)  # which joins
    assert caught[0].filename == __file__


def test_variables_that_are_made_after_the_restore_get_their_values(tmp_path: Path):
    with ParameterServer() as strategy:
        w = strategy.variable("zeros", shape=SHAPE, name="w")
        strategy.variable(np.int64(3), name="count")
        grow(strategy, ClusterCoordinator(strategy), w, 5)
        strategy.save(tmp_path, step=5)
    with ParameterServer(partitioner=FixedShardsPartitioner(3)) as strategy:
        assert strategy.restore_later(tmp_path) == 5
        w = strategy.variable("ones", shape=SHAPE, name="w")
        strategy.variable(1.0, name="another")
        assert w.read().sum() == 14  # not yet: the count is missing
        count = strategy.variable(np.int64(0), name="count")
        assert count.read() == 3
        grow(strategy, ClusterCoordinator(strategy), w, 5)  # the slots came as well
        np.testing.assert_allclose(w.read(), one_process(10), rtol=1e-5)
    with ParameterServer() as strategy:
        strategy.restore_later(tmp_path)
        strategy.variable("ones", shape=(3,), name="w")
        with pytest.raises(CheckpointError, match=r"w is float32\[7, 2\] in the checkpoint, and"):
            strategy.variable(np.int64(0), name="count")
        assert strategy.variable(np.int64(0), name="count").read() == 0
    with ParameterServer() as strategy, pytest.raises(CheckpointError):
        strategy.restore_later(tmp_path / "nowhere")


def test_a_checkpoint_that_does_not_fit_is_refused_with_all_that_differs(tmp_path: Path):
    with ParameterServer() as strategy:
        strategy.variable("zeros", shape=(2,), name="a")
        strategy.variable("zeros", shape=(2,), name="b")
        strategy.save(tmp_path)
    with ParameterServer() as strategy:
        strategy.variable("zeros", shape=(3,), name="a")
        strategy.variable("zeros", shape=(2,), name="c")
        with pytest.raises(CheckpointError) as caught:
            strategy.restore(tmp_path)
    message = str(caught.value)
    assert "c is not in the checkpoint" in message
    assert "b is in the checkpoint, and no variable" in message
    assert "a is float32[2] in the checkpoint, and float32[3] here" in message


@pytest.mark.alone
@pytest.mark.full
@pytest.mark.parametrize("servers", [1, 3, 4])
def test_two_servers_write_and_another_number_reads(tmp_path: Path, servers: int):
    with trained_on(1, 2, partitioner=FixedShardsPartitioner(2)) as (_, strategy, coordinator):
        w = strategy.variable("zeros", shape=SHAPE, name="w")
        grow(strategy, coordinator, w, 3)
        strategy.save(tmp_path, step=3)
        assert coordinator.stats()["parameter_bytes"] == 0
    cut = FixedShardsPartitioner(servers)
    with trained_on(1, servers, partitioner=cut) as (_, strategy, coordinator):
        w = strategy.variable("zeros", shape=SHAPE, name="w")
        assert len({shard.server for shard in w.shards}) == servers
        strategy.restore(tmp_path)
        grow(strategy, coordinator, w, 3)
        assert coordinator.stats()["parameter_bytes"] == 0
        np.testing.assert_allclose(w.read(), one_process(6), rtol=1e-5)
