"""Sends heartbeats of a task to the chief, and notices when the chief does not answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from ..wire.message import Message, encode
from ..wire.securing import Keys, secure_client


class Heartbeats:
    """A small thread that sends ``alive`` to ``address`` every ``heartbeat_s``.

    ``identity`` is the task's name. The chief need not be there yet: ZeroMQ connects when it is.
    A beat that cannot be sent is dropped, so that none is ever late. :attr:`silent_s` is the time
    since the chief last answered one.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        identity: str,
        heartbeat_s: float,
        told: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._address = address
        self._keys = keys
        self._identity = f"{identity}/alive".encode()
        self._heartbeat_s = heartbeat_s
        self._told = told
        self._numbers = itertools.count(1)
        self._heard_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since the chief last answered, or since the start."""
        return time.monotonic() - self._heard_s

    def __enter__(self) -> Heartbeats:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.routing_id = self._identity
        socket.sndhwm = 2
        socket.immediate = True  # no queue for a chief that is not there
        socket.ipv6 = True
        if self._keys is not None:
            secure_client(socket, self._keys)
        try:
            socket.connect(self._address)
            while not self._ended.wait(self._heartbeat_s):
                self._send(socket)
        finally:
            socket.close(0)
            context.term()

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            socket.recv_multipart()
            self._heard_s = time.monotonic()
        try:
            beat = encode(Message("alive", self._told()), next(self._numbers))
            socket.send_multipart(beat, zmq.NOBLOCK)
        except zmq.Again:
            return
