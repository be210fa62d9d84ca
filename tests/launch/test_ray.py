"""``mw.RayLauncher`` on a real Ray: two raylets of this machine stand for two hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright as mw
from meshwright import ClusterError
from meshwright.extras import is_installed

needs_ray = [
    pytest.mark.alone,
    pytest.mark.targets,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(not is_installed("ray"), reason='not installed: pip install "ray"'),
    # Ray's own files and sockets are closed by its processes.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def raylets() -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def sum_over_all(number: int) -> dict[str, object]:
    import jax
    import numpy as np

    import meshwright as mw

    strategy = mw.DataParallel(mw.create_mesh({"batch": -1}))
    rows = strategy.put(np.arange(8.0, dtype="float32"))
    total = strategy.reduce("sum", strategy.run(lambda piece: piece.sum(), args=(rows,)))
    return {
        "rank": jax.process_index(),
        "devices": jax.device_count(),
        "sum": float(total) + number,
    }


def train_and_die_once(folder: str) -> int:
    """Train with a checkpoint; the first time, rank 1 is killed. The first epoch that was run."""
    import jax
    import keras
    import numpy as np

    import meshwright as mw

    began: list[int] = []

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            began.append(epoch)

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            if (
                epoch == 3
                and jax.process_index() == 1
                and not (mark := Path(folder) / "mark").exists()
            ):
                mark.write_text("killed")
                os.kill(os.getpid(), signal.SIGKILL)

    strategy = mw.DataParallel(mw.create_mesh({"batch": -1}))
    with strategy.scope():
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    x, y = np.ones([64, 8], "float32"), np.ones([64, 4], "float32")
    strategy.fit(
        model, x, y, batch_size=16, epochs=8, verbose=0,
        checkpoint=str(Path(folder) / "saved"), callbacks=[Kill()],
    )  # fmt: skip
    return began[0]


def die_with_the_actor(folder: str) -> int:
    import jax

    mark = Path(folder) / "mark"
    if jax.process_index() == 1 and not mark.exists():
        mark.write_text("killed")
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)
    return jax.process_count()


def freeze(folder: str) -> None:
    import jax

    (Path(folder) / f"pid{jax.process_index()}").write_text(json.dumps(os.getpid()))
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def ray_marks(function):
    for mark in reversed(needs_ray):
        function = mark(function)
    return function


@ray_marks
def test_a_function_runs_as_a_group_on_two_raylets(raylets):
    launcher = mw.RayLauncher(2, {"CPU": 1}, placement="STRICT_SPREAD", devices=2)
    expected = [{"rank": rank, "devices": 4, "sum": 33.0} for rank in range(2)]
    assert launcher.run(sum_over_all, number=5) == expected


@ray_marks
def test_a_killed_process_is_replaced_and_training_goes_on(raylets, tmp_path, capfd):
    launcher = mw.RayLauncher(2, max_restarts=1)
    began = launcher.run(train_and_die_once, str(tmp_path))
    assert (tmp_path / "mark").exists()
    assert began[0] == began[1] > 0
    assert re.search(r"rank 1 of 2 .* was killed by signal 9", capfd.readouterr().err)


@ray_marks
def test_an_actor_that_dies_takes_its_process_along_and_all_start_again(raylets, tmp_path, capfd):
    assert mw.RayLauncher(2, max_restarts=1).run(die_with_the_actor, str(tmp_path)) == [2, 2]
    assert "is gone with its Ray actor" in capfd.readouterr().err


@ray_marks
def test_a_process_that_freezes_is_named_where_ray_sees_nothing(raylets, tmp_path):
    launcher = mw.RayLauncher(2, stall_s=2.0)
    with pytest.raises(mw.ProcessError, match=r"rank 1 of 2 .* is stopped") as raised:
        launcher.run(freeze, str(tmp_path))
    assert raised.value.rank == 1


@ray_marks
def test_servers_and_workers_are_actors(raylets):
    launcher = mw.RayLauncher(1)
    servers = launcher.parameter_servers(workers=2, ps=1)
    with servers as cluster, mw.ParameterServer(cluster) as strategy:
        coordinator = mw.ClusterCoordinator(strategy)
        with strategy.scope():
            total = strategy.variable(0.0)
        for number in (1.0, 2.0, 3.0):
            coordinator.schedule(total.assign_add, args=(number,))
        coordinator.join(timeout_s=60.0)
        assert float(total.read()) == 6.0


@ray_marks
def test_resources_that_ray_does_not_have_are_an_error(raylets):
    launcher = mw.RayLauncher(2, {"CPU": 99}, start_s=3.0)
    with pytest.raises(ClusterError, match=r"Ray has not found 2 x \{'CPU': 99\}.*the cluster has"):
        launcher.run(sum_over_all, 0)


def test_invalid_values_are_refused_all_at_once():
    named = r"num_processes must be(.|\n)*placement(.|\n)*restarts(.|\n)*script_s must be above 0"
    with pytest.raises(ClusterError, match=named):
        mw.RayLauncher(0, placement="ANYWHERE", max_restarts=-1, script_s=0)


def test_a_function_that_cannot_travel_is_an_error(tmp_path):
    from meshwright.launch.remote import Work

    with (tmp_path / "file").open("w") as file, pytest.raises(mw.ShippingError, match="be sent"):
        Work.of_call(print, file)
