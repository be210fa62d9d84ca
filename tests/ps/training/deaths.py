"""Processes that die in the middle of a fit, and what the coordinator saw of it."""

from __future__ import annotations

import signal
import time

import keras

from meshwright.launch.local import LocalCluster
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.strategy import ParameterServer


class Kill(keras.callbacks.Callback):
    """Sends a signal to a process when an epoch begins: while steps are left, at any speed."""

    def __init__(self, cluster: LocalCluster, process: str, how: signal.Signals, *epochs: int):
        super().__init__()
        self._cluster, self._process, self._how, self._epochs = cluster, process, how, epochs

    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        if epoch in self._epochs:
            self._cluster.kill(self._process, self._how)


def workers_lost(strategy: ParameterServer) -> int:
    """How many workers were lost, once the coordinator has seen it."""
    coordinator = ClusterCoordinator(strategy)
    limit = time.monotonic() + 20.0
    while not (lost := coordinator.stats()["workers_lost"]) and time.monotonic() < limit:
        time.sleep(0.05)
    return lost
