"""A worker's second voice: says that it is alive while a function runs, and gives calls back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from ...errors import MeshwrightError
from ..wire.channel import Channel
from ..wire.message import Message
from .inbox import Inbox

_CLOSE_S = 5.0
_LOOK_S = 0.2  # how soon it sees that it is to stop


class Pulse:
    """A thread that tells the coordinator every ``heartbeat_s`` what this worker does.

    ``connect`` makes its channel, in the thread. :attr:`unwelcome` becomes true when the
    coordinator does not know this incarnation, and :attr:`silent_s` says how long it is silent.
    """

    def __init__(
        self, connect: Callable[[], Any], tell: Callable[[], dict[str, Any]], heartbeat_s: float
    ) -> None:
        self.unwelcome = False
        self.inbox: Inbox | None = None
        self._connect = connect
        self._tell = tell
        self._heartbeat_s = heartbeat_s
        self._heard_s = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-pulse", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        channel = self._connect()
        poller = zmq.Poller()
        for socket in channel.sockets:
            poller.register(socket, zmq.POLLIN)
        next_s = 0.0
        try:
            while not self._stopping.is_set():
                if time.monotonic() >= next_s:
                    channel.tell(Message("alive", self._tell()))
                    next_s = time.monotonic() + self._heartbeat_s
                left_s = max(0.0, next_s - time.monotonic())
                poller.poll(round(1000 * min(left_s, _LOOK_S)))
                self._hear(channel)
        except MeshwrightError:
            self.unwelcome = True  # the main thread joins anew, and makes another of these
        finally:
            with contextlib.suppress(MeshwrightError):
                channel.close()

    def _hear(self, channel: Channel) -> None:
        while (message := channel.receive_nowait()) is not None:
            self._heard_s = time.monotonic()
            if message.kind == "unknown":
                self.unwelcome = True
            elif message.kind == "recall" and self.inbox is not None:
                wanted = [(step, attempt) for step, attempt in message.head["steps"]]
                steps = self.inbox.recall(wanted)
                channel.tell(Message("recalled", {**self._tell(), "steps": steps}))
