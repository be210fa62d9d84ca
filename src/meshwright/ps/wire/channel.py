"""A channel to one task: ask, and have the answer; or send first and gather answers later."""

from __future__ import annotations

from typing import Protocol

from .message import Message


class Channel(Protocol):
    """How a task speaks with one server; not for several threads at once.

    An answer of kind ``"error"`` is raised by ``wait`` as the error that it describes, see
    :mod:`meshwright.ps.wire.failures`. A message's head goes with one more entry, ``"id"``, its
    number. The arrays of a message are not to be written to, nor those that were sent before the
    answer has come.
    """

    peer: str  # the task at the other end, such as "ps:0"
    connections: int  # how many times a connection has been made
    welcome: Message | None  # the answer to the greeting of the last one

    def connect(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the connection, and the answer to its greeting, which it returns."""
        ...

    def send(self, message: Message) -> int:
        """Send a message; the number is what :meth:`wait` takes."""
        ...

    def wait(self, number: int, timeout_s: float | None = None) -> Message:
        """The answer to the message of this number.

        A request that got no answer is sent again where the peer came back after a restart, so
        what it asks for must be harmless when done twice (a push carries the id of its step).
        Raises :class:`~meshwright.errors.UnreachableError` after ``timeout_s``.
        """
        ...

    def ask(self, message: Message, timeout_s: float | None = None) -> Message:
        """Send, and wait for the answer."""
        ...

    def tell(self, message: Message) -> None:
        """Send a message that gets no answer, and is not sent again."""
        ...

    def receive_nowait(self) -> Message | None:
        """The next unsolicited message, or ``None``."""
        ...

    def close(self) -> None:
        """Release sockets and shared memory; safe to call twice."""
        ...
