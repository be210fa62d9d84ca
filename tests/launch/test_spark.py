"""``mw.SparkLauncher`` on a real Spark (local mode, Java 17), and the rows that it hands over."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright import ClusterError, DataError
from meshwright.extras import is_installed
from meshwright.launch.rows import agree_on, note_length, spool, spooled

_MISSING = [name for name in ("pyspark",) if not is_installed(name)]
_MISSING += [] if shutil.which("java") else ["java"]


def spark_marks(function):
    marks = (
        pytest.mark.filterwarnings("ignore::ResourceWarning"),
        pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}"),
        pytest.mark.targets,
        pytest.mark.xdist_group("spark"),
        pytest.mark.alone,
    )
    for mark in marks:
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def sc() -> Iterator[Any]:
    from pyspark import SparkConf, SparkContext

    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = SparkConf().setMaster("local[2]").set("spark.ui.enabled", "false")
    conf.set("spark.driver.bindAddress", "127.0.0.1").set("spark.driver.host", "127.0.0.1")
    context = SparkContext(conf=conf)
    context.setLogLevel("ERROR")
    yield context
    context.stop()


def train(rows: Any, batch_size: int) -> tuple[int, int, float]:
    import jax
    import keras

    import meshwright as mw

    strategy = mw.DataParallel(mw.create_mesh({"batch": -1}))
    with strategy.scope():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    for _ in range(3):
        batches = ((x[:, None], y[:, None]) for x, y in rows.batches(batch_size))
        history = strategy.fit(model, mw.LocalRows(batches), verbose=0, shuffle=False)
    return jax.process_index(), len(rows), history.history["loss"][-1]


def die_once(mark: str) -> str:
    import jax

    if jax.process_index() == 1 and not Path(mark).exists():
        Path(mark).write_text("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return f"rank {jax.process_index()} of {jax.process_count()}"


def kill_the_task(mark: str) -> str:
    """Kill Spark's own Python worker, whose child this process is."""
    import jax

    if jax.process_index() == 1 and not Path(mark).exists():
        Path(mark).write_text("killed")
        os.kill(os.getppid(), signal.SIGKILL)
    return f"rank {jax.process_index()} of {jax.process_count()}"


@spark_marks
def test_an_rdd_feeds_a_group_in_a_barrier_stage(sc):
    rows = sc.parallelize([(i / 8, i / 4) for i in range(33)], 2)  # 16 and 17 rows
    results = mw.SparkLauncher(sc).run(train, 4, data=rows)
    assert [(rank, count) for rank, count, _ in results] == [(0, 17), (1, 17)]
    assert results[0][2] == results[1][2]


@spark_marks
def test_the_columns_of_a_dataframe_feed_a_group(sc):
    from pyspark.sql import SparkSession

    frame = SparkSession(sc).createDataFrame([(i / 8, i / 4) for i in range(33)], ["x", "y"])
    results = mw.SparkLauncher(sc).run(train, 4, data=frame)
    assert [(rank, count) for rank, count, _ in results] == [(0, 17), (1, 17)]
    assert results[0][2] == results[1][2]


@spark_marks
@pytest.mark.parametrize("die", [die_once, kill_the_task])
def test_a_stage_that_fails_is_submitted_again(sc, tmp_path, capfd, die):
    launcher = mw.SparkLauncher(sc, max_restarts=1)
    expected = ["rank 0 of 2", "rank 1 of 2"]
    assert launcher.run(die, str(tmp_path / "mark")) == expected
    assert "All processes are started again" in capfd.readouterr().err
    if die is die_once:
        (tmp_path / "mark").unlink()
        with pytest.raises(mw.ProcessError, match=r"rank 1 of 2 .* was killed by signal 9"):
            mw.SparkLauncher(sc).run(die, str(tmp_path / "mark"))


@spark_marks
def test_what_cannot_be_is_refused(sc, tmp_path, monkeypatch):
    monkeypatch.setattr(sc, "pythonExec", shutil.which("python3", path="/usr/bin:/usr/local/bin"))
    with pytest.raises(ClusterError, match=r"the tasks of Spark run .*python3.* PYSPARK_PYTHON"):
        mw.SparkLauncher(sc).run(die_once, str(tmp_path / "mark"))
    monkeypatch.undo()
    with pytest.raises(ClusterError, match=r"needs 3 tasks at once, and local\[2\] runs 2"):
        mw.SparkLauncher(sc, 3)
    with pytest.raises(DataError, match=r"process 0 of 2 has received no rows"):
        mw.SparkLauncher(sc).run(train, 4, data=sc.parallelize([(1.0, 2.0)], 2))
    with pytest.raises(DataError, match="an RDD or a DataFrame of Spark; received lis"):
        mw.SparkLauncher(sc).run(train, 4, data=[1, 2])


def killer(mark: Path, task: str) -> Callable[[], None]:
    """A function that kills its worker once, or Spark's own Python worker, whose child that is."""

    def kill_once() -> None:
        if not mark.exists():
            mark.write_text("killed")
            os.kill(os.getppid() if task == "Spark" else os.getpid(), signal.SIGKILL)
            time.sleep(60.0)  # it is ended with Spark's worker, and must not return before

    return kill_once


@spark_marks
def test_servers_and_workers_are_tasks_and_one_that_dies_is_started_again(sc, tmp_path):
    servers = mw.SparkLauncher(sc).parameter_servers(workers=1, ps=1)
    with servers as cluster, mw.ParameterServer(cluster) as strategy:
        coordinator = mw.ClusterCoordinator(strategy)
        with strategy.scope():
            total = strategy.variable(0.0)
        for number in (1.0, 2.0, 3.0):
            coordinator.schedule(total.assign_add, args=(number,))
            coordinator.schedule(killer(tmp_path / "mark", "this"))
        coordinator.join(timeout_s=120.0)
        assert float(total.read()) == 6.0
    assert (tmp_path / "mark").exists()
    assert sc.parallelize(range(4), 2).sum() == 6  # both slots are free again


@spark_marks
def test_when_spark_ends_the_stage_of_the_servers_the_error_says_so(sc, tmp_path):
    servers = mw.SparkLauncher(sc).parameter_servers(workers=1, ps=1)
    with servers as cluster, mw.ParameterServer(cluster) as strategy:
        coordinator = mw.ClusterCoordinator(strategy)
        coordinator.schedule(killer(tmp_path / "mark", "Spark"))
        with pytest.raises(mw.TaskError, match="Spark has ended the stage of the servers"):
            coordinator.join(timeout_s=120.0)


@spark_marks
def test_servers_and_workers_need_a_slot_each(sc):
    with (
        pytest.raises(ClusterError, match=r"needs 3 tasks at once, and local\[2\] runs 2"),
        mw.SparkLauncher(sc).parameter_servers(workers=2, ps=1),
    ):
        pass


# Rows, without Spark


@pytest.mark.parametrize(("length", "numbers"), [(3, [0, 1, 2]), (7, [0, 1, 2, 3, 4, 0, 1])])
def test_rows_can_be_read_again_and_all_processes_have_as_many(tmp_path, length, numbers):
    assert spool(((n, n * 2.0) for n in range(5)), tmp_path) == 5
    note_length(tmp_path, length)
    rows = spooled(tmp_path)
    assert rows is not None
    for _ in range(2):
        assert [row[0] for row in rows] == numbers
    sizes = [len(columns[0]) for columns in rows.batches(2)]
    assert sum(sizes) == len(rows) == length
    assert set(sizes[:-1]) == {2}


def test_a_process_without_rows_is_an_error_that_says_how_many_there_are():
    with pytest.raises(DataError, match=re.escape("process 1, 3 of 4 has received no rows: the")):
        agree_on([2, 0, 1, 0], "pad")
