"""What a task is told when it starts, and that other hosts cannot join without keys."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright import ClusterError
from meshwright.launch import ClusterSpec, Keys, Task, TaskSettings, settings_from
from meshwright.launch.addresses import to_bind, to_connect
from meshwright.launch.cluster import cluster_of
from meshwright.launch.joining import variables_of

LOCAL = ClusterSpec({"chief": ["ipc:///x/c"], "worker": ["ipc:///x/w"], "ps": ["ipc:///x/p"]})
LOOPBACK = ClusterSpec({"chief": ["localhost:1"], "worker": ["ipc:///x/w"], "ps": ["127.0.0.1:2"]})
REMOTE = ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1", "ipc:///x/p"]})


@pytest.mark.parametrize(
    "settings",
    [
        TaskSettings(Task("ps", 0), LOCAL),
        TaskSettings(Task("worker", 0), LOCAL, None, 0.25, "/x/snapshots", 50, 3, 7.5),
    ],
    ids=["few", "all"],
)
def test_settings_survive_the_environment(settings):
    assert settings_from(variables_of(settings, None)) == settings


def test_what_is_not_told_covers_what_the_parent_was_told():
    parents = {"MESHWRIGHT_SNAPSHOT_EVERY": "5", "MESHWRIGHT_GENERATION": "2"}
    settings = TaskSettings(Task("ps", 0), LOCAL)
    assert settings_from({**parents, **variables_of(settings, None)}) == settings


def test_a_task_gets_its_own_part_of_the_keys(tmp_path):
    keys, path = Keys.make(), tmp_path / "keys.json"
    keys.save(path)
    for job in ("ps", "worker"):
        settings = TaskSettings(Task(job, 0), REMOTE, keys.of(job))
        assert settings_from(variables_of(settings, str(path))) == settings


def test_a_cluster_over_hosts_needs_keys():
    with pytest.raises(ClusterError) as caught:
        settings_from(variables_of(TaskSettings(Task("ps", 0), REMOTE), None))
    message = str(caught.value)
    assert "other hosts can reach chief:0, worker:0, ps:0:" in message
    assert "python -m meshwright.launch.new_keys FILE" in message


def test_tasks_on_loopback_have_the_keys_of_their_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:  # tasks that start at the same time
        variables = variables_of(TaskSettings(Task("ps", 0), LOOPBACK), None)
        tasks = [pool.submit(settings_from, variables) for _ in range(8)]
        keys = {task.result().keys for task in tasks}
    (own,) = keys
    chief = cluster_of(LOOPBACK).keys
    worker = settings_from(variables_of(TaskSettings(Task("worker", 0), LOOPBACK), None)).keys
    assert (own, chief.of("worker")) == (chief, worker)
    (path,) = (tmp_path / ".local" / "state" / "meshwright").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_of_a_user_are_not_kept_where_others_can_write(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (".local/state/meshwright", f"meshwright-keys-{os.getuid()}"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name).chmod(0o777)
    with pytest.raises(ClusterError, match=r"(?s)could be made:.*others can write to it.*new_keys"):
        cluster_of(LOOPBACK)


@pytest.mark.parametrize("cluster", [REMOTE, (REMOTE, None)])
def test_a_strategy_for_other_hosts_needs_keys(cluster):
    with pytest.raises(ClusterError, match="other hosts can reach chief:0, worker:0, ps:0"):
        cluster_of(cluster)


def test_a_cluster_without_a_chief_has_nobody_to_wait_for():
    spec = ClusterSpec({"worker": ["ipc:///x/w"], "ps": ["ipc:///x/p"]})
    with pytest.raises(ClusterError, match="there must be one chief"):
        settings_from(variables_of(TaskSettings(Task("ps", 0), spec), None))


def test_a_task_must_be_told_which_it_is():
    with pytest.raises(ClusterError, match=r"\(chief:0, worker:0, ps:0\), but does not say which"):
        settings_from({"MESHWRIGHT_CLUSTER": LOCAL.to_json()})


def test_all_numbers_that_are_none_are_named():
    variables = variables_of(TaskSettings(Task("ps", 0), LOCAL), None)
    wrong = {"MESHWRIGHT_HEARTBEAT_S": "often", "MESHWRIGHT_GENERATION": "1.5"}
    with pytest.raises(
        ClusterError, match=r"HEARTBEAT_S must be .*'often'[^$]*GENERATION must be .*'1.5'"
    ):
        settings_from({**variables, **wrong})


def test_settings_know_where_their_task_and_its_chief_are():
    settings = TaskSettings(Task("ps", 1), REMOTE)
    assert (settings.address, settings.chief_address) == ("ipc:///x/p", "tcp://a:1")
    with pytest.raises(ClusterError, match="no task 5 in job 'ps'"):
        _ = TaskSettings(Task("ps", 5), REMOTE).address


@pytest.mark.parametrize(
    ("address", "connect", "bind"),
    [
        ("n01:8888", "tcp://n01:8888", "tcp://0.0.0.0:8888"),
        ("10.0.0.1:8888", "tcp://10.0.0.1:8888", "tcp://0.0.0.0:8888"),
        ("tcp://n01:1", "tcp://n01:1", "tcp://0.0.0.0:1"),
        ("localhost:1", "tcp://localhost:1", "tcp://127.0.0.1:1"),
        ("127.0.0.2:1", "tcp://127.0.0.2:1", "tcp://127.0.0.2:1"),
        ("[::1]:1", "tcp://[::1]:1", "tcp://[::1]:1"),
        ("[fe80::1]:1", "tcp://[fe80::1]:1", "tcp://[::]:1"),
        ("ipc:///run/ps0", "ipc:///run/ps0", "ipc:///run/ps0"),
    ],
)
def test_a_task_binds_what_others_can_reach(address, connect, bind):
    assert to_connect(address) == connect
    assert to_bind(address) == bind
