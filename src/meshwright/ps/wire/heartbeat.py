"""A second voice of a task: it tells the chief that the task is alive, whatever the task does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from ...errors import MeshwrightError
from .message import Message
from .sockets import SocketChannel

_CLOSE_S = 5.0
_LOOK_S = 0.2  # how soon it sees that it is to stop


def _no_answer(_: Message) -> None:
    return None


class Heartbeat:
    """A thread that sends ``alive`` to the chief every ``heartbeat_s``, until :meth:`stop`.

    ``connect`` opens its channel, in the thread, and ``head`` is what each beat holds. The chief
    need not be there yet: a beat that cannot be sent is dropped, so that none is ever late.
    ``answer`` gives what is sent back to a message of the chief, if anything. :attr:`unwelcome`
    becomes true when the chief does not know this incarnation or cannot be understood, and
    :attr:`silent_s` is the time since the chief was last heard.
    """

    def __init__(
        self,
        connect: Callable[[], SocketChannel],
        head: Callable[[], dict[str, Any]],
        heartbeat_s: float,
        answer: Callable[[Message], Message | None] = _no_answer,
    ) -> None:
        self.unwelcome = False
        self._connect = connect
        self._head = head
        self._heartbeat_s = heartbeat_s
        self._answer = answer
        self._heard_s = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-heartbeat", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the chief was last heard, or since the start."""
        return time.monotonic() - self._heard_s

    def stop(self) -> None:
        """End the thread."""
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
                now_s = time.monotonic()
                if channel.connected and now_s >= next_s:
                    channel.tell(Message("alive", self._head()))
                    next_s = now_s + self._heartbeat_s
                left_s = max(0.0, next_s - now_s) if channel.connected else _LOOK_S
                poller.poll(round(1000 * min(left_s, _LOOK_S)))
                self._hear(channel)
        finally:
            with contextlib.suppress(MeshwrightError):
                channel.close()

    def _hear(self, channel: SocketChannel) -> None:
        try:
            while (message := channel.receive_nowait()) is not None:
                self._heard_s = time.monotonic()
                if message.kind == "unknown":
                    self.unwelcome = True
                elif (answer := self._answer(message)) is not None:
                    channel.tell(answer)
        except MeshwrightError:
            self.unwelcome = True
