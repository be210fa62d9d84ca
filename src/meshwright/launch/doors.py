"""Who may meet the hosts and processes of a group: those that have its keys."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import ClusterError
from .addresses import is_local
from .joining import KEYS
from .keys import HOW_TO_MAKE, Keys
from .own_keys import keys_of_this_user
from .securing import Doorkeeper, secure_client, secure_server

NO_KEYS = (
    f"no key is needed there, so any program that reaches it may take part. {HOW_TO_MAKE} "
    f"Set {KEYS} to its path on every host."
)
_FAILING_S = 1.0  # of handshakes that all fail: the listener has other keys, or none
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_DONE = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_LINGER_MS = 1000


def group_keys(address: str) -> Keys | None:
    """The keys for an endpoint, or ``host:port``, at which a group meets.

    Those of the file that ``MESHWRIGHT_KEYS`` names, or on loopback those of this user. ``None``
    for a socket in the file system, which has owner and mode, and for other hosts without a file.
    """
    if address.startswith("ipc://"):
        return None
    path = os.environ.get(KEYS)
    if path:
        return Keys.load(path)
    return keys_of_this_user() if is_local(address) else None


def packed(message: Mapping[str, Any]) -> bytes:
    """A message as it travels."""
    return msgpack.packb(message) or b""


class Entrance:
    """A ROUTER that only holders of the keys can connect to; without keys, anyone can."""

    def __init__(self, keys: Keys | None) -> None:
        self._context = zmq.Context.instance() if keys is None else zmq.Context()
        self._is_own = keys is not None
        if keys is not None:
            Doorkeeper(self._context, keys)
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.linger = _LINGER_MS
        if keys is not None:
            secure_server(self.socket, keys)

    def receive(self) -> tuple[bytes, dict[str, Any]] | None:
        """The sender and its message; ``None`` for one of another form, as a stranger sends it."""
        frames = self.socket.recv_multipart()
        try:
            sender, message = frames
            body = msgpack.unpackb(message)
        except (ValueError, msgpack.UnpackException):
            return None
        return (sender, body) if isinstance(body, dict) else None

    def bind(self, endpoint: str) -> None:
        """Listen there. Raises :class:`zmq.ZMQError` where that is not possible."""
        self.socket.ipv6 = "[" in endpoint
        self.socket.bind(endpoint)

    def listen(self, listener: socket.socket, host: str) -> None:
        """Listen where a socket listens already, which this takes over."""
        port = listener.getsockname()[1]
        self.socket.setsockopt(zmq.USE_FD, listener.detach())
        self.bind(f"tcp://{host}:{port}")

    def close(self) -> None:
        """Stop listening; what was sent last has a second to leave."""
        self.socket.close()
        if self._is_own:
            self._context.term()


class Visit:
    """A DEALER connected to an :class:`Entrance` at ``endpoint``; ``name`` is for errors."""

    def __init__(self, endpoint: str, keys: Keys | None, name: str, linger_ms: int) -> None:
        self._name = name
        self._failing_s: float | None = None
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger, self.socket.ipv6 = linger_ms, "[" in endpoint
        if keys is not None:
            secure_client(self.socket, keys.of("worker"))
        self._monitor = self.socket.get_monitor_socket(sum((_REFUSED, _DONE, *_FAILED)))
        self.socket.connect(endpoint)

    def check(self) -> None:
        """Raise :class:`~meshwright.errors.ClusterError` where the entrance has other keys."""
        while self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor)["event"])
            if event == _DONE:
                self._failing_s = None
            elif event == _REFUSED:
                self._fail("refuses the key of this process")
            elif self._failing_s is None:
                self._failing_s = time.monotonic()
            elif time.monotonic() - self._failing_s > _FAILING_S:
                self._fail("ends every handshake, as a process with other keys does")

    def close(self) -> None:
        """Leave."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()

    def _fail(self, what: str) -> None:
        path = os.environ.get(KEYS)
        here = f"{KEYS}={path}" if path else f"{KEYS} is not set"
        raise ClusterError(f"{self._name} {what}; here {here}. Use the same keys everywhere.")
