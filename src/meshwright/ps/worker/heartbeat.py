"""A worker's second voice: says that it is alive while a function runs, and gives calls back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from ...errors import MeshwrightError
from ..wire.channel import Channel
from ..wire.message import Message
from .runner import Call

_CLOSE_S = 5.0
_LOOK_S = 0.2  # how soon it sees that it is to stop


class Inbox:
    """The calls that wait; one that was recalled is not begun.

    The coordinator may want calls back while a long function runs, so that another worker does
    them: the thread that says "alive" answers, and a call is either begun or given back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque()
        self._recalled: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, int]] = set()  # begun, or given back

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    def begin(self) -> Call | None:
        """The next call that is not recalled."""
        with self._lock:
            while self._calls:
                call = self._calls.popleft()
                name = (call.step, call.stamp.attempt)
                if name in self._recalled:
                    self._recalled.discard(name)
                    continue
                self._begun_one(name)
                return call
        return None

    def recall(self, wanted: Iterable[tuple[int, int]]) -> list[int]:
        """Steps that are given back; those that were begun are not among them.

        A call that has not come yet is given back too: it is dropped when it comes.
        """
        with self._lock:
            free = [name for name in wanted if name not in self._seen]
            self._recalled.update(free)
            self._seen.update(free)
            return [step for step, _ in free]

    def empty(self) -> list[int]:
        """Give back all that was not begun."""
        with self._lock:
            names = [(call.step, call.stamp.attempt) for call in self._calls]
            self._calls.clear()
            self._seen.update(names)
            return [step for step, _ in names]

    def _begun_one(self, name: tuple[int, int]) -> None:
        self._seen.add(name)
        if len(self._seen) > 10_000:  # only the newest can still be asked for
            self._seen = set(sorted(self._seen)[5_000:])


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
