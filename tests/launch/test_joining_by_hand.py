"""One program, started once for each task as Slurm, Kubernetes or a person would, over TCP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_ports
from watching import all_gone, within

from meshwright.launch import Keys

pytestmark = [pytest.mark.alone, pytest.mark.full]

PROGRAM = """
    from meshwright.ps.coordinator.coordinator import ClusterCoordinator
    from meshwright.ps.strategy import ParameterServer
    from meshwright.ps.task import run_task

    strategy = ParameterServer(run_task())
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        total = strategy.variable(0.0)

    def step(x):
        total.assign_add(x)

    for x in (1.0, 2.0, 3.0, 4.0, 5.0):
        coordinator.schedule(step, args=(x,))
    coordinator.join(timeout_s=60.0)
    print(float(total.read()))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    script, keys = tmp_path / "train.py", tmp_path / "keys.json"
    script.write_text(textwrap.dedent(PROGRAM))
    Keys.make().save(keys)
    started: list[subprocess.Popen[str]] = []

    def start_one(variables: dict[str, str]) -> subprocess.Popen[str]:
        env = {**os.environ, "MESHWRIGHT_KEYS": str(keys), **variables}
        started.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def consecutive_ports(count: int) -> list[int]:
    while True:
        (first,) = free_ports(1)
        ports = list(range(first, first + count))
        if ports[-1] < 65536 and all(map(is_free, ports)):
            return ports


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


TASKS = [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]


def told_by_tf_config() -> dict[str, dict[str, str]]:
    chief, ps, *workers = (f"localhost:{port}" for port in free_ports(4))
    cluster = {"chief": [chief], "ps": [ps], "worker": workers}
    return {
        f"{job}:{index}": {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        }
        for job, index in TASKS
    }


def told_by_slurm() -> dict[str, dict[str, str]]:
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "MESHWRIGHT_JOBS": "chief=1,ps=1,worker=2",
        "MESHWRIGHT_PORT": str(consecutive_ports(4)[0]),
    }
    return {
        f"{job}:{index}": {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        for rank, (job, index) in enumerate(TASKS)
    }


@pytest.mark.parametrize("tell", [told_by_tf_config, told_by_slurm], ids=["TF_CONFIG", "Slurm"])
def test_every_task_joins_and_the_sum_is_right(start, tell):
    events = tell()
    others = [start(events[task]) for task in ("worker:1", "ps:0", "worker:0")]
    chief = start(events["chief:0"])
    out, err = chief.communicate(timeout=90)
    assert out == "15.0\n", err
    assert chief.returncode == 0
    for process in others:  # they wait for the next chief, or have been told to stop
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert "Traceback" not in err
    assert within(5, all_gone(process.pid for process in others))
