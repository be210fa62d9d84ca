"""Tasks that somebody else starts: they outlive their coordinator, and a cut connection."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.export
import keras
import numpy as np
import pytest
from clusters import HEARTBEAT_S, WAIT_S, Relay, task_process, wait_for_workers
from ports import free_ports

from meshwright.launch.own_keys import keys_of_this_user
from meshwright.launch.spec import ClusterSpec
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.wire.listener import Listener
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.sockets import SocketChannel

pytestmark = pytest.mark.alone


def spec_of(chief: int, servers: list[int], workers: int) -> ClusterSpec:
    jobs = {
        "chief": [f"127.0.0.1:{chief}"],
        "ps": [f"127.0.0.1:{port}" for port in servers],
        # No task connects to a worker: its address says only that it is there.
        "worker": [f"127.0.0.1:{20_000 + index}" for index in range(workers)],
    }
    return ClusterSpec(jobs)


@contextlib.contextmanager
def coordinated(spec: ClusterSpec) -> Iterator[tuple[ParameterServer, ClusterCoordinator]]:
    with ParameterServer(spec, heartbeat_s=HEARTBEAT_S, dead_after_s=1.0) as strategy:
        yield strategy, ClusterCoordinator(strategy)


@pytest.mark.full
def test_a_worker_whose_connections_are_cut_loses_nothing_and_comes_back():
    chief, server = free_ports(2)
    relays = [Relay(chief), Relay(server)]
    spec = spec_of(chief, [server], 2)
    seen_by_one = spec_of(relays[0].port, [relays[1].port], 2)
    with (
        task_process(spec, "ps:0"),
        task_process(spec, "worker:0"),
        task_process(seen_by_one, "worker:1"),
        coordinated(spec) as (strategy, coordinator),
    ):
        total = strategy.variable(0, dtype="int64")
        numbers = iter(range(10**6))

        def step(numbers):
            time.sleep(0.002)
            total.assign_add(next(numbers))

        wait_for_workers(coordinator, 2)
        for _ in range(400):
            coordinator.schedule(step, args=(numbers,))
        time.sleep(0.2)
        for relay in relays:
            relay.cut()
        coordinator.join(WAIT_S)
        assert total.read() == 400 * 399 // 2
        wait_for_workers(coordinator, 1)
        for relay in relays:
            relay.mend()
        wait_for_workers(coordinator, 2)
        for _ in range(400):
            coordinator.schedule(step, args=(numbers,))
        for relay in relays:  # for so short a time that no worker is declared dead for it
            time.sleep(0.1)
            relay.cut()
            relay.mend()
        coordinator.join(WAIT_S)
        assert total.read() == 800 * 799 // 2
        for relay in relays:
            relay.close()


def next_joining(listener: Listener) -> tuple[bytes, Message]:
    """The next worker that joins, with what it said."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        for peer, message in listener.poll(0.1):
            if message.kind == "join":
                return peer, message
    raise AssertionError("no worker has joined")


def test_a_worker_that_hears_of_its_fence_from_a_server_first_joins_again():
    chief, server = free_ports(2)
    relay = Relay(server)
    spec = spec_of(chief, [relay.port], 1)
    with (
        Listener(f"tcp://127.0.0.1:{chief}", keys_of_this_user()) as listener,
        task_process(spec_of(chief, [server], 1), "ps:0"),
        task_process(spec, "worker:0") as worker,
        SocketChannel(
            f"tcp://127.0.0.1:{server}", keys_of_this_user(), "ps:0", timeout_s=WAIT_S
        ) as channel,
    ):
        peer, joining = next_joining(listener)
        welcome = Message("welcome", {"session": "a"})
        listener.answer(peer, welcome, joining.head["id"])
        channel.ask(Message("fence", {"incarnation": joining.head["incarnation"]}))
        relay.cut()
        relay.mend()
        # Outside of any step: the coordinator tells of a round that is broken.
        calls = {"done_below": 0, "calls": [], "broken": [[0, 1]]}
        listener.answer(peer, Message("calls", calls))
        _, again = next_joining(listener)
        assert again.head["task"] == "worker:0"
        assert again.head["incarnation"] != joining.head["incarnation"]
        assert worker.poll() is None
    relay.close()


FIRST_CHIEF = """
import os, signal, sys, time
from meshwright.launch.spec import ClusterSpec
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.strategy import ParameterServer

strategy = ParameterServer(ClusterSpec.from_json(sys.argv[1]), heartbeat_s=0.2, dead_after_s=1.0)
coordinator = ClusterCoordinator(strategy)
total = strategy.variable(0, dtype="int64", name="total")

def slow():
    total.assign_add(1)
    time.sleep(0.05)

for _ in range(10_000):
    coordinator.schedule(slow)
while total.read() < 10:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_coordinator_takes_over_the_tasks_and_old_steps_change_nothing(tmp_path: Path):
    chief, *servers = free_ports(3)
    spec = spec_of(chief, servers, 2)
    script = tmp_path / "chief.py"
    script.write_text(FIRST_CHIEF)
    with (
        task_process(spec, "ps:0"),
        task_process(spec, "ps:1"),
        task_process(spec, "worker:0"),
        task_process(spec, "worker:1"),
    ):
        first = subprocess.run([sys.executable, script, spec.to_json()], timeout=60, check=False)
        assert first.returncode == -9
        with coordinated(spec) as (strategy, coordinator):
            total = strategy.variable(0, dtype="int64", name="total")
            assert total.read() >= 10  # the servers have kept it
            total.assign(1000)

            def step():
                total.assign_add(1)

            for _ in range(50):
                coordinator.schedule(step)
            coordinator.join(WAIT_S)
            time.sleep(0.5)  # for anything late of the first one
            assert total.read() == 1050
            assert set(coordinator.stats()["workers"]) <= {"worker:0", "worker:1"}


def test_steps_are_exported_for_the_devices_of_the_workers_and_not_of_the_chief(monkeypatch):
    chief, server = free_ports(2)
    spec = spec_of(chief, [server], 1)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones([8, 4], "float32")
    with (
        task_process(spec, "ps:0"),
        task_process(spec, "worker:0"),
        coordinated(spec) as (strategy, _),
    ):
        monkeypatch.setattr(jax.export, "default_export_platform", lambda: "tpu")  # the chief's
        assert len(strategy.fit(model, x, x[:, :1], batch_size=4, verbose=0).history["loss"]) == 1
