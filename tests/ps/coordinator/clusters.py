"""Clusters of real processes for tests, with limits that a hang cannot pass."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from meshwright.errors import ExhaustedError
from meshwright.launch.joining import cluster_variables
from meshwright.launch.local import LocalCluster
from meshwright.launch.spec import ClusterSpec, Task
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.shared.variables import Variable
from meshwright.ps.strategy import ParameterServer

WAIT_S = 60.0
HEARTBEAT_S = 0.2


@contextlib.contextmanager
def trained_on(
    workers: int = 2,
    ps: int = 2,
    *,
    limit_s: float = 120.0,
    snapshot_every: int | None = 1000,
    dead_after_s: float = 2.0,
    **options,
) -> Iterator[tuple[LocalCluster, ParameterServer, ClusterCoordinator]]:
    """A cluster, a strategy on it, and its coordinator; the process ends if that takes too long."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        with (
            LocalCluster(
                workers,
                ps,
                heartbeat_s=HEARTBEAT_S,
                snapshot_every=snapshot_every,
                max_restarts=10_000,
                logs=False,
            ) as cluster,
            ParameterServer(
                cluster, heartbeat_s=HEARTBEAT_S, dead_after_s=dead_after_s, **options
            ) as strategy,
        ):
            yield cluster, strategy, ClusterCoordinator(strategy)
    finally:
        faulthandler.cancel_dump_traceback_later()


def wait_for_workers(coordinator: ClusterCoordinator, count: int) -> None:
    deadline_s = time.monotonic() + 30
    while len(coordinator.stats()["workers"]) != count:
        assert time.monotonic() < deadline_s, coordinator.report()
        time.sleep(0.02)


class Relay:
    """A TCP port that passes everything on to another one, until it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._pairs: list[socket.socket] = []
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection, and make none."""
        self._is_cut = True
        for end in self._pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let connections be made again."""
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                try:
                    if self._is_cut:
                        raise ConnectionError
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._pairs += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for end in (one, other):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def task_process(spec: ClusterSpec, task: str) -> Iterator[subprocess.Popen]:
    """A task that somebody else starts: its environment is all that it is told."""
    variables = cluster_variables(spec, Task.parse(task), None)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.ps.task"],
        env={**os.environ, **variables, "MESHWRIGHT_HEARTBEAT_S": str(HEARTBEAT_S)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def add_up(coordinator: ClusterCoordinator, total: Variable, numbers: Iterator[float]) -> None:
    """TensorFlow's classic sample: five functions each add the next of 1 to 5 to the total."""

    def step(numbers):
        total.assign_add(next(numbers))

    for _ in range(5):
        coordinator.schedule(step, args=(numbers,))
    coordinator.join(WAIT_S)
    assert total.read() == 15.0


def check_exhausted(coordinator: ClusterCoordinator, numbers: Iterator[float]) -> None:
    """A function that asks for one more element fails, and says so."""

    def take(numbers):
        return next(numbers)

    coordinator.schedule(take, args=(numbers,))
    with pytest.raises(ExhaustedError, match="no more elements"):
        coordinator.join(WAIT_S)
