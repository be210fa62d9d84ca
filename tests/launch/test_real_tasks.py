"""The tasks that a local cluster really starts: servers and workers, over ZeroMQ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.launch import ClusterSpec
from meshwright.launch.addresses import to_bind, to_connect
from meshwright.launch.keys import Keys
from meshwright.launch.local import LocalCluster
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.sockets import Listener, SocketChannel

pytestmark = pytest.mark.alone

PATIENCE_S = 60.0
HELLO = Message("hello", {"role": "chief", "task": "chief:0", "incarnation": "a-test"})


@contextmanager
def channel(cluster: LocalCluster, index: int, keys: Keys | None = None) -> Iterator[SocketChannel]:
    address = to_connect(cluster.spec.task_address("ps", index))
    open_channel = SocketChannel(address, keys or cluster.keys, f"ps:{index}")
    try:
        yield open_channel
    finally:
        open_channel.close()


def wait_until_all_answer(cluster: LocalCluster) -> None:
    """Until each server has answered, and each worker has asked to join."""
    missing = {str(task) for task in cluster.tasks if task.job == "worker"}
    listener = Listener(to_bind(cluster.spec.task_address("chief")), cluster.keys, task="chief:0")
    until = time.monotonic() + PATIENCE_S
    try:
        while missing:
            assert time.monotonic() < until, missing
            for _, message in listener.poll(0.01):
                if message.kind == "join":
                    missing.discard(message.head["task"])
    finally:
        listener.close()
    for index in cluster.spec.task_indices("ps"):
        with channel(cluster, index) as server:
            assert server.ask(HELLO, PATIENCE_S).head["task"] == f"ps:{index}"


@pytest.mark.full
def test_a_cluster_is_there_before_the_libraries_could_be_imported_twice():
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import jax, keras"], check=True, timeout=PATIENCE_S)
    imported_s = time.perf_counter()
    with LocalCluster(2, 2) as cluster:
        wait_until_all_answer(cluster)
        ready_s = time.perf_counter()
        cluster.check()
    assert ready_s - imported_s <= 2 * (imported_s - begun_s)


def test_a_server_loads_neither_jax_nor_keras_and_stays_small():
    with LocalCluster(1, 1) as cluster, channel(cluster, 0) as server:
        server.ask(HELLO, PATIENCE_S)
        process = Path(f"/proc/{cluster.pid('ps:0')}")
        mapped = (process / "maps").read_text()
        assert "zmq" in mapped
        assert "jaxlib" not in mapped
        pages = int((process / "statm").read_text().split()[1])
        assert pages * os.sysconf("SC_PAGE_SIZE") <= 150e6


@pytest.mark.full
def test_a_server_that_was_killed_answers_again_at_its_address():
    with LocalCluster(1, 1) as cluster:
        with channel(cluster, 0) as server:
            assert server.ask(HELLO, PATIENCE_S).head["generation"] == 0
        cluster.kill("ps:0", signal.SIGKILL)
        with channel(cluster, 0) as server:
            assert server.ask(HELLO, PATIENCE_S).head["generation"] == 1


@pytest.mark.full
def test_who_has_other_keys_gets_nothing():
    with LocalCluster(1, 1) as cluster:
        with channel(cluster, 0) as server:
            server.ask(HELLO, PATIENCE_S)
        with (
            channel(cluster, 0, Keys.make()) as stranger,
            pytest.raises(mw.UnreachableError, match="ps:0"),
        ):
            stranger.ask(HELLO, 1.0)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_an_address_that_is_taken_is_named_with_its_task(tmp_path, kind):
    expected = f"ipc://{tmp_path / 'ps'}" if kind == "ipc" else "tcp://127.0.0.1:*"
    taken = Listener(expected, None, task="somebody")
    spec = {"chief": ["ipc:///x/c"], "worker": ["ipc:///x/w"], "ps": [taken.address]}
    variables = {
        "MESHWRIGHT_CLUSTER": ClusterSpec(spec).to_json(),
        "MESHWRIGHT_TASK": "ps:0",
    }
    try:
        result = subprocess.run(
            [sys.executable, "-m", "meshwright.ps.task"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    finally:
        taken.close()
    assert result.returncode == 1
    assert result.stderr.startswith(f"Error: ps:0 cannot listen at {taken.address}: address")
    assert "Traceback" not in result.stderr
