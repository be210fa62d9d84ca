"""Keeps one worker or parameter server running, on a host that Ray or Spark has chosen."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ..topology import virtual_device_variables
from .joining import variables_of
from .keys import Keys
from .logs import LogPump
from .processes import own_module
from .settings import TaskSettings
from .supervision import Restarts
from .supervisor import Supervisor


class TaskKeeper:
    """Starts a task, and again whenever it dies; it ends with this process at the latest."""

    def __init__(self) -> None:
        self._supervisor = Supervisor(LogPump(show=True))

    def start(self, settings: TaskSettings, keys: Keys, devices: int | None) -> None:
        """Start the task; ``devices`` makes virtual CPU devices in a worker."""
        folder = self._supervisor.folder.path
        path = folder / "keys.json"
        keys.save(path)
        snapshots = str(folder / "snapshots")

        def command(generation: int) -> Any:
            this = replace(settings, generation=generation, snapshot_dir=snapshots)
            env = variables_of(this, str(path))
            if devices is not None and settings.task.job == "worker":
                env |= virtual_device_variables(devices, {**os.environ, **env})
            return own_module(["-m", "meshwright.ps.task"], env)

        self._supervisor.start(settings.task, command, Restarts())

    def stop(self) -> None:
        """End the task."""
        self._supervisor.close(2.0)
