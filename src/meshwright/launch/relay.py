"""Connections of a rank to JAX's coordination service, by way of its agent.

JAX ends a process that loses the service, without its ``finally`` blocks. Where the host of the
service is lost, the agent keeps the rank's end of the connections open, and names that host to it
as it does any other. JAX would miss its own heartbeats only after 100 s.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

RELAY = "MESHWRIGHT_RELAY"  # host:port, where ranks reach the service
_CHUNK_BYTES = 1 << 16
_CONNECT_S = 5.0


class Relay:
    """Listens on loopback, and passes bytes on to ``target``, ``host:port``, and back.

    ``lost_file`` is made when the target ends a connection. ``listener`` is a socket that
    listens already.
    """

    def __init__(self, target: str, lost_file: Path, listener: socket.socket | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._lost_file = (host.strip("[]"), int(port)), lost_file
        self._lock, self._open = threading.Lock(), list[socket.socket]()
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            sockets, self._open = [self._listener, *self._open], []
        for one in sockets:
            with contextlib.suppress(OSError):  # which nothing was connected to
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target, _CONNECT_S)
                except OSError:
                    near.close()  # JAX tries again
                    continue
                far.settimeout(None)
                with self._lock:
                    self._open += [near, far]
                self._start(self._pass_on, near, far)
                self._start(self._pass_back, far, near)

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := near.recv(_CHUNK_BYTES):
                far.sendall(piece)
            far.shutdown(socket.SHUT_WR)

    def _pass_back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := far.recv(_CHUNK_BYTES):
                near.sendall(piece)
        with contextlib.suppress(OSError):  # the folder is gone: the group has ended
            self._lost_file.touch()

    @staticmethod
    def _start(run: object, *args: object) -> None:
        threading.Thread(target=run, args=args, name="relay", daemon=True).start()  # type: ignore[arg-type]
