"""A listener: the end of the wire at a task that many others speak to."""

from __future__ import annotations

import socket as sockets_of_python
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from ...errors import ClusterError, ProtocolError, ShippingError
from ...launch.securing import LISTENER, Doorkeeper, secure_server
from .failures import failure
from .message import Frames, Message, encode, open_first
from .shared import Shared
from .transfer import NOBLOCK, SNDMORE, NotShared, read_arrays, send_frames, skip

if TYPE_CHECKING:
    from ...launch.keys import Keys

QUEUED_MESSAGES = 1024  # for each peer, in each direction
HEARTBEAT_S = 2.0  # ZeroMQ's own, by which a cut connection is noticed and made anew
SILENT_S = 10.0
_MOST_AT_ONCE = 64  # messages of one poll, so that the loop around it gets its turn


class Listener:
    """Takes messages from all who hold an allowed key, and answers them.

    ``address`` is ZeroMQ's, such as ``"tcp://0.0.0.0:8888"``, ``"tcp://127.0.0.1:*"`` (any free
    port, see :attr:`address`) or ``"ipc:///run/ps0"``; without ``keys`` everybody is let in.
    ``reserved`` says of a message whether it is taken only from holders of the listeners' own key,
    servers and chief, and not from workers.
    Raises :class:`~meshwright.errors.ClusterError` where it cannot listen at the address.
    Not for several threads at once. Of a peer whose queue is full the kernel's buffers and
    ZeroMQ's queues keep only so much: then its ``send`` waits.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None = None,
        *,
        task: str = "",
        reserved: Callable[[Message], bool] | None = None,
    ) -> None:
        self.task = task
        self._reserved = None if keys is None else reserved
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # a doorkeeper for each
        self._shared: dict[bytes, Shared] = {}
        self._timeout_ms = -1  # of the socket
        self._router = self._context.socket(zmq.ROUTER)
        try:
            _settle(self._router, address)
            if keys is not None:
                Doorkeeper(self._context, keys)
                secure_server(self._router, keys)
            _bind(self._router, address, task)
        except BaseException:
            self.close()
            raise
        self.address: str = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.sockets: tuple[zmq.Socket[bytes], ...] = (self._router,)

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[bytes, Message]]:
        """The messages that have come, with their peers; waits until there is one, or the time-out.

        A message that cannot be read is answered with the error, and is not among them.
        """
        timeout_ms = -1 if timeout_s is None else max(0, round(timeout_s * 1000))
        if timeout_ms != self._timeout_ms:
            self._router.rcvtimeo = self._timeout_ms = timeout_ms
        messages: list[tuple[bytes, Message]] = []
        try:
            self._take_next(0, messages)
            if timeout_ms == 0:  # another thread waits for this socket: it should wake only once
                while len(messages) < _MOST_AT_ONCE:
                    self._take_next(NOBLOCK, messages)
        except zmq.Again:
            pass
        return messages

    def answer(self, peer: bytes, message: Message, number: int | None = None) -> bool:
        """Send a message to a peer: with the ``number`` of a request, that one's answer.

        The arrays have been copied when it returns. ``False`` where the peer is gone, or takes no
        more (its queue is full).
        """
        shared = self._shared.get(peer)
        try:
            self._router.send(peer, SNDMORE | NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._forget(peer)
            return False
        broken: ShippingError | None = None
        try:
            frames = _frames(message, number, shared)
        except ShippingError as error:
            broken, frames = error, encode(failure(error, self.task), number)
        send_frames(self._router, frames, NOBLOCK)
        if broken is not None and number is None:
            raise broken  # with a number, the one who asked is told
        return True

    def close(self) -> None:
        """Release the address; safe to call twice. Answers on their way have a second to go."""
        if self._context.closed:
            return
        self._router.close(linger=1000)
        self._context.term()
        for peer in list(self._shared):
            self._forget(peer)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_next(self, flags: int, messages: list[tuple[bytes, Message]]) -> None:
        if self._reserved is None:
            self._take(self._router.recv(flags), messages)
            return
        first = self._router.recv(flags, copy=False)
        self._take(first.bytes, messages, first.get("User-Id") == LISTENER.decode())

    def _take(
        self, peer: bytes, messages: list[tuple[bytes, Message]], is_trusted: bool = True
    ) -> None:
        try:
            message = self._message(peer)
            if not is_trusted and self._reserved is not None and self._reserved(message):
                self._refuse(peer, message)
                return
            messages.append((peer, message))
        except NotShared:
            skip(self._router)  # left over from a connection that broke: it will be sent again
        except zmq.ZMQError:
            raise
        except Exception as error:  # whatever a peer sends, the others are listened to
            skip(self._router)
            self.answer(peer, failure(error, self.task))

    def _refuse(self, peer: bytes, message: Message) -> None:
        error = ProtocolError(
            f"message {message.kind!r} to {self.task} is reserved for servers and chief, and the "
            "sender holds the key of workers.",
            self.task,
        )
        number = message.head.get("id")
        self.answer(peer, failure(error, self.task), number if type(number) is int else None)

    def _message(self, peer: bytes) -> Message:
        opened = open_first(self._router.recv())  # ZeroMQ lets none be sent without a frame
        if opened.notes:
            self._hear(peer, opened.notes)
        arrays = read_arrays(self._router, opened, self._shared.get(peer))
        return Message(opened.kind, opened.head, arrays)

    def _hear(self, peer: bytes, notes: dict[str, Any]) -> None:
        if "offer" in notes:
            self._forget(peer)
            for other in [one for one, shared in self._shared.items() if shared.peer_is_gone()]:
                self._forget(other)
            accepted = Shared.accepting(notes["offer"])
            if accepted is not None:
                self._shared[peer] = accepted
        shared = self._shared.get(peer)
        if shared is not None:
            shared.hear(notes)

    def _forget(self, peer: bytes) -> None:
        shared = self._shared.pop(peer, None)
        if shared is not None:
            shared.close()


def _frames(message: Message, number: int | None, shared: Shared | None) -> Frames:
    if shared is None:
        return encode(message, number)
    return encode(message, number, shared.place, shared.notes)


def _settle(router: zmq.Socket[bytes], address: str) -> None:
    router.linger = 0
    router.router_mandatory = True  # an answer to one who is gone is an error, not a silence
    router.router_handover = True  # one who comes back under its name takes its old place
    router.sndhwm = router.rcvhwm = QUEUED_MESSAGES
    router.heartbeat_ivl = round(HEARTBEAT_S * 1000)
    router.heartbeat_timeout = round(SILENT_S * 1000)
    router.ipv6 = "[" in address


def _bind(router: zmq.Socket[bytes], address: str, task: str) -> None:
    fault = _held_by_another(address)
    if fault is None:
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            fault = zmq.strerror(error.errno or 0).lower()
    if fault is not None:
        raise ClusterError(
            f"{task or 'this task'} cannot listen at {address}: {fault}. Give the task another "
            "address, or end the process that holds this one."
        )


def _held_by_another(address: str) -> str | None:
    # ZeroMQ silently takes an ipc:// address away from a process that listens there.
    path = Path(address.removeprefix("ipc://"))
    if not address.startswith("ipc://") or not path.exists():
        return None
    if not stat.S_ISSOCK(path.stat().st_mode):
        return "the path is a file and not a socket"
    with sockets_of_python.socket(sockets_of_python.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return None  # left behind by a process that was killed
    return "address already in use"
