"""Channels to the servers of a cluster."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from ...errors import ClusterError
from ...launch.addresses import to_connect
from ...launch.keys import Keys
from ...launch.spec import ClusterSpec
from ..server.core import ServerCore
from ..wire.memory import MemoryChannel
from ..wire.message import Message
from ..wire.sockets import SocketChannel
from .client import Servers


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


def checked_times(heartbeat_s: float, dead_after_s: float) -> tuple[float, float]:
    """Both, or :class:`~meshwright.errors.ClusterError` where they do not go together."""
    if not 0 < heartbeat_s < dead_after_s:
        raise ClusterError(
            f"heartbeat_s={heartbeat_s!r} and dead_after_s={dead_after_s!r}: a worker must be able "
            "to say that it lives before it is declared dead."
        )
    return heartbeat_s, dead_after_s
