"""A model over two processes answers as over one, bit for bit, and names one that is missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest
from ports import free_port
from serving_group import answers_of, serve

import meshwright as mw
from meshwright.launch.group import run_group
from meshwright.launch.group_options import GroupOptions

PROGRAM = str(Path(__file__).parent / "serving_group.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    dims = {"hidden/kernel": [8, 16], "hidden/bias": [16], "last/kernel": [16, 4], "last/bias": [4]}
    for step in (1, 2):
        params = {name: rng.normal(size=size).astype("float32") for name, size in dims.items()}
        with mw.Checkpoints(tmp_path / "run", keep=None) as checkpoints:
            checkpoints.save(step, mw.TrainState(params, {}, {}, {}))
    run = tmp_path / "run"
    (run / "step_2").rename(run / "later")
    shutil.copytree(run / "later", run / "broken")
    for path in (run / "broken").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:10])
    return tmp_path


@pytest.fixture
def port() -> int:
    return free_port()


# Tensorstore's other reads end after Orbax has closed its loop, where one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.alone
@pytest.mark.full
@pytest.mark.parametrize("by_stages", [False, True], ids=["together", "stages"])
def test_two_processes_answer_as_one(folder: Path, by_stages: bool) -> None:
    run = folder / "run"
    with serve(run, jax.devices()[:4], by_stages) as server:
        one = answers_of(server, run)
    (run / "step_3").rename(run / "later")
    words = [PROGRAM, str(folder), *["stages"] * by_stages]
    assert run_group(words, GroupOptions(2, 2)) == 0
    two = dict(np.load(folder / "answers.npz"))
    assert one.pop("versions") == list(two.pop("versions")) == ["1", "1", "1", "2"]
    for name, values in one.items():
        np.testing.assert_array_equal(two[name], values)
    assert not np.array_equal(one["2"], one["3"])


def asked(port: int) -> tuple[int, str]:
    """The status of a request, 0 where nothing listens, and the body."""
    url, body = f"http://127.0.0.1:{port}/invocations", b'{"inputs": [[1,1,1,1,1,1,1,1]]}'
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def until_answered(port: int, within_s: float) -> str:
    until_s = time.monotonic() + within_s
    while (result := asked(port))[0] != 200:
        assert time.monotonic() < until_s, result
        time.sleep(0.1)
    return result[1]


def refused(port: int, within_s: float) -> str:
    """The reply once the server cannot answer; anything but 200 and 503 fails."""
    until_s = time.monotonic() + within_s
    while (result := asked(port))[0] == 200:
        assert time.monotonic() < until_s
    assert result[0] == 503, result
    return result[1]


def pid_of_rank(rank: int, text: str) -> int:
    """The process of this rank whose command line has this text in it."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_rank = f"MESHWRIGHT_RANK={rank}\0" in (folder / "environ").read_text()
            line = (folder / "cmdline").read_text()
            if is_rank and text in line and "launch" not in line.split("\0"):
                return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.alone
@pytest.mark.full
def test_a_group_that_loses_a_process_answers_again_without_a_deployment(
    folder: Path, port: int
) -> None:
    """A frozen process: 503 within five seconds, and the agents start the group again."""
    run = str(folder / "run")
    words = "-m meshwright launch --processes 2 --devices 2 --max-restarts 9 --stall-timeout 2"
    served = "-m meshwright serve --model serving_group:build --mesh batch=2,model=2 --buckets 4"
    command = [sys.executable, *words.split(), *served.split(), run, "--port", str(port)]
    group = subprocess.Popen(
        command, cwd=Path(PROGRAM).parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        before = until_answered(port, 120)
        os.kill(pid_of_rank(1, run), signal.SIGSTOP)
        assert "rank 1 " in refused(port, within_s=5)
        assert until_answered(port, 120) == before
        os.kill(pid_of_rank(1, run), signal.SIGKILL)
        assert "rank 1 " in refused(port, within_s=5)
        time.sleep(0.2)
        assert asked(port)[0] == 503
    finally:
        group.kill()  # its processes end with it
        group.wait()
