"""``meshwright launch``: a program as the chief of a cluster of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from watching import all_gone, within

from meshwright import ClusterError
from meshwright.launch.script import run_launched

pytestmark = pytest.mark.alone

PROGRAM = """
    import os, subprocess, sys, time
    from meshwright.ps.task import run_task
    resolver = run_task()
    print(resolver.task(), resolver.cluster_spec().num_tasks("worker"), sys.argv[1:], flush=True)
    {then}
"""


@pytest.fixture
def program(tmp_path: Path):
    def write(then: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(PROGRAM).replace("{then}", then))
        return str(path)

    return write


def launched(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli", "launch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its processes are found, and it gets its own Ctrl-C
    )


def children_of(pid: int) -> set[int]:
    """Numbers of the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(number) for task in tasks for number in task.read_text().split()}


def test_the_program_gets_its_arguments_and_gives_its_exit_code(program):
    script = program("sys.exit(7)")
    process = launched("--workers", "1", "--ps", "1", script, "--epochs", "3", "--workers", "9")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    assert out == "chief:0 1 ['--epochs', '3', '--workers', '9']\n"


def test_a_program_that_is_not_there_and_numbers_that_are_wrong_are_refused(program):
    with pytest.raises(ClusterError, match=r"no program 'nowhere.py'"):
        run_launched(["nowhere.py"])
    with pytest.raises(ClusterError, match="unknown option '--proceses'"):
        run_launched(["--proceses", "2", program("")])
    with pytest.raises(ClusterError, match="workers=0"):
        run_launched([program("")], workers=0)


@pytest.mark.full
def test_the_program_may_be_the_evaluator_as_well(program):
    script = program("time.sleep(0 if resolver.task().job == 'evaluator' else 5)")
    process = launched("--workers", "1", "--ps", "1", "--evaluator", script, "7")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "chief:0 1 ['7']\n"
    assert "[evaluator:0] evaluator:0 1 ['7']\n" in err


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_however_it_ends_nothing_is_left(program, number, code):
    process = launched("--workers", "1", "--ps", "1", program("time.sleep(100)"))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("chief:0")
    pids = children_of(process.pid)
    assert len(pids) == 3
    if number == signal.SIGINT:  # as from a terminal: to the program and to the launcher
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert within(10.0, all_gone(pids))
    assert err.count("Traceback") == (1 if number == signal.SIGINT else 0), err


@pytest.mark.full
def test_a_program_that_is_killed_takes_its_cluster_along(program):
    process = launched("--workers", "1", "--ps", "1", program("os.kill(os.getpid(), 9)"))
    process.communicate(timeout=60)
    assert process.returncode == 137
