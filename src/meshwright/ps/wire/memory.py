"""A channel to a core in this same process: no socket, but the same messages, byte for byte.

Each message goes through :func:`~meshwright.ps.wire.message.encode` and ``decode``, so that a
program that works here says nothing that a network could not carry.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Protocol

from ...errors import UnreachableError
from .failures import KIND, failure, raise_failure
from .message import Message, decode, encode

_LOOK_AGAIN_S = 0.05


class Core(Protocol):
    """Whatever answers messages: a server without its sockets."""

    def handle(self, peer: str, message: Message) -> Message | None:
        """The answer, or ``None`` where it comes later, out of :meth:`ready`."""
        ...

    def ready(self) -> list[tuple[str, int, Message]]:
        """Answers that have become due: the peer, its request's number, the answer."""
        ...


class MemoryChannel:
    """A :class:`~meshwright.ps.wire.channel.Channel` to ``core``, which is called at once.

    ``peer`` is the core's name and ``identity`` this end's. Several channels, also of several
    threads, may share a core: it is called by one of them at a time.
    """

    def __init__(
        self,
        core: Core,
        peer: str,
        *,
        identity: str = "chief:0",
        timeout_s: float | None = None,
    ) -> None:
        self.peer = peer
        self.identity = identity
        self.connections = 1
        self.welcome: Message | None = None
        self._post = _post_of(core)
        self._core = core
        self._timeout_s = timeout_s
        self._due: set[int] = set()
        self._closed = False

    def connect(self, timeout_s: float | None = None) -> Message | None:
        """``None``: the core is there, and need not be greeted."""
        return None

    def send(self, message: Message) -> int:
        """See :meth:`Channel.send`; the core has the message when this returns."""
        number = next(self._post.numbers)  # of the core, as channels may share an identity
        self._due.add(number)
        self._deliver(message, number)
        return number

    def wait(self, number: int, timeout_s: float | None = None) -> Message:
        if number not in self._due:
            raise KeyError(f"no answer is due to message {number} of this channel")
        answer = self._answer(number, self._timeout_s if timeout_s is None else timeout_s)
        self._due.discard(number)
        if answer.kind == KIND:
            raise_failure(answer)
        return answer

    def ask(self, message: Message, timeout_s: float | None = None) -> Message:
        return self.wait(self.send(message), timeout_s)

    def tell(self, message: Message) -> None:
        self._deliver(message, None)

    def receive_nowait(self) -> Message | None:
        """``None``: a core speaks only when it is asked."""
        return None

    def close(self) -> None:
        self._closed = True
        self._post.forget(self.identity, self._due)

    def _deliver(self, message: Message, number: int | None) -> None:
        if self._closed:
            raise UnreachableError(f"the channel to {self.peer} is closed.", self.peer)
        sent = _carried(message, number)
        with self._post.changed:
            try:
                answer = self._core.handle(self.identity, sent)
            except Exception as error:
                answer = failure(error, self.peer)
            if answer is not None and number is not None:
                self._post.put(self.identity, number, answer)
            self._post.collect(self._core)

    def _answer(self, number: int, timeout_s: float | None) -> Message:
        begun = time.monotonic()
        with self._post.changed:
            while (answer := self._post.take(self.identity, number)) is None:
                waited_s = time.monotonic() - begun
                alone = timeout_s is None and threading.active_count() == 1
                if alone or (timeout_s is not None and waited_s >= timeout_s):
                    raise UnreachableError(
                        f"{self.peer} has not answered message {number} after {waited_s:.1f} s; "
                        "it waits for what another task must do first, "
                        "and no task in this process does it.",
                        self.peer,
                    )
                left_s = _LOOK_AGAIN_S if timeout_s is None else timeout_s - waited_s
                self._post.changed.wait(min(_LOOK_AGAIN_S, left_s))
                self._post.collect(self._core)
        return answer


class _Post:
    """The answers of one core that are not yet taken."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.numbers = itertools.count(1)
        self._answers: dict[tuple[str, int], Message] = {}

    def put(self, identity: str, number: int, answer: Message) -> None:
        self._answers[identity, number] = _carried(answer, number)
        self.changed.notify_all()

    def collect(self, core: Core) -> None:
        for identity, number, answer in core.ready():
            self.put(identity, number, answer)

    def take(self, identity: str, number: int) -> Message | None:
        return self._answers.pop((identity, number), None)

    def forget(self, identity: str, numbers: set[int]) -> None:
        with self.changed:
            for number in numbers:
                self._answers.pop((identity, number), None)


def _carried(message: Message, number: int | None) -> Message:
    # Copied, as by a network: neither end sees what the other does to its arrays later.
    return decode([bytes(frame) for frame in encode(message, number)])


_posts: weakref.WeakKeyDictionary[Core, _Post] = weakref.WeakKeyDictionary()
_posts_lock = threading.Lock()


def _post_of(core: Core) -> _Post:
    with _posts_lock:
        return _posts.setdefault(core, _Post())
