"""Which cluster a strategy is for, and channels to its servers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ...errors import ClusterError
from ...launch.addresses import to_connect
from ...launch.joining import keys_from
from ...launch.keys import Keys
from ...launch.spec import ClusterSpec
from ..server.core import ServerCore
from ..wire.memory import MemoryChannel
from ..wire.message import Message
from ..wire.sockets import SocketChannel
from .client import Servers


@runtime_checkable
class Launcher(Protocol):
    """The owner that started the tasks and keeps them running, such as a ``LocalCluster``."""

    def cluster_spec(self) -> ClusterSpec:
        """The present tasks."""
        ...

    def pid(self, task: str) -> int:
        """The id of a task's process. Raises ``ClusterError`` for an unknown task."""
        ...

    def kill(self, task: str, signal: int) -> None:
        """Send a signal to a task's process."""
        ...

    def check(self, job: str | None = None) -> None:
        """Raise ``TaskError`` for tasks that have ended and are not started again."""
        ...


def connect(
    spec: ClusterSpec, keys: Keys | None, role: str, watch: Callable[[], None] | None = None
) -> Servers:
    """Channels to all servers of a cluster; ``watch`` is as for a ``SocketChannel``."""
    incarnation = uuid.uuid4().hex[:16]
    hello = Message("hello", {"role": role, "task": role, "incarnation": incarnation})
    return Servers(
        [
            SocketChannel(
                to_connect(spec.task_address("ps", index)),
                keys,
                f"ps:{index}",
                identity=f"{role}/{incarnation}",
                hello=hello,
                watch=watch,
            )
            for index in spec.task_indices("ps")
        ]
    )


def connect_here(cores: Sequence[ServerCore]) -> Servers:
    """Channels to servers in this process."""
    identity = uuid.uuid4().hex[:16]
    return Servers(
        [MemoryChannel(core, f"ps:{index}", identity=identity) for index, core in enumerate(cores)]
    )


def spec_and_keys(cluster: Any) -> tuple[ClusterSpec | None, Keys | None]:
    """The tasks and keys of whatever a user gives as a cluster; ``None``: this process.

    Raises :class:`~meshwright.errors.ClusterError` for what is none, has no chief, or spans hosts
    and has no keys.
    """
    if cluster is None:
        return None, None
    keys = getattr(cluster, "keys", None)
    if isinstance(cluster, tuple) and len(cluster) == 2:
        cluster, keys = cluster
    spec: Any = cluster
    if hasattr(spec, "cluster_spec"):
        spec = spec.cluster_spec()
    if not isinstance(spec, ClusterSpec):
        raise ClusterError(
            "cluster is a LocalCluster, a ClusterSpec, a pair of a ClusterSpec and Keys, a "
            f"resolver, or None; received {cluster!r}."
        )
    if "chief" not in spec.jobs:
        raise ClusterError(
            "there must be one chief in the cluster, and there is none: workers join it there. "
            "Give it an address, such as {'chief': ['host:8887'], ...}."
        )
    return spec, keys_from(spec) if keys is None else keys


def checked_times(heartbeat_s: float, dead_after_s: float) -> tuple[float, float]:
    """Both, or :class:`~meshwright.errors.ClusterError` where they do not go together."""
    if not 0 < heartbeat_s < dead_after_s:
        raise ClusterError(
            f"heartbeat_s={heartbeat_s!r} and dead_after_s={dead_after_s!r}: a worker must be able "
            "to say that it lives before it is declared dead."
        )
    return heartbeat_s, dead_after_s
