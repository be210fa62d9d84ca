"""The settings that a task starts with, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from .addresses import to_bind, to_connect
from .keys import Keys
from .spec import ClusterSpec, Task


@dataclass(frozen=True)
class TaskSettings:
    """What a server or a worker needs to know of itself and of its cluster.

    ``generation`` counts the restarts of this task. ``orphan_s`` is how long it goes on without
    a chief before it ends; ``None``: it waits for the next chief as long as that takes (a task of
    a local cluster does not, as it ends with the process that started it).

    >>> spec = ClusterSpec({"chief": ["a:1"], "worker": ["a:3"], "ps": ["a:2"]})
    >>> TaskSettings(Task("ps", 0), spec).address
    'tcp://0.0.0.0:2'
    """

    task: Task
    spec: ClusterSpec
    keys: Keys | None = None
    heartbeat_s: float = 1.0
    snapshot_dir: str | None = None  # where a server writes its snapshots, and restores from
    snapshot_every: int | None = None  # applied pushes between two snapshots
    generation: int = 0
    orphan_s: float | None = None

    @property
    def address(self) -> str:
        """The endpoint at which this task listens, as ZeroMQ binds it.

        Raises :class:`~meshwright.errors.ClusterError` if the cluster does not have the task.
        """
        return to_bind(self.spec.address(self.task))

    @property
    def chief_address(self) -> str:
        """The endpoint of the chief, as ZeroMQ connects to it.

        Raises :class:`~meshwright.errors.ClusterError` if the cluster has no chief.
        """
        return to_connect(self.spec.task_address("chief", 0))
