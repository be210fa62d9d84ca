"""Joining a cluster by the environment, as any launcher may start a task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types

import pytest

from meshwright import ClusterError
from meshwright.launch import Task, TaskSettings
from meshwright.ps import task as task_module
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.task import run_task
from meshwright.ps.wire.listener import Listener
from meshwright.testing import run_in_fresh_process

CLUSTER = {"chief": ["ipc:///x/c"], "worker": ["ipc:///x/w0", "ipc:///x/w1"], "ps": ["ipc:///x/p"]}


def told_by(job: str, index: int) -> dict[str, str]:
    return {"MESHWRIGHT_CLUSTER": json.dumps(CLUSTER), "MESHWRIGHT_TASK": f"{job}:{index}"}


@pytest.fixture
def entries(monkeypatch):
    """What servers and workers do is written down here instead; signals stay as they are."""
    done: list[tuple[str, TaskSettings]] = []
    entry = types.ModuleType("meshwright_test_entry")
    entry.serve = lambda settings: done.append(("serve", settings))  # type: ignore[attr-defined]
    entry.work = lambda settings: done.append(("work", settings))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, entry.__name__, entry)
    named = {"ps": (entry.__name__, "serve"), "worker": (entry.__name__, "work")}
    monkeypatch.setattr(task_module, "_ENTRIES", named)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return done, entry


@pytest.mark.parametrize(("job", "index", "does"), [("ps", 0, "serve"), ("worker", 1, "work")])
def test_a_server_serves_and_a_worker_works_and_then_the_process_ends(entries, job, index, does):
    with pytest.raises(SystemExit) as ended:
        run_task(told_by(job, index))
    assert ended.value.code == 0
    ((what, settings),) = entries[0]
    assert what == does
    assert settings.task == Task(job, index)
    assert settings.spec.as_dict() == CLUSTER


@pytest.mark.parametrize("job", ["chief", "evaluator"])
def test_the_chief_and_an_evaluator_go_on_with_their_resolver(entries, job):
    resolver = run_task(told_by(job, 0))
    assert resolver is not None
    assert resolver.task() == Task(job, 0)
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert entries[0] == []


def test_a_server_that_others_start_again_counts_its_starts_itself(entries, tmp_path):
    folder = {"MESHWRIGHT_SNAPSHOTS": str(tmp_path / "new" / "folder")}
    for variables in (
        *[{**told_by("ps", 0), **folder}] * 3,
        {**told_by("ps", 0), **folder, "MESHWRIGHT_GENERATION": "7"},
        {**told_by("worker", 0), **folder},
        told_by("ps", 0),
    ):
        with pytest.raises(SystemExit):
            run_task(variables)
    assert [settings.generation for _, settings in entries[0]] == [0, 1, 2, 7, 0, 0]


def test_a_folder_in_which_starts_cannot_be_counted_is_named(entries, tmp_path):
    (tmp_path / "ps0.starts").write_text("many")
    with pytest.raises(ClusterError, match=r"starts of ps:0 cannot be counted in .*ps0.starts"):
        run_task({**told_by("ps", 0), "MESHWRIGHT_SNAPSHOTS": str(tmp_path)})


def test_what_a_task_cannot_do_is_told_with_its_name(entries):
    def listen(settings: TaskSettings) -> None:
        Listener("ipc:///no/such/folder/x", task=str(settings.task)).close()

    entries[1].serve = listen
    with pytest.raises(ClusterError, match=r"^ps:0 cannot listen at ipc:///no/such/folder/x: "):
        run_task(told_by("ps", 0))


def test_where_nothing_tells_of_a_cluster_everything_is_in_this_process():
    nowhere = run_task({"HOME": "/"})
    with ParameterServer(nowhere) as strategy:
        assert strategy.num_servers == strategy.num_workers == 1
    with (
        pytest.raises(ClusterError, match=r"with mw\.ParameterServer\(mw\.run_task\(\)\) as"),
        nowhere,
    ):
        pass


def test_half_of_what_is_needed_is_an_error():
    with pytest.raises(ClusterError, match="Looked for: MESHWRIGHT_CLUSTER"):
        run_task({"MESHWRIGHT_TASK": "worker:0"})
    with pytest.raises(ClusterError, match="worker:2 is not in the cluster"):
        run_task(told_by("worker", 2))


def test_an_interrupt_ends_a_task_without_a_word(entries):
    def interrupted(_settings: TaskSettings) -> None:
        raise KeyboardInterrupt

    entries[1].serve = interrupted
    with pytest.raises(SystemExit) as ended:
        run_task(told_by("ps", 0))
    assert ended.value.code == 130


@pytest.mark.alone
def test_a_task_says_what_is_wrong_in_one_message():
    wrong = {**os.environ, **told_by("worker", 2)}
    result = subprocess.run(
        [sys.executable, "-m", "meshwright.ps.task"],
        env=wrong,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr == (
        "Error: worker:2 is not in the cluster: the indices of its workers are 0, 1.\n"
    )


@pytest.mark.alone
def test_knowing_which_task_it_is_loads_nothing_heavy():
    loaded = run_in_fresh_process(
        f"""
        import sys
        from meshwright.ps.task import run_task
        run_task({told_by("chief", 0)!r})
        print(*sys.modules)
        """
    )
    heavy = {"jax", "keras", "numpy", "zmq", "click", "rich", "scipy"}
    assert not heavy & {name.split(".")[0] for name in loaded.split()}
