"""A local cluster: its tasks, their restarts and logs, and that nothing of it is left."""

from __future__ import annotations

import itertools
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watching import is_there, soon_enough, within

from meshwright import ClusterError, TaskError
from meshwright.launch import Keys, Task
from meshwright.launch.local import LocalCluster

pytestmark = pytest.mark.alone

PATIENCE_S = 20.0
REPORTING = str(Path(__file__).parent / "reporting_task.py")


class Reporting(LocalCluster):
    """A cluster of tasks that only report."""

    _arguments = (REPORTING,)


Make = Callable[..., Reporting]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    clusters: list[Reporting] = []

    def make_one(*counts: int, then: str = "", **options: object) -> Reporting:
        env = {"REPORTS": str(tmp_path), "THEN": then}
        clusters.append(Reporting(*counts, env=env, **options))  # type: ignore[arg-type]
        return clusters[-1]

    yield make_one
    for cluster in clusters:
        cluster.close(grace_s=0.0)
    assert not any(is_there(int(report.read_text())) for report in tmp_path.iterdir())


def wait_for(folder: Path, *names: str) -> dict[str, int]:
    """The numbers of the processes that have reported under these names."""
    until = time.monotonic() + PATIENCE_S
    while missing := [name for name in names if not (folder / name).exists()]:
        assert time.monotonic() < until, f"no report of {missing}"
        time.sleep(0.005)
    return {name: int((folder / name).read_text()) for name in names}


def what(cluster: LocalCluster, task: str) -> list[str]:
    return [event.what for event in cluster.events if str(event.task) == task]


def wait_until(true: Callable[[], bool]) -> None:
    assert within(PATIENCE_S, true)


def test_every_task_is_started_and_told_who_it_is(make, tmp_path):
    cluster = make(2, 2, evaluator=[REPORTING])
    names = ["worker.0.0", "worker.1.0", "ps.0.0", "ps.1.0", "evaluator.0.0"]
    pids = wait_for(tmp_path, *names)
    for name, pid in pids.items():
        job, index, _ = name.split(".")
        assert cluster.pid(f"{job}:{index}") == pid
    assert set(map(str, cluster.tasks)) == {n.rsplit(".", 1)[0].replace(".", ":") for n in names}
    assert cluster.spec.jobs == ["chief", "worker", "ps", "evaluator"]
    assert str(cluster.task()) == "chief:0"
    assert cluster.cluster_spec() == cluster.spec
    cluster.check()


def test_addresses_and_keys_are_for_the_owner_alone(make):
    cluster = make(1, 1)
    address = cluster.spec.task_address("ps", 0)
    assert re.fullmatch(r"ipc://.*/ps0", address)
    assert len(address.removeprefix("ipc://")) < 100
    folder = Path(address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys_path = Path(cluster.chief_variables()["MESHWRIGHT_KEYS"])
    assert stat.S_IMODE(keys_path.stat().st_mode) == 0o600
    assert Keys.load(keys_path) == cluster.keys
    cluster.close()
    assert not folder.exists()


def test_closing_ends_every_task_and_twice_does_no_harm(make, tmp_path):
    with make(2, 1) as cluster:
        pids = wait_for(tmp_path, "worker.0.0", "worker.1.0", "ps.0.0")
    assert not any(map(is_there, pids.values()))
    cluster.close()
    assert repr(cluster) == "LocalCluster(closed)"
    assert {event.what for event in cluster.events} == {"started", "stopped"}
    with pytest.raises(ClusterError, match="the cluster is closed"):
        cluster.add_worker()
    with pytest.raises(TaskError, match="the cluster is closed: its workers and servers have"):
        cluster.check("ps")


def test_closing_does_not_wait_for_tasks_that_are_deaf(make, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.launch.local._GRACE_S", 30.0)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    cluster = make(1, 1, then=deaf)
    wait_for(tmp_path, "worker.0.0", "ps.0.0")
    begun_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), cluster:
        raise KeyboardInterrupt
    assert time.monotonic() - begun_s < 15.0


@pytest.mark.full
@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_task_that_dies_is_started_again_within_a_second(make, tmp_path, tmp_path_factory, job):
    cluster = make(1, 1)
    wait_for(tmp_path, f"{job}.0.0")
    kills = itertools.count(1)

    def started_again_after_s(_folder: Path) -> float:
        number, killed_s = next(kills), time.monotonic()
        cluster.kill(f"{job}:0", signal.SIGKILL)
        wait_until(lambda: cluster.generation(f"{job}:0") == number)
        took_s = time.monotonic() - killed_s
        pid = wait_for(tmp_path, f"{job}.0.{number}")[f"{job}.0.{number}"]
        assert cluster.pid(f"{job}:0") == pid
        assert what(cluster, f"{job}:0") == ["started", *["died", "restarted"] * number]
        return took_s

    assert soon_enough(1.0, tmp_path_factory.mktemp("kills"), started_again_after_s)
    died = [event for event in cluster.events if event.what == "died"]
    assert {(event.task, event.exit_code) for event in died} == {(Task(job, 0), -9)}
    assert 0 < died[0].time_s < PATIENCE_S


@pytest.mark.full
def test_a_task_that_dies_again_and_again_is_given_up_with_its_last_lines(make, capfd):
    faulty = "if settings.task.job == 'worker': raise RuntimeError('no such luck')"
    cluster = make(1, 1, then=faulty, max_restarts=2)
    wait_until(lambda: "given up" in what(cluster, "worker:0"))
    assert what(cluster, "worker:0") == [
        *("started", "died", "restarted", "died", "restarted", "died", "given up")
    ]
    with pytest.raises(TaskError) as caught:
        cluster.check()
    assert caught.value.task == "worker:0"
    message = str(caught.value)
    assert message.startswith("worker:0 has ended (exit code 1) after 2 restarts. Its last lines:")
    assert message.endswith("RuntimeError: no such luck")
    assert what(cluster, "ps:0") == ["started"]
    cluster.close()
    visible = capfd.readouterr().err
    assert visible.count("[worker:0] RuntimeError: no such luck\n") == 3
    assert "[worker:0] has ended again (exit code 1), and is given up\n" in visible


def test_a_server_is_not_started_again_where_that_is_not_wanted(make):
    then = "if settings.task.job == 'ps': raise SystemExit(3)"
    cluster = make(1, 1, then=then, restart_servers=False)
    wait_until(lambda: "died" in what(cluster, "ps:0"))
    with pytest.raises(TaskError, match=r"ps:0 has ended \(exit code 3\). Its last lines:"):
        cluster.check()


@pytest.mark.full
def test_a_task_that_was_told_to_stop_is_there_for_the_next_chief(make, tmp_path):
    stops = "if settings.generation == 0: raise SystemExit(0)"
    cluster = make(1, 1, then=stops, evaluator=["-c", "pass"])
    wait_for(tmp_path, "worker.0.1", "ps.0.1")
    for task in ("worker:0", "ps:0"):
        assert what(cluster, task) == ["started", "ended", "restarted"]
    assert what(cluster, "evaluator:0") == ["started", "ended"]
    cluster.check()


@pytest.mark.full
def test_workers_come_and_go(make, tmp_path):
    cluster = make(1, 1)
    assert str(cluster.add_worker()) == "worker:1"
    pids = wait_for(tmp_path, "worker.0.0", "worker.1.0")
    assert cluster.spec.task_indices("worker") == [0, 1]
    assert str(cluster.remove_worker()) == "worker:1"
    assert not is_there(pids["worker.1.0"])
    assert what(cluster, "worker:1") == ["started", "stopped"]
    with pytest.raises(ClusterError, match="no worker:1 is kept running here"):
        cluster.pid("worker:1")
    assert str(cluster.add_worker()) == "worker:2"  # a new worker, not one that returns
    wait_for(tmp_path, "worker.2.0")
    cluster.remove_worker("worker:0")
    assert cluster.spec.task_indices("worker") == [2]
    with pytest.raises(ClusterError, match="at least one worker"):
        cluster.remove_worker()
    with pytest.raises(ClusterError, match="ps:0 cannot be removed"):
        cluster.remove_worker("ps:0")


@pytest.mark.full
def test_a_task_can_be_started_anew(make, tmp_path):
    cluster = make(1, 1)
    old = wait_for(tmp_path, "ps.0.0")["ps.0.0"]
    cluster.restart("ps:0")
    new = wait_for(tmp_path, "ps.0.1")["ps.0.1"]
    assert cluster.pid("ps:0") == new
    assert not is_there(old)
    assert what(cluster, "ps:0") == ["started", "restarted"]


def test_numbers_that_make_no_cluster_are_all_named():
    wrong = {
        "workers": 0,
        "ps": 1.5,
        "max_restarts": -1,
        "snapshot_every": 0,
        "heartbeat_s": 0.0,
        "evaluator": True,
    }
    with pytest.raises(ClusterError) as caught:
        LocalCluster(**wrong)  # type: ignore[arg-type]
    for name, value in wrong.items():
        assert f"{name}={value!r}" in str(caught.value)


def test_logs_come_with_the_tasks_name_or_not_at_all(make, tmp_path, capfd):
    told = (
        "print('from', settings.task, flush=True); os.write(2, b'and stderr\\n');"
        "report.with_suffix('.said').symlink_to(report)"
    )
    for logs in (True, False):
        cluster = make(1, 1, then=told, logs=logs)
        wait_for(tmp_path, "worker.0.said", "ps.0.said")
        cluster.close()
        visible = capfd.readouterr().err.splitlines()
        assert sorted(visible) == (
            ["[ps:0] and stderr", "[ps:0] from ps:0"]
            + ["[worker:0] and stderr", "[worker:0] from worker:0"]
            if logs
            else []
        )
        for report in tmp_path.iterdir():
            report.unlink()
