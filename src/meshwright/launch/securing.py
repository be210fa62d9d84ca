"""CURVE on ZeroMQ's sockets: who may speak with a task, and what the others get (nothing).

The keys are ZeroMQ's own (Curve25519, as in CurveCP and ZMTP 3's RFC 26). A listener asks the
handler below about each key, by ZAP (ZeroMQ's RFC 27).
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

if TYPE_CHECKING:
    from .keys import Keys

LISTENER = b"listener"  # who holds the key of servers and chief, as messages are marked
_ZAP = "inproc://zeromq.zap.01"


def secure_client(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let a socket that will connect speak only with the holder of ``keys.server_public``."""
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = keys.server_public.encode()


def secure_server(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let a socket that will bind speak only with the holders of the allowed keys."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    socket.zap_domain = b"meshwright"
    socket.zap_enforce_domain = True  # without a handler, no peer is admitted


class Doorkeeper:
    """Decides, for the listeners of one context, whether a key is admitted, and in which role.

    It has a thread, which sleeps until a peer connects: so the listener's own loop waits for
    messages alone, and a busy task still admits peers. It ends with the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._allowed = frozenset(z85.decode(key) for key in keys.allowed)
        self._of_listeners = z85.decode(keys.server_public)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP)
        threading.Thread(target=self._answer, name="doorkeeper", daemon=True).start()

    def _answer(self) -> None:
        with self._socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                version, request, _, _, _, mechanism, *credentials = self._socket.recv_multipart()
                is_allowed = (
                    mechanism == b"CURVE"
                    and credentials[:1] != []
                    and credentials[0] in self._allowed
                )
                status = (b"200", b"OK") if is_allowed else (b"400", b"unknown key")
                user = (
                    LISTENER if is_allowed and credentials[0] == self._of_listeners else b"client"
                )
                self._socket.send_multipart([version, request, *status, user, b""])
