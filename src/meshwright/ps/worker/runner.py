"""Runs scheduled functions, one after the other, and sends what they changed.

A step's updates go out when its function returns, and the next function begins before they are
acknowledged; a step is reported as done only when every server it touched has answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import FencedError, TaskError
from ..coordinator.shipping import unpack
from ..coordinator.values import OWN
from ..shared.client import Servers
from ..shared.placing import VariableSpec
from ..shared.pushing import Acknowledged, Pending, Stamp
from ..wire.failures import failure
from ..wire.message import Message
from ..wire.values import pack_value
from .context import Context, entered
from .iterators import Asked, Elements, Given, LocalElements, PassedOn, exhausted
from .updates import Update

AskMore = Callable[[Asked], Given]


@dataclass(frozen=True)
class Call:
    """One step as it came: a function's key, its packed arguments, and elements for iterators."""

    stamp: Stamp
    key: str
    packed: bytes
    buffers: tuple[Any, ...] = ()
    elements: tuple[tuple[str, list[Any]], ...] = ()

    @property
    def step(self) -> int:
        assert self.stamp.step is not None
        return self.stamp.step


@dataclass(frozen=True)
class Doing:
    """What a worker does, for reports: since when (its own clock), and which step."""

    what: str
    step: int | None
    since_s: float


@dataclass(eq=False)
class _Open:
    """A function that has returned, and whose updates are on their way."""

    call: Call
    value: Any
    pending: Pending
    used: list[list[Any]]
    seconds: float
    acknowledged: Acknowledged | None = None  # where the function itself has waited for it


class Fenced(BaseException):
    """This worker was declared dead: what it had is others' now. Not the user's to catch."""


class Runner:
    """A worker without its sockets to the coordinator.

    ``more`` asks the coordinator for elements. :meth:`run` runs a call, :meth:`settle` waits for
    the servers, and returns messages for the coordinator.
    """

    def __init__(self, servers: Servers, task: str, index: int, more: AskMore) -> None:
        self.context = Context(servers, task, index, iterator=self._for_function)
        self.context.push_now = self._push_now
        self.doing = Doing("waits for work", None, time.monotonic())
        self._servers = servers
        self._more = more
        self._functions: dict[str, Any] = {}
        self._packed: dict[str, tuple[bytes, tuple[Any, ...]]] = {}
        self._datasets: dict[str, tuple[str, str]] = {}
        self._iterators: dict[str, Elements] = {}
        self._rebound: dict[str, dict[int, list[Any]]] = {}  # iterator -> step -> bound anew
        self._own: dict[str, Any] = {}  # values of this worker's own
        self._ran: dict[str, list[list[int]]] = {}  # iterator -> steps not reported, what they took
        self._open: list[_Open] = []
        self._failed: list[Message] = []
        self._call: Call | None = None
        self._pushed: tuple[Pending, Acknowledged] | None = None

    @property
    def num_open(self) -> int:
        """Steps that have run and are not reported yet."""
        return len(self._open) + len(self._failed)

    def learn(self, message: Message) -> bool:
        """Take in what the coordinator says of functions and datasets; whether it was that.

        A function is unpacked with the first call that wants it.
        """
        head = message.head
        if message.kind == "function":
            self._forget(head.get("forget", ()))
            buffers = tuple(bytes(buffer) for buffer in message.arrays)
            self._packed[head["key"]] = (head["packed"], buffers)
        elif message.kind == "iterator":
            self._datasets[head["key"]] = (head["function"], head["sharding"])
        elif message.kind == "forget":
            self._forget(head.get("functions", ()))
            iterator = head.get("key", "")
            self._datasets.pop(iterator, None)
            self._iterators.pop(iterator, None)
            self._rebound.pop(iterator, None)
            self._own.pop(iterator, None)
        return message.kind in ("function", "iterator", "forget")

    def _forget(self, functions: Iterable[str]) -> None:
        for key in functions:
            self._packed.pop(key, None)
            self._functions.pop(key, None)

    def run(self, call: Call) -> None:
        """Run one call; its updates are sent, and what it raises is kept to be reported."""
        self._call, self._pushed = call, None
        self.context.step = call.step
        self.context.round, self.context.of = call.stamp.round, call.stamp.of
        begun_s = time.monotonic()
        self.doing = Doing("runs", call.step, begun_s)
        for key, elements in call.elements:
            again = self._rebound.get(key, {}).pop(call.step, elements)
            self._iterator(key).begin(again if call.stamp.attempt == 1 else elements)
        try:
            with entered(self.context):
                function = self._function(call.key)
                args, kwargs = unpack(call.packed, call.buffers)
                value = pack_value(function(*args, **kwargs))
            self._close(call, value, begun_s)
        except PassedOn:
            self._drop(call, Message("passed", self._head(call)))
        except (Fenced, KeyboardInterrupt):  # the end of this worker
            raise
        except BaseException as error:  # a function may call sys.exit
            self._fail(call, self._explained(error, call))
        finally:
            for key, used in self._used(call):
                self._ran.setdefault(key, []).append([call.step, used])
            self.context.step = None
            self.doing = Doing("waits for work", None, time.monotonic())

    def settle(self) -> list[Message]:
        """Wait for the servers, and report all steps that have run since the last time.

        Raises :class:`Fenced` where a server says that this worker was declared dead.
        """
        if not self._open and not self._failed:
            return []
        self._ran.clear()
        results: list[list[Any]] = []
        arrays: list[Any] = []
        for one, acknowledged in self._settled():
            results.append([*_result(one, acknowledged, len(arrays)), self.context.notes])
            self.context.notes = []
            arrays.extend(one.value[1])
        failed, self._failed = self._failed, []
        if any(message.kind == "fenced" for message in failed):
            raise Fenced
        head = {"results": results, "restarts": self._servers.restarts()}
        answers = [Message("results", head, tuple(arrays))] if results else []
        return answers + failed

    def _settled(self) -> list[tuple[_Open, Acknowledged]]:
        """The steps that all servers have answered for, and their answers."""
        opened, self._open = self._open, []
        settled = self._answers_to(opened, lambda one: one.acknowledged or self._wait_for(one))
        while changed := self._servers.reconnected():
            # An answer that came just now may be from before or after the restart.
            again = self._answers_to(
                [one for one, _ in settled],
                lambda one: self._servers.again(one.pending, changed),
            )
            before = dict(settled)
            settled = [(one, _merged(before[one], newer)) for one, newer in again]
        return settled

    def _wait_for(self, one: _Open) -> Acknowledged:
        return self._servers.settle(one.pending)

    def _answers_to(
        self, opened: list[_Open], ask: Callable[[_Open], Acknowledged]
    ) -> list[tuple[_Open, Acknowledged]]:
        settled: list[tuple[_Open, Acknowledged]] = []
        for one in opened:
            with self._waiting_for_servers(one):
                try:
                    settled.append((one, ask(one)))
                except Exception as error:
                    self._fail(one.call, error)
        return settled

    def _close(self, call: Call, value: Any, begun_s: float) -> None:
        updates = self.context.updates.take()
        in_round = call.stamp.round is not None
        acknowledged = None
        if self._pushed is not None:
            if updates:
                raise TaskError(_TWICE, self.context.task)
            pending, acknowledged = self._pushed
        else:
            pending = self._servers.start_push(updates, call.stamp, everywhere=in_round)
        seconds = time.monotonic() - begun_s
        self._open.append(_Open(call, value, pending, self._used(call), seconds, acknowledged))

    def _push_now(
        self, updates: Sequence[Update], then_read: Sequence[VariableSpec]
    ) -> Acknowledged:
        call = self._call
        if call is None or self._pushed is not None:
            raise TaskError(_TWICE, self.context.task)
        in_round = call.stamp.round is not None
        all_updates = [*self.context.updates.take(), *updates]
        pending = self._servers.start_push(all_updates, call.stamp, then_read, everywhere=in_round)
        acknowledged = self._servers.settle(pending)
        self._pushed = (pending, Acknowledged(acknowledged.servers))
        return acknowledged

    def _fail(self, call: Call, error: BaseException) -> None:
        if isinstance(error, FencedError):
            self._drop(call, Message("fenced"))
            return
        message = failure(error, self.context.task)
        self._drop(call, Message("failed", {**self._head(call), "error": dict(message.head)}))

    def _drop(self, call: Call, message: Message) -> None:
        self.context.updates.take()
        self._failed.append(message)

    def _head(self, call: Call) -> dict[str, Any]:
        return {"step": call.step, "attempt": call.stamp.attempt, "used": self._used(call)}

    def _used(self, call: Call) -> list[list[Any]]:
        return [[key, self._iterators[key].used] for key, _ in call.elements]

    def _explained(self, error: BaseException, call: Call) -> BaseException:
        if isinstance(error, StopIteration):
            own = (self._iterators.get(key) for key, _ in call.elements)
            dry = [one for one in own if one is not None and one.ran_dry]
            if dry:
                return exhausted(dry[0].key, dry[0].used)
        return error

    def _function(self, key: str) -> Any:
        if key not in self._functions:
            packed, buffers = self._packed[key]
            self._functions[key] = unpack(packed, buffers)
        return self._functions[key]

    def _for_function(self, key: str) -> Any:
        """What a function finds in the place of :class:`~.coordinator.values.PerWorkerValues`."""
        function, sharding = self._datasets.get(key, ("", ""))
        if sharding != OWN:
            return self._iterator(key)
        if key not in self._own:
            self._own[key] = self._function(function)()
        return self._own[key]

    def _iterator(self, key: str) -> Elements:
        if key not in self._iterators:
            self._iterators[key] = self._new_elements(key)
        return self._iterators[key]

    def _new_elements(self, key: str) -> Elements:
        if key not in self._datasets:
            return Elements(key, self._ask_more)
        function, sharding = self._datasets[key]
        return LocalElements(
            key, self._ask_more, lambda: self._function(function)(), sharding != "dynamic"
        )

    def _ask_more(self, key: str, missing: int | None) -> list[Any]:
        if self._call is None:
            raise TaskError("an iterator can be used while a scheduled function runs, only.")
        before = self._ran.pop(key, [])
        used = self._iterators[key].used
        elements, later = self._more(Asked(key, self._call.step, used, missing, before))
        self._rebound[key] = dict(later)
        return elements

    @contextmanager
    def _waiting_for_servers(self, one: _Open) -> Iterator[None]:
        names = ", ".join(self._servers.channels[server].peer for server, *_ in one.pending.sent)
        self.doing = Doing(f"waits for {names}", one.call.step, time.monotonic())
        try:
            yield
        finally:
            self.doing = Doing("waits for work", None, time.monotonic())


def _merged(before: Acknowledged, newer: Acknowledged) -> Acknowledged:
    by_server = {server.server: server for server in (*before.servers, *newer.servers)}
    return Acknowledged(tuple(by_server.values()))


def _result(one: _Open, acknowledged: Acknowledged, first_array: int) -> list[Any]:
    servers = [
        [
            server.server,
            server.applied,
            server.version,
            server.staleness,
            server.dropped,
            server.generation,
            server.base,
        ]
        for server in acknowledged.servers
    ]
    head, arrays = one.value
    stamp = one.call.stamp
    span = [first_array, first_array + len(arrays)]
    return [stamp.step, stamp.attempt, head, span, servers, one.used, one.seconds]


_TWICE = (
    "a step pushes once: its updates were sent by context.push already. Make all changes before "
    "it, or give them to it."
)
