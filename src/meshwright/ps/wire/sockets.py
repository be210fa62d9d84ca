"""A channel over ZeroMQ: encrypted, and reconnected when the other end comes back."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...errors import ProtocolError, ShippingError, UnreachableError
from ...launch.securing import secure_client
from ...warn import warn
from .failures import KIND, raise_failure, rebuilt
from .listener import HEARTBEAT_S, QUEUED_MESSAGES, SILENT_S
from .listener import Listener as Listener
from .message import Frames, Message, encode, open_first
from .outbox import Outbox
from .shared import Shared
from .transfer import NOBLOCK, has_message, read_arrays, send_frames, skip

if TYPE_CHECKING:
    from ...launch.keys import Keys

_LOOK_UP_S = 0.05  # how long a wait for an answer looks at nothing else
_SOON_S = 0.002
_FAILING_S = 1.0  # of handshakes that all fail: the peer has other keys, or none
_WATCH_S = 0.25  # how often a wait asks whether the peer can still answer
_SAME_KEYS = "Set MESHWRIGHT_KEYS to the same file of keys in every task."
BEGUN, LOST, REFUSED, CLOSED = "begun", "lost", "refused", "closed"
_EVENTS = {
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): BEGUN,
    int(zmq.EVENT_DISCONNECTED): LOST,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): REFUSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): CLOSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): CLOSED,
}


class SocketChannel:
    """A :class:`~meshwright.ps.wire.channel.Channel` to the listener at ``address``.

    ``peer`` names the task there and ``identity`` this one (drawn by lot if it is not given; two
    channels to one listener must differ in it). ``timeout_s`` is for calls that state none.
    ``hello`` is sent first when a connection is made, so also to a task that came back after a
    restart; the answer to the last one is :attr:`welcome`. With ``reconnect=False`` a lost one is
    an :class:`~meshwright.errors.UnreachableError` at once. Large arrays go through shared memory
    where the peer is on this host, and ``shared`` is not ``False``. ``watch`` is called now and
    then while an answer is waited for; it raises where none can come any more.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        peer: str,
        *,
        identity: str | bytes | None = None,
        hello: Message | None = None,
        timeout_s: float | None = None,
        reconnect: bool = True,
        shared: bool = True,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.peer = peer
        self.address = address
        self.welcome: Message | None = None
        self.connections = 0  # how many times a connection has been made
        self._hello = hello
        self._timeout_s = timeout_s
        self._reconnect = reconnect
        self._sharing = shared
        self._watch = watch
        self._shared: Shared | None = None
        self._offering = 0  # the number of the request that carries the offer to share memory
        self._may_offer = False
        self._numbers = itertools.count(1)
        self._greeting = 0  # the number of the last hello
        self._outbox = Outbox()
        self._answers: dict[int, Message] = {}
        self._unasked: deque[Message] = deque()
        self._connected = self._closed = self._is_gone = False
        self._refusal = ""
        self._is_refused = False
        self._failing_s: float | None = None  # when the first handshake of late failed
        self._warned = False
        try:
            self._dialled = Dialled(address, identity, keys)
        except zmq.ZMQError as error:
            raise UnreachableError(f"{peer} has no address {address}: {error}.", peer) from error
        self._socket = self._dialled.socket
        self._socket.rcvtimeo = round(_LOOK_UP_S * 1000)
        self.sockets = (self._socket, self._dialled.monitor)
        self._polled = [(socket, zmq.POLLIN) for socket in self.sockets]

    @property
    def has_messages(self) -> bool:
        """Whether :meth:`receive_nowait` holds messages of which the sockets show nothing."""
        return bool(self._unasked)

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as this end has heard."""
        return self._connected

    def check_keys(self) -> None:
        """Raise :class:`~meshwright.errors.UnreachableError` where the peer refuses these keys."""
        if self._is_refused and not self._connected:
            raise UnreachableError(
                f"{self.peer} at {self.address} {self._refusal}. {_SAME_KEYS}", self.peer
            )

    def send(self, message: Message) -> int:
        """See :meth:`Channel.send`; waits while too many requests have no answer."""
        self._check_open()
        self._make_room(message.num_bytes)
        number = next(self._numbers)
        self._outbox.ask(number, message)
        try:
            self._post(number, message)
        except ShippingError:
            self._outbox.answered(number)
            raise
        return number

    def tell(self, message: Message) -> None:
        """See :meth:`Channel.tell`; the last few are kept until there is a connection."""
        self._check_open()
        self._outbox.drop_told()
        self._post(None, message)

    def wait(self, number: int, timeout_s: float | None = None) -> Message:
        answer = self._answers.pop(number, None)
        outbox = self._outbox
        if answer is None and self._connected and not outbox.queue and number in outbox.waiting:
            self._receive_next()  # which nearly always is the answer
            answer = self._answers.pop(number, None)
        if answer is None:
            message = outbox.waiting.get(number)
            if message is None:
                raise KeyError(f"no answer is due to message {number} of this channel")
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            self._until(lambda: number in self._answers, limit_s, f"{message.kind!r}")
            answer = self._answers.pop(number)
        if answer.kind == KIND:
            raise_failure(answer)
        return answer

    def ask(self, message: Message, timeout_s: float | None = None) -> Message:
        return self.wait(self.send(message), timeout_s)

    def connect(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the connection, and the answer to ``hello``, which it returns.

        Raises :class:`~meshwright.errors.UnreachableError` where the peer does not answer, or has
        another key, and :class:`~meshwright.errors.ProtocolError` where it speaks another version.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if self._hello is None:
            self._until(lambda: self._connected, limit_s, "a first handshake")
        else:
            self._until(lambda: self.welcome is not None, limit_s, f"{self._hello.kind!r}")
        return self.welcome

    def receive_nowait(self) -> Message | None:
        if not self._unasked:
            self._check_open()
            self._receive(0.0)
        return self._unasked.popleft() if self._unasked else None

    def close(self) -> None:
        """See :meth:`Channel.close`; the last messages have a second to leave."""
        if self._closed:
            return
        self._closed = True
        self._dialled.close(linger_s=1.0 if self._connected else 0.0)
        self._forget_shared()

    def __enter__(self) -> SocketChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UnreachableError(f"the channel to {self.peer} is closed.", self.peer)
        if self._is_gone:
            raise UnreachableError(
                f"{self.peer} at {self.address} is gone: its connection has broken.", self.peer
            )

    def _make_room(self, num_bytes: int) -> None:
        outbox = self._outbox
        if not outbox.has_room(num_bytes):
            what = f"{len(outbox.waiting)} messages before"
            self._until(lambda: outbox.has_room(num_bytes), self._timeout_s, what)

    def _post(self, number: int | None, message: Message) -> None:
        queue = self._outbox.queue
        if not self._connected:
            encode(message, number)  # what cannot travel is refused now, not when it leaves
            queue.append((number, message, None))
            return
        frames = self._frames(number, message)
        if queue or not self._try_to_send(frames):
            queue.append((number, message, frames))

    def _flush(self) -> None:
        while self._connected and self._outbox.queue:
            number, message, frames = self._outbox.queue.popleft()
            frames = self._frames(number, message) if frames is None else frames
            if not self._try_to_send(frames):
                self._outbox.queue.appendleft((number, message, frames))
                return

    def _frames(self, number: int | None, message: Message) -> Frames:
        shared = self._shared
        if shared is not None and shared.agreed:
            return encode(message, number, shared.place, shared.notes)
        if self._may_offer and number is not None:
            self._offering = number
            return encode(message, number, None, self._offer)
        return encode(message, number)

    def _try_to_send(self, frames: Frames) -> bool:
        try:
            send_frames(self._socket, frames, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _until(self, is_over: Callable[[], bool], limit_s: float | None, what: str) -> None:
        begun = time.monotonic()
        watched_s = 0.0
        while not is_over():
            self._check_open()
            self.check_keys()
            waited_s = time.monotonic() - begun
            if self._watch is not None and waited_s - watched_s >= _WATCH_S:
                watched_s = waited_s
                self._watch()
            if limit_s is not None and waited_s >= limit_s:
                raise self._unreachable(what, waited_s)
            left_s = _LOOK_UP_S if limit_s is None else limit_s - waited_s
            if self._outbox.queue and self._connected:
                self._flush()
                self._receive(_SOON_S)
            elif self._connected and left_s >= _LOOK_UP_S:
                self._receive_next()
            else:
                self._receive(min(left_s, 10 * _LOOK_UP_S))

    def _unreachable(self, what: str, waited_s: float) -> UnreachableError:
        if self._connected:
            why = "is connected, but silent"
        elif self.connections:
            why = "was connected, and is gone"
        else:
            why = "does not answer, or has another key"
        return UnreachableError(
            f"{self.peer} at {self.address} has not answered {what} for {waited_s:.1f} s: "
            f"it {self._refusal or why}.",
            self.peer,
        )

    def _receive(self, timeout_s: float) -> None:
        """Wait for something to happen, and take in all that has happened."""
        for socket, _ in zmq.zmq_poll(self._polled, max(0, round(timeout_s * 1000))):
            if socket is self._socket:
                self._take_messages()
            else:
                self._take_events()

    def _receive_next(self) -> None:
        """The same for one message, where an answer is likely to be what happens next."""
        try:
            first = self._socket.recv()
        except zmq.Again:
            self._take_events()
        else:
            self._take(first)

    def _take_messages(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(self._socket.recv(NOBLOCK))

    def _take(self, first: bytes) -> None:
        try:
            message = self._message(first)
        except ProtocolError as error:
            skip(self._socket)
            error.task = self.peer
            error.add_note(f"from {self.peer} at {self.address}")
            raise
        if message is not None:
            self._sort(message)

    def _message(self, first: bytes) -> Message | None:
        opened = open_first(first)
        number = opened.head.get("id")
        if opened.notes and self._shared is not None:
            self._shared.hear(opened.notes)
        if number is not None and number not in self._outbox.waiting and number != self._greeting:
            skip(self._socket)  # it came twice, as its request went twice
            return None
        if number is not None and number == self._offering:
            self._offering = 0
            if self._shared is not None and not self._shared.agreed:
                self._forget_shared()  # the peer is on another host
        arrays = read_arrays(self._socket, opened, self._shared) if opened.arrays else ()
        return Message(opened.kind, opened.head, arrays)

    def _sort(self, message: Message) -> None:
        number = message.head.get("id")
        if number is None:
            if message.kind == KIND:  # what it is about could not be read there
                raise_failure(message)
            self._unasked.append(message)
        elif self._outbox.answered(number):
            self._answers[number] = message
        else:
            if message.kind == KIND:
                raise rebuilt(message)
            self.welcome = message

    def _take_events(self) -> None:
        for event in self._dialled.events():
            if event == BEGUN:
                self._begin()
            elif event == LOST:
                self._mark_lost()
            else:
                self._failed(event)

    def _failed(self, event: str) -> None:
        """A handshake did not succeed. Only a peer that knows its own keys says why."""
        now_s = time.monotonic()
        if event == REFUSED:
            self._is_refused, self._refusal = True, "refuses this task's key"
            return
        if self._failing_s is None:
            self._failing_s = now_s
        if now_s - self._failing_s >= _FAILING_S and not self._warned:
            self._warned = True
            self._refusal = "ends every handshake, as a task with other keys does"
            warn(f"{self.peer} at {self.address} {self._refusal}. {_SAME_KEYS}")

    def _begin(self) -> None:
        """A connection stands: greet, and send again whatever has no answer."""
        self._connected = True
        self._failing_s, self._is_refused, self._refusal = None, False, ""
        self.connections += 1
        self._forget_shared()  # the peer may be another process by now
        self._may_offer = self._sharing
        self._greeting = next(self._numbers)
        self._outbox.begin_anew(self._greeting, self._hello)
        self._flush()

    def _offer(self) -> dict[str, Any]:
        self._may_offer = False
        self._shared = Shared.offer()
        return {} if self._shared is None else {"offer": self._shared.offered}

    def _forget_shared(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self._shared, self._offering = None, 0

    def _mark_lost(self) -> None:
        if self._connected:
            self._connected, self._is_gone = False, not self._reconnect
            self._take_messages()  # what came before, and may lie in the memory shared till now


class Dialled:
    """A DEALER that ZeroMQ connects, and connects again, to one address.

    Raises ``zmq.ZMQError`` for an invalid address.
    """

    def __init__(self, address: str, identity: str | bytes | None, keys: Keys | None) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _settle(self.socket)
        if identity is not None:
            self.socket.routing_id = identity.encode() if isinstance(identity, str) else identity
        if keys is not None:
            secure_client(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(sum(_EVENTS))
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close(0)
            raise

    def events(self) -> Iterator[str]:
        """What has become of the connection since this was last asked."""
        while has_message(self.monitor):
            yield _EVENTS[int(recv_monitor_message(self.monitor)["event"])]

    def close(self, linger_s: float) -> None:
        """Let go of both sockets; what has been sent last has so long to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger=round(linger_s * 1000))


def _settle(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = QUEUED_MESSAGES
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000
    socket.connect_timeout = 5000
    socket.heartbeat_ivl = round(HEARTBEAT_S * 1000)
    socket.heartbeat_timeout = round(SILENT_S * 1000)
    socket.ipv6 = True
