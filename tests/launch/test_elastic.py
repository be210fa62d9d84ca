"""Groups that are made anew: after a death, for other numbers of processes, after SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from ports import free_address
from rows_once import EPOCHS, ROWS
from watching import within, write_fake_ssh

import meshwright as mw
from meshwright import ClusterError, Mesh, MeshError
from meshwright.cli import main
from meshwright.launch.discovery import Discovery
from meshwright.launch.elastic import MOST, Elastic
from meshwright.launch.failure import Failure
from meshwright.launch.group import run_group
from meshwright.launch.group_options import GroupOptions
from meshwright.launch.progress import Progress
from meshwright.launch.stalls import Seen
from meshwright.launch.stragglers import Stragglers

PROGRAM = str(Path(__file__).parent / "rows_once.py")
STALL_S = 2.0

# One process has the tests that compare with the run that nothing disturbed.
_SHARED_RUN = pytest.mark.xdist_group("undisturbed")


def run(
    folder: Path,
    plan: dict[str, Any],
    processes: int = 2,
    program: str = "rows_once.py",
    **options: Any,
) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    arguments = [str(Path(__file__).with_name(program)), str(folder)]
    return run_group(arguments, GroupOptions(processes, 1, stall_s=STALL_S, **options))


def result(folder: Path) -> np.ndarray:
    """The weights at the end of a run, in which every row was trained on once in every epoch."""
    output = json.loads((folder / "result.json").read_text())
    assert output["visits"] == [EPOCHS] * ROWS
    return np.array(output["weights"], "f")


def starts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, {}) == 0
    return result(folder)


@pytest.mark.alone
@pytest.mark.full
@_SHARED_RUN
@pytest.mark.parametrize("fault", ["kill", "save"])  # it resumes from memory, or from disk
def test_on_the_same_mesh_a_run_that_failed_ends_as_one_that_did_not(
    undisturbed, tmp_path, capfd, monkeypatch, fault
):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # that of all tests
    killed = {"0@25": {"signal": signal.SIGKILL, "rank": 0, "ahead": 2}}
    plan = {"dies_saving_in": "0"} if fault == "save" else killed
    if fault == "kill":
        monkeypatch.setenv("PEER_COPIES", "1")
        monkeypatch.setenv("SAVE_EVERY", "60")
    assert run(tmp_path, plan, max_restarts=1) == 0
    np.testing.assert_array_equal(result(tmp_path), undisturbed)
    err = capfd.readouterr().err
    assert "The group is started again from the checkpoint of step " in err
    first, again = starts(tmp_path)
    assert (first["from"], again["processes"]) == (-1, 2)
    if fault == "save":
        assert again["from"] == 14  # the checkpoint of step 21 was never complete
    else:
        assert 25 - 3 <= again["from"] <= 25  # batches are read ahead of the steps
        assert first["imported"] > 50
        assert again["imported"] == 0  # it was started ahead
    assert all(info.step for info in mw.Checkpoints(tmp_path / "saved").all)
    assert first["compiled"] > 0
    assert again["compiled"] == 0
    failed_at = float((tmp_path / "failed_at").read_text())
    print(f"{fault}: {again['at'] - failed_at:.2f} s from the failure to the next step")
    assert again["at"] - failed_at < 30  # on a host that does much else


@pytest.mark.alone
@pytest.mark.full
def test_fit_goes_on_from_memory_where_the_disk_has_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("PEER_COPIES", "1")
    monkeypatch.setenv("SAVE_EVERY", "1000")
    monkeypatch.setenv("EPOCHS", "6")
    plan = {"0@27": {"signal": signal.SIGKILL}}
    assert run(tmp_path, plan, max_restarts=1, program="fit_rows_once.py") == 0
    _, again = starts(tmp_path)
    assert again["from"] == -1  # nothing was on disk
    assert 26 <= again["step"] - 1 <= 27
    visits = json.loads((tmp_path / "result.json").read_text())["visits"]
    assert visits == [6] * 192


_DIES_BEFORE_IT_LOOKS = """
import os, signal
generation = int(os.environ["MESHWRIGHT_GENERATION"])
if generation == 0:
    import meshwright.launch.progress as progress
    progress.saved(7)
if generation < 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.alone
def test_a_group_that_dies_before_it_reads_its_checkpoint_still_has_one(tmp_path, capfd):
    (tmp_path / "dies.py").write_text(_DIES_BEFORE_IT_LOOKS)
    options = GroupOptions(1, 1, max_restarts=2, agree=False, standby=False)
    assert run_group([str(tmp_path / "dies.py")], options) == 0
    assert capfd.readouterr().err.count("again from the checkpoint of step 7.") == 2


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A host discovery script, and the file with its answer."""
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\necho localhost:$(cat {tmp_path}/places)\n")
    script.chmod(0o755)
    (tmp_path / "places").write_text("2")
    return script


@pytest.mark.alone
@pytest.mark.full
@_SHARED_RUN
def test_rows_are_used_once_while_places_come_and_go(
    undisturbed, places, tmp_path, capfd, monkeypatch
):
    # As in transformers#40245 and horovod#3143, where rows were lost or read twice.
    monkeypatch.setenv("INPUT_S", "0.02")
    plan = {
        "0@30": {"places": 1, "rank": 0},
        "1@130": {"places": 3, "rank": 0},
        "2@205": {"signal": signal.SIGSTOP},
    }
    assert run(tmp_path, plan, 3, least_processes=1, discovery=places) == 0
    np.testing.assert_allclose(result(tmp_path), undisturbed, atol=2e-6, rtol=0)
    assert [start["processes"] for start in starts(tmp_path)] == [2, 1, 3, 3]
    err = capfd.readouterr().err
    assert err.count("The number of processes changes: the group is started again") == 2


@pytest.fixture
def terminal():
    """Whose end reaches this process: under nohup, SIGHUP is ignored, and groups respect that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.alone
@pytest.mark.full
@pytest.mark.usefixtures("terminal")
def test_a_closed_terminal_saves_and_the_same_command_goes_on_with_another_number(
    tmp_path, monkeypatch
):
    # Of 8 steps an epoch, of which each process reads its own rows: it is left in their midst, or,
    # where the save takes long, at one of their ends.
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    monkeypatch.setenv("SHARD", "1")
    monkeypatch.setenv("EPOCHS", "9")
    program = "fit_rows_once.py"
    plan = {"0@27": {"launcher": signal.SIGHUP, "rank": 0}}
    assert run(tmp_path, plan, max_restarts=3, program=program) == 75
    assert run(tmp_path, {}, 3, program=program) == 0
    visits = json.loads((tmp_path / "result.json").read_text())["visits"]
    assert visits == [9] * 192
    _, again = starts(tmp_path)
    assert again["from"] >= 27  # nothing was lost


@pytest.mark.alone
@pytest.mark.full
@_SHARED_RUN
def test_a_host_that_comes_is_taken_in_and_those_that_leave_or_are_lost_are_not_missed(
    undisturbed, tmp_path, monkeypatch
):
    monkeypatch.setenv("INPUT_S", "0.05")
    monkeypatch.setenv("PEER_COPIES", "1")
    monkeypatch.setenv("SAVE_EVERY", "1000")
    monkeypatch.setenv("SPLIT", "1")
    (tmp_path / "plan.json").write_text("{}")
    meeting = ["--nodes", "1:2", "--rendezvous", free_address()]
    options = ["--processes", "1", "--devices", "1", *meeting]
    options += ["--stall-timeout", "2"]
    command = [sys.executable, "-m", "meshwright.cli", "launch", *options, PROGRAM, str(tmp_path)]
    hosts: list[subprocess.Popen[bytes]] = []

    def host(after_starts: int) -> subprocess.Popen[bytes]:
        _wait_for_starts(tmp_path, after_starts)
        with (tmp_path / f"stderr{len(hosts)}").open("w") as stderr:
            hosts.append(subprocess.Popen(command, stderr=stderr))
        return hosts[-1]

    try:
        first, second = host(0), host(1)
        third = host(2)  # spare, until the second one leaves
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 75
        _wait_for_starts(tmp_path, 3)
        time.sleep(0.5)
        third.kill()  # and with it the memory of its host; half of the counts lay there
        assert first.wait(60) == 0, (tmp_path / "stderr0").read_text()
    finally:
        for process in hosts:
            process.kill()
            process.wait()
    np.testing.assert_allclose(result(tmp_path), undisturbed, atol=2e-6, rtol=0)
    assert [start["processes"] for start in starts(tmp_path)] == [1, 2, 2, 1]
    *_, before, after = starts(tmp_path)
    assert after["from"] > before["from"]  # which was written to disk, and nothing since


@pytest.mark.alone
@pytest.mark.full
@_SHARED_RUN
def test_the_first_host_is_replaced_by_hosts_that_are_listed_later(
    undisturbed, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(write_fake_ssh(tmp_path)), prepend=os.pathsep)
    monkeypatch.setenv("INPUT_S", "0.03")
    (tmp_path / "plan.json").write_text("{}")
    listed, script = tmp_path / "listed", tmp_path / "hosts.sh"
    listed.write_text("127.0.0.1\n127.0.0.2\n")
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    options = ["--processes", "1", "--devices", "1", "--nodes", "1:2", "--stall-timeout", "2"]
    options += ["--host-discovery-script", str(script)]
    command = [sys.executable, "-m", "meshwright.cli", "launch", *options, PROGRAM, str(tmp_path)]
    with (tmp_path / "stderr").open("w") as stderr:
        launcher = subprocess.Popen(command, stderr=stderr)
    try:
        _wait_for_starts(tmp_path, 1)
        listed.write_text("127.0.0.1\n127.0.0.2\nlocalhost\n")
        assert within(20.0, (tmp_path / "pid-localhost").exists)  # its launcher is spare
        os.kill(int((tmp_path / "pid-127.0.0.1").read_text()), signal.SIGKILL)
        assert launcher.wait(90) == 0, (tmp_path / "stderr").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    np.testing.assert_allclose(result(tmp_path), undisturbed, atol=2e-6, rtol=0)
    first, *others = starts(tmp_path)
    assert first["processes"] == 2
    assert others  # with one host, or with both that are left, as they come
    assert "host '127.0.0.1' is lost" in (tmp_path / "stderr").read_text()


def _wait_for_starts(folder: Path, count: int) -> None:
    until_s = time.monotonic() + 60
    while len(_lines(folder / "starts")) < count:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# The rules, without processes


def failure(code: int = 137, step: int = 9) -> Failure:
    return Failure(1, 3, "n01", 17, "step", step, "was killed by signal 9", exit_code=code)


def test_restarts_count_until_a_newer_checkpoint():
    rule = Elastic(least=2, most=2, max_restarts=2)
    assert rule.why_not_again(failure(), saved=5) is None
    assert rule.why_not_again(failure(), saved=5) is None
    assert rule.why_not_again(failure(), saved=6) is None  # it has got further
    assert rule.why_not_again(failure(), saved=6) is None
    assert "after 2 restarts without a newer checkpoint" in (
        rule.why_not_again(failure(), saved=6) or ""
    )
    assert Elastic(1, 2, max_restarts=0).why_not_again(failure(), saved=9) == ""


def test_a_program_that_fails_before_its_first_step_is_not_started_again():
    rule = Elastic(2, 2, max_restarts=5)
    why = rule.why_not_again(failure(1, step=0), saved=-1) or ""
    assert "before any step was counted" in why
    assert "mw.begin_step()" in why
    loop = replace(failure(1, step=0), uncounted_s=61.0)  # which counts no steps
    assert Elastic(2, 2, max_restarts=5).why_not_again(loop, saved=-1) is None
    assert Elastic(2, 2, max_restarts=5).why_not_again(failure(137, step=0), saved=-1) is None
    lost = replace(failure(1, step=0), pid=0)  # a host that is out of reach
    assert Elastic(2, 2, max_restarts=5).why_not_again(lost, saved=-1) is None


def test_a_place_that_fails_twice_is_set_aside_until_the_run_gets_further():
    rule = Elastic(least=1, most=3, max_restarts=9)
    for _ in range(2):
        rule.why_not_again(failure(), saved=5, place=1)
    assert rule.places() == [0, 2]
    for _ in range(2):
        rule.why_not_again(failure(), saved=5, place=0)
    assert rule.places() == [2]
    for _ in range(2):
        rule.why_not_again(failure(), saved=5, place=2)
    assert rule.places() == [2]  # the least number is kept
    assert rule.places(present=2) == [0]  # and where that place is gone, another comes back
    rule.why_not_again(failure(), saved=6, place=2)
    assert rule.places() == [0, 1, 2]
    assert rule.places(present=2) == [0, 1]


def test_numbers_that_contradict_each_other_are_refused(tmp_path):
    with pytest.raises(ClusterError, match=r"least number of processes must be from 1 to 2.* 3"):
        GroupOptions(2, least_processes=3)
    with pytest.raises(ClusterError, match="the number of nodes may change"):
        GroupOptions(2, nodes=2, rendezvous="a:1", least_processes=1)
    with pytest.raises(ClusterError, match="needs --processes MIN:MAX"):
        GroupOptions(2, discovery=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--processes", "4"], {"processes": 4, "least_processes": None, "restarts": 0}),
        (["--processes", "2:8"], {"processes": 8, "least_processes": 2, "restarts": 10}),
        (["--processes", "4", "--max-restarts", "3"], {"processes": 4, "restarts": 3}),
        (
            ["--processes", "4", "--nodes", "2:5", "--rendezvous", "n01:7777"],
            {"nodes": 5, "least_nodes": 2, "restarts": 10},
        ),
    ],
)
def test_two_numbers_on_the_command_line_make_a_group_elastic(monkeypatch, arguments, expected):
    actual = list[GroupOptions]()

    def run(_: Any, options: GroupOptions) -> int:
        actual.append(options)
        return 0

    monkeypatch.setattr("meshwright.launch.group.run_group", run)
    assert CliRunner().invoke(main, ["launch", *arguments, "train.py"]).exit_code == 0
    assert {name: getattr(actual[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--processes", "8:2"], "expected a number, at least 1, or two such as 2:8"),
        (["--processes", "0"], "expected a number, at least 1"),
        (["--processes", "2:8", "--hosts", "a,b"], "with --hosts the number of hosts may change"),
    ],
)
def test_numbers_that_make_no_range_are_refused(arguments, says):
    result = CliRunner().invoke(main, ["launch", *arguments, "train.py"])
    assert result.exit_code == 2
    assert says in result.output


def test_a_discovery_script_is_asked_again_and_its_faults_are_named(places, tmp_path):
    assert Discovery(places).places == 2
    (tmp_path / "places").write_text("x")
    with pytest.raises(ClusterError, match=r"hosts\.sh'.*expected lines such as n01:4; .*:x'"):
        Discovery(places)
    places.write_text("#!/bin/sh\necho n07:4\n")
    with pytest.raises(ClusterError, match="n07: a host discovery script may name this host only"):
        Discovery(places)
    places.write_text("#!/bin/sh\necho no cluster >&2; exit 3\n")
    with pytest.raises(ClusterError, match="ended with 3: no cluster"):
        Discovery(places)


@pytest.mark.parametrize(
    ("devices", "axis", "expected"),
    [(6, None, {"batch": 3, "model": 2}), (4, "model", {"batch": 4, "model": 1})],
)
def test_one_axis_of_a_mesh_takes_another_number_of_devices(devices, axis, expected):
    mesh = Mesh({"batch": 4, "model": 2}).resized(devices, axis)
    assert dict(mesh.axes) == expected


def test_a_mesh_for_all_processes_shrinks_while_some_are_missing(monkeypatch):
    axes = {"batch": 2 * jax.device_count() // 2, "model": 2}
    with pytest.raises(MeshError, match="makes"):
        mw.create_mesh(axes)
    monkeypatch.setenv(MOST, "2")  # and this one is there
    with pytest.warns(mw.MeshwrightWarning, match=r"the mesh \(batch=.*\) becomes \(batch="):
        mesh = mw.create_mesh(axes)
    assert dict(mesh.axes) == {"batch": jax.device_count() // 2, "model": 2}
    with pytest.raises(MeshError, match="makes"):
        mw.create_mesh({"batch": 3, "model": 2})  # for neither number


def test_a_mesh_whose_other_axes_do_not_divide_is_not_resized():
    with pytest.raises(MeshError, match=r"cannot be made for 5 devices.*model=2 needs a multiple"):
        Mesh({"batch": 4, "model": 2}).resized(5)


def test_only_a_rank_that_the_others_wait_for_is_slow():
    def named(*sections: tuple[str, str]) -> list[int]:
        watch, result = Stragglers(window_s=10.0), []
        for at in range(200):
            now = sections[at % len(sections)]
            ranks = [Seen(r, Progress(section, at)) for r, section in enumerate(now)]
            result.append(watch.look(ranks, at * 0.1))
        return [straggler.rank for straggler in result if straggler]

    assert named(("step", "input")) == [1]  # once
    assert named(("step", "input"), ("input", "step")) == []
    assert named(("input", "input")) == []
    assert named(("step", "compile")) == []
    assert named(("step", "step")) == []
