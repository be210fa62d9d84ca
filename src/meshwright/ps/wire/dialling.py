"""The socket by which a task speaks to one other, and what becomes of its connection."""

from __future__ import annotations

from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from .listener import HEARTBEAT_S, QUEUED_MESSAGES, SILENT_S
from .securing import Keys, secure_client
from .transfer import has_message

BEGUN, LOST, REFUSED, CLOSED = "begun", "lost", "refused", "closed"
_EVENTS = {
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): BEGUN,
    int(zmq.EVENT_DISCONNECTED): LOST,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): REFUSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): CLOSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): CLOSED,
}


class Dialled:
    """A DEALER that ZeroMQ connects, and connects again, to one address.

    Raises ``zmq.ZMQError`` for an invalid address.
    """

    def __init__(self, address: str, identity: str | bytes | None, keys: Keys | None) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _settle(self.socket)
        if identity is not None:
            self.socket.routing_id = identity.encode() if isinstance(identity, str) else identity
        if keys is not None:
            secure_client(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(sum(_EVENTS))
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close(0)
            raise

    def events(self) -> Iterator[str]:
        """What has become of the connection since this was last asked."""
        while has_message(self.monitor):
            yield _EVENTS[int(recv_monitor_message(self.monitor)["event"])]

    def close(self, linger_s: float) -> None:
        """Let go of both sockets; what has been sent last has so long to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger=round(linger_s * 1000))


def _settle(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = QUEUED_MESSAGES
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000
    socket.connect_timeout = 5000
    socket.heartbeat_ivl = round(HEARTBEAT_S * 1000)
    socket.heartbeat_timeout = round(SILENT_S * 1000)
    socket.ipv6 = True
