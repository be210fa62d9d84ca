"""A core that answers simple questions, and a thread that serves one over a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshwright.launch.keys import Keys
from meshwright.ps.wire.failures import failure
from meshwright.ps.wire.memory import MemoryChannel
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.sockets import Listener, SocketChannel

KEYS = Keys.make()
WAIT_S = 10.0


class Asked:
    """Answers ``echo``, ``add``, ``fail``, and ``later`` when ``now`` has come."""

    def __init__(self) -> None:
        self.total = 0.0
        self.kinds: list[str] = []
        self.kept: list[tuple[str, int, Message]] = []
        self.due: list[tuple[str, int, Message]] = []

    def handle(self, peer: str, message: Message) -> Message | None:
        self.kinds.append(message.kind)
        if message.kind == "fail":
            raise {"value": ValueError, "key": KeyError}[message.head["what"]]("no such row")
        if message.kind == "add":
            self.total += float(np.sum(message.arrays[0]))
            return Message("ok", {"total": self.total})
        if message.kind == "later":
            self.kept.append((peer, message.head["id"], Message("ok", {"was": "late"})))
            return None
        if message.kind == "now":
            self.due, self.kept = self.kept, []
        return Message("ok", dict(message.head), message.arrays)

    def ready(self) -> list[tuple[str, int, Message]]:
        due, self.due = self.due, []
        return due


@contextmanager
def serving(
    core: Any, address: str = "tcp://127.0.0.1:*", keys: Keys | None = None, task: str = "ps:0"
) -> Iterator[Listener]:
    """A listener whose messages ``core`` answers, in a thread of its own."""
    listener = Listener(address, keys, task=task)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            for peer, message in listener.poll(0.02):
                try:
                    answer = core.handle(peer.hex(), message)
                except Exception as error:
                    answer = failure(error, task)
                if answer is not None and "id" in message.head:
                    listener.answer(peer, answer, message.head["id"])
                for other, number, late in core.ready():
                    listener.answer(bytes.fromhex(other), late, number)
                answer = message = None

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener
    finally:
        ended.set()
        thread.join(WAIT_S)
        listener.close()


@contextmanager
def memory(core: Any) -> Iterator[MemoryChannel]:
    channel = MemoryChannel(core, "ps:0", timeout_s=WAIT_S)
    yield channel
    channel.close()


@contextmanager
def socket(core: Any, *, encrypted: bool, **options: Any) -> Iterator[SocketChannel]:
    ours, theirs = (KEYS.of("ps"), KEYS.of("worker")) if encrypted else (None, None)
    with (
        serving(core, keys=ours) as listener,
        SocketChannel(listener.address, theirs, "ps:0", timeout_s=WAIT_S, **options) as channel,
    ):
        yield channel


def frames(core: Any) -> Any:
    return socket(core, encrypted=False, shared=False)


def encrypted(core: Any) -> Any:
    return socket(core, encrypted=True, shared=False)


@contextmanager
def shared(core: Any) -> Iterator[SocketChannel]:
    with socket(core, encrypted=True, hello=Message("hello")) as channel:
        channel.connect()
        yield channel


TRANSPORTS = {"memory": memory, "frames": frames, "encrypted": encrypted, "shared": shared}
