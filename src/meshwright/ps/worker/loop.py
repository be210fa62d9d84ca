"""A worker's process: joins its coordinator, runs what it sends, and joins again when fenced."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import signal
import sys
import threading
import time
import uuid
from collections import deque
from typing import Any

import zmq

from ...errors import FencedError, UnreachableError
from ...launch.settings import TaskSettings
from ..coordinator.shipping import unpack
from ..shared.client import connect
from ..shared.pushing import Stamp
from ..wire.heartbeat import Heartbeat
from ..wire.message import Message
from ..wire.sockets import SocketChannel
from .inbox import Inbox
from .iterators import Asked, Given
from .runner import Call, Fenced, Runner

_LOOK_UP_MS = 500  # how often a worker that waits looks whether it is still wanted
_REPORT_S = 0.005  # results are kept together at most as long
_MORE_TIMEOUT_S = 600.0  # for an element that the coordinator's own iterator has to make
_PATIENCE_S = 1.5  # a cluster on one host kills what has not ended after two seconds


def work(settings: TaskSettings) -> None:
    """Work until the coordinator says stop, or is gone for ``orphan_s``, or until SIGTERM."""
    with Ending() as ending:
        while _Life(settings, ending).live() and not ending.is_requested:
            pass


class _Life:
    """One incarnation of a worker, from joining until it is fenced or asked to stop."""

    def __init__(self, settings: TaskSettings, ending: Ending) -> None:
        self.settings = settings
        self._ending = ending
        self.task = str(settings.task)
        self.incarnation = uuid.uuid4().hex[:16]
        self._inbox = Inbox()
        self._batches: deque[int] = deque()
        self._control = self._channel("", self._join())
        self._servers = connect(settings.spec, settings.keys, self.task, self.incarnation)
        self._runner = Runner(self._servers, self.task, settings.task.index, self._more)
        self._heartbeat = Heartbeat(
            lambda: self._channel("/alive", None),
            self._doing,
            settings.heartbeat_s,
            self._give_back,
        )
        self._poller = zmq.Poller()
        for socket in self._control.sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._elements: dict[tuple[int, str], Given] = {}
        self._stopped = False
        self._reported_s = time.monotonic()
        self._session: str | None = None

    def live(self) -> bool:
        """Work; returns whether to join again, as a new incarnation."""
        try:
            while not self._stopped and not self._orphaned() and not self._ending.is_requested:
                if self._heartbeat.unwelcome:
                    return True
                self._hear()
                self._work()
            if self._ending.is_requested:
                self._leave()
        except (Fenced, FencedError):  # the second from a server that was asked between steps
            return True
        finally:
            self._heartbeat.stop()
            self._servers.close()
            self._control.close()
        return False

    def _leave(self) -> None:
        """Tell what was done, and give back the rest: others need not wait to miss this worker."""
        self._report(self._runner.settle())
        self._control.tell(Message("recalled", {"steps": self._inbox.empty()}))
        self._control.tell(Message("leave"))

    def _orphaned(self) -> bool:
        limit_s = self.settings.orphan_s
        return limit_s is not None and self._heartbeat.silent_s > limit_s

    def _work(self) -> None:
        call = self._inbox.begin()
        if call is not None:
            self._runner.run(call)
        if not self._runner.num_open:
            return
        late = time.monotonic() - self._reported_s >= _REPORT_S
        if late or not len(self._inbox) or self._runner.num_open >= self._batch:
            self._report(self._runner.settle())

    def _report(self, messages: list[Message]) -> None:
        for message in messages:
            self._control.tell(message)
        if any(message.kind == "failed" for message in messages):
            # An error cancels what comes after it.
            self._control.tell(Message("recalled", {"steps": self._inbox.empty()}))
        self._reported_s = time.monotonic()

    @property
    def _batch(self) -> int:
        # Half of what the coordinator sent is told of while the other half is still to do.
        return max(1, (len(self._inbox) + self._runner.num_open) // 2)

    def _hear(self) -> None:
        busy = len(self._inbox) or self._runner.num_open
        if not busy and not self._control.has_messages:
            self._poller.poll(_LOOK_UP_MS)
            self._reported_s = time.monotonic()
        self._take_in()
        self._control.check_keys()

    def _take_in(self) -> None:
        while (message := self._control.receive_nowait()) is not None:
            self._act_on(message)
        welcome = self._control.welcome
        if welcome is not None and welcome.head.get("session") != self._session:
            self._enter_session(welcome)

    def _enter_session(self, welcome: Message) -> None:
        if self._session is not None:  # another coordinator: nothing of the last one's holds
            raise Fenced
        self._session = welcome.head.get("session")
        self._runner.context.settings = dict(welcome.head.get("settings", {}))
        self._runner.context.at_once = bool(welcome.head.get("at_once", False))

    def _act_on(self, message: Message) -> None:
        head = message.head
        if self._runner.learn(message):
            pass
        elif message.kind == "calls":
            self._servers.resize_rounds(head["broken"])
            for call in calls_of(message, self.incarnation):
                self._inbox.put(call)
        elif message.kind == "element":
            later = [(step, elements_of(packed)) for step, packed in head["later"]]
            self._elements[head["step"], head["key"]] = elements_of(head["elements"]), later
        elif message.kind == "unknown":
            self._heartbeat.unwelcome = True
        elif message.kind == "stop":
            self._stopped = True

    def _more(self, request: Asked) -> Given:
        """Ask the coordinator for one more element, and wait for it."""
        key, step = request.key, request.step
        self._control.tell(Message("next", dataclasses.asdict(request)))
        until = time.monotonic() + _MORE_TIMEOUT_S
        while (step, key) not in self._elements:
            self._poller.poll(_LOOK_UP_MS)
            self._take_in()
            if self._stopped or self._heartbeat.unwelcome or self._ending.is_requested:
                raise Fenced  # the result of this step is not needed any more
            if time.monotonic() > until:
                raise UnreachableError(
                    f"the chief has sent no element of {key} for {_MORE_TIMEOUT_S:.0f} s.",
                    "chief:0",
                )
        return self._elements.pop((step, key))

    def _join(self) -> Message:
        head = {
            "task": self.task,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "host": platform.node(),
        }
        return Message("join", head)

    def _give_back(self, message: Message) -> Message | None:
        if message.kind != "recall":
            return None
        steps = self._inbox.recall([(step, attempt) for step, attempt in message.head["steps"]])
        return Message("recalled", {**self._doing(), "steps": steps})

    def _doing(self) -> dict[str, Any]:
        doing = self._runner.doing
        return {
            "task": self.task,
            "incarnation": self.incarnation,
            "what": doing.what,
            "step": doing.step,
            "for_s": time.monotonic() - doing.since_s,
        }

    def _channel(self, suffix: str, hello: Message | None) -> SocketChannel:
        return SocketChannel(
            self.settings.chief_address,
            self.settings.keys,
            "chief:0",
            identity=f"{self.task}/{self.incarnation}{suffix}",
            hello=hello,
        )


def calls_of(message: Message, incarnation: str) -> list[Call]:
    """The calls that a message holds."""
    calls = []
    done_below = message.head["done_below"]
    for step, attempt, key, packed, span, elements, round_, of in message.head["calls"]:
        stamp = Stamp(step, attempt, incarnation, done_below, round_, of)
        unpacked = tuple((name, elements_of(own)) for name, own in elements)
        calls.append(Call(stamp, key, packed, message.arrays[slice(*span)], unpacked))
    return calls


def elements_of(packed: Any) -> list[Any]:
    """Elements as they travel: indices as they are, the user's own objects packed."""
    return unpack(packed) if isinstance(packed, bytes) else list(packed)


class Ending(contextlib.AbstractContextManager["Ending"]):
    """Notes SIGTERM; what has not ended soon after it is ended where it stands.

    An exception out of the handler might come during anything: an import, a callback of
    JAX, which would print it.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._before: Any = None

    def __enter__(self) -> Ending:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _hear(self, _number: int, _frame: object) -> None:
        self.is_requested = True
        timer = threading.Timer(_PATIENCE_S, _end_here)
        timer.daemon = True
        timer.start()


def _end_here() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)
