"""Looks after the servers: fences workers, notices restarts, and gives a server what it lost."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UnreachableError
from ..shared.client import Servers
from ..wire.message import Message

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

_ANSWER_S = 5.0
_CLOSE_S = 3.0
_AGAIN_S = 0.2


@dataclass(frozen=True)
class _Fence:
    name: str
    incarnation: str


class Guardian:
    """A thread with its own channels to the servers, so that no other thread waits for one."""

    def __init__(
        self, connect: Callable[[], Servers], dispatcher: Dispatcher, heartbeat_s: float
    ) -> None:
        self.waits_for = ""  # what it waits for, for reports
        self._dispatcher = dispatcher
        self._heartbeat_s = heartbeat_s
        self._inbox: queue.SimpleQueue[_Fence | None] = queue.SimpleQueue()
        self._fences: list[_Fence] = []  # all that were ever asked for
        self._generations: dict[int, int] = {}
        self._closing = False
        self._connect = connect
        self._thread = threading.Thread(target=self._run, name="meshwright-guardian", daemon=True)
        self._thread.start()

    def fence(self, name: str, incarnation: str) -> None:
        """Let no server take anything from this worker; :meth:`Dispatcher.fenced` tells when."""
        self._inbox.put(_Fence(name, incarnation))

    def close(self) -> None:
        """Stop looking after them."""
        self._closing = True
        self._inbox.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        servers = self._connect()
        servers.timeout_s = _ANSWER_S
        looked_s = 0.0
        try:
            while not self._closing:
                if time.monotonic() - looked_s >= self._heartbeat_s:
                    self._look(servers)
                    looked_s = time.monotonic()
                self._fence_next(servers)
        finally:
            servers.close()

    def _fence_next(self, servers: Servers) -> None:
        try:
            fence = self._inbox.get(timeout=self._heartbeat_s)
        except queue.Empty:
            return
        if fence is None:
            return
        self._fences.append(fence)
        while not self._closing:
            try:
                servers.fence(fence.incarnation)
            except UnreachableError as error:  # a server restarts: nothing may go on before
                self.waits_for = f"{error.task}, to fence {fence.name}"
                continue
            except Exception as error:  # a server cannot do it now; it may soon
                self.waits_for = f"the servers, to fence {fence.name} ({error})"
                time.sleep(_AGAIN_S)
                continue
            break
        self.waits_for = ""
        self._dispatcher.fenced(fence.name)

    def _look(self, servers: Servers) -> None:
        for server in range(len(servers)):
            if self._closing:
                return
            try:
                self._look_at(server, servers)
            except Exception as error:  # whatever a server says, the others are looked after
                self.waits_for = f"ps:{server} ({error})"
            else:
                self.waits_for = ""

    def _look_at(self, server: int, servers: Servers) -> None:
        stats: Any = servers.ask(server, Message("stats")).head
        generation = stats["generation"]
        before = self._generations.setdefault(server, 0)
        if generation > before:
            for fence in self._fences:
                servers.ask(server, Message("fence", {"incarnation": fence.incarnation}))
            self._dispatcher.refill(server, servers)
            self._generations[server] = generation
        snapshot = stats["snapshot"]["version"]
        self._dispatcher.saving(server, stats["save_fault"], stats["version"] - snapshot)
        num_rounds = self._dispatcher.server_state(server, generation, stats["base"], snapshot)
        for number in range(stats["rounds"], num_rounds if generation else 0):
            # Gradients that the server has lost will not come again.
            servers.ask(server, Message("round", {"round": number, "of": 0}))
            servers.clip_rounds()
