"""How a coordinator and its workers reach each other: sockets, or a worker in this process."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from ...launch.keys import Keys
from ..shared.client import Servers
from ..wire.message import Message, decode, encode
from ..wire.sockets import Listener
from ..worker.iterators import Asked, Given
from ..worker.loop import calls_of
from ..worker.runner import Runner

LOCAL_TASK = "worker:0"
_INCARNATION = "local"


class Links(Protocol):
    """Messages from and to workers, and a way to wake the thread that waits for one."""

    def poll(self, timeout_s: float) -> list[tuple[str, Message]]:
        """The messages received, with the peers' names; waits at most ``timeout_s``."""
        ...

    def send(self, peer: str, message: Message, number: int | None = None) -> bool:
        """Send; with a number, as the answer to that request. ``False``: the peer is gone."""
        ...

    def wake(self) -> None:
        """End a wait in another thread."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class _Bell:
    """Ends a wait for ``reading`` in another thread; may be rung when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a descriptor that was closed may be another file's by now
        self.reading, self._writing = os.pipe()
        os.set_blocking(self.reading, False)
        os.set_blocking(self._writing, False)

    def ring(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # it is ringing already
            if self._writing >= 0:
                os.write(self._writing, b"!")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reading, 4096)

    def close(self) -> None:
        with self._lock:
            os.close(self.reading)
            os.close(self._writing)
            self._writing = -1


class SocketLinks:
    """Workers in processes of their own, which connect to ``address``."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self._listener = Listener(address, keys, task="chief:0", reserved=_is_a_servers)
        self._bell = _Bell()
        self._poller = zmq.Poller()
        self._poller.register(self._bell.reading, zmq.POLLIN)
        for socket in self._listener.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> list[tuple[str, Message]]:
        events = dict(self._poller.poll(round(1000 * timeout_s)))
        if self._bell.reading in events:
            self._bell.drain()
        return [(peer.decode(errors="replace"), m) for peer, m in self._listener.poll(0.0)]

    def send(self, peer: str, message: Message, number: int | None = None) -> bool:
        return self._listener.answer(peer.encode(), message, number)

    def wake(self) -> None:
        self._bell.ring()

    def close(self) -> None:
        self._listener.close()
        self._bell.close()


class LocalLinks:
    """One worker in this process: it runs what it is sent when the coordinator polls.

    What it is sent goes through ``encode`` and ``decode``, as on a wire.
    """

    def __init__(self, servers: Servers, more: Callable[[str, Asked], Given]) -> None:
        self.name = f"{LOCAL_TASK}/{_INCARNATION}"
        self._servers = servers
        self._runner = Runner(servers, LOCAL_TASK, 0, lambda request: more(self.name, request))
        head = {"task": LOCAL_TASK, "incarnation": _INCARNATION, "pid": os.getpid(), "host": "here"}
        self._coming: deque[tuple[str, Message]] = deque([(self.name, Message("join", head))])
        self._calls: deque[Any] = deque()
        self._bell = _Bell()

    def poll(self, timeout_s: float) -> list[tuple[str, Message]]:
        if self._calls:
            self._runner.run(self._calls.popleft())
            messages = self._runner.settle()
            self._coming.extend((self.name, _sent(one)) for one in messages)
            if any(message.kind == "failed" for message in messages):
                self._give_back([call.step for call in self._calls])
        elif not self._coming:
            select.select([self._bell.reading], [], [], timeout_s)
        self._bell.drain()
        coming, self._coming = list(self._coming), deque()
        return coming

    def send(self, peer: str, message: Message, number: int | None = None) -> bool:
        message = _sent(message)
        head = message.head
        if self._runner.learn(message):
            pass
        elif message.kind == "calls":
            self._servers.resize_rounds(head["broken"])
            self._calls.extend(calls_of(message, _INCARNATION))
        elif message.kind == "welcome":
            self._runner.context.settings = dict(head["settings"])
            self._runner.context.at_once = head["at_once"]
        elif message.kind == "recall":
            self._recall(head["steps"])
        return True

    def wake(self) -> None:
        self._bell.ring()

    def close(self) -> None:
        self._bell.close()

    def _recall(self, steps: list[list[int]]) -> None:
        numbers = {step for step, _ in steps}
        self._give_back([call.step for call in self._calls if call.step in numbers])

    def _give_back(self, steps: list[int]) -> None:
        self._calls = deque(call for call in self._calls if call.step not in steps)
        self._coming.append((self.name, Message("recalled", {"steps": steps})))


def _is_a_servers(message: Message) -> bool:
    """Whether a message speaks for a server: a worker must not."""
    return str(message.head.get("task", "")).startswith("ps:")


def _sent(message: Message) -> Message:
    return decode(encode(message))
