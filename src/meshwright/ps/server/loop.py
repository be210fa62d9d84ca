"""The process of a parameter server: its core, a listener, and beats to the chief."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import zmq

from ...errors import ClusterError
from ...launch.securing import secure_client
from ..wire.message import Message, encode
from ..wire.schema import RESERVED
from ..wire.sockets import Listener
from .core import ServerCore
from .saving import Saver

if TYPE_CHECKING:
    from ...launch.keys import Keys
    from ...launch.settings import TaskSettings  # a server loads nothing that it does not need

_IDLE_S = 0.05
_HEADROOM_BYTES = 256 << 20  # left to the process itself, and to the system


def serve(settings: TaskSettings) -> None:
    """Run a parameter server until a stop message, SIGTERM, or ``orphan_s`` without a chief.

    After a restart (``generation`` > 0) it goes on from its last snapshot. It answers every client
    that has its key, even before there is a chief. Raises :class:`~meshwright.errors.ClusterError`
    if it cannot listen, and :class:`~meshwright.errors.CheckpointError` for a damaged snapshot.
    """
    core = ServerCore(
        settings.task.index,
        generation=settings.generation,
        memory_bytes=_memory_bytes(),
        snapshot_dir=settings.snapshot_dir,
        copy_reads=False,  # the listener has copied an answer when it returns
    )
    saver = Saver(core, settings.snapshot_dir, settings.snapshot_every)
    if settings.generation > 0:
        saver.restore()
    else:
        saver.begin()
    with ExitStack() as stack:
        listener = Listener(
            settings.address,
            settings.keys,
            task=core.task,
            reserved=lambda message: message.kind in RESERVED,
        )
        stack.enter_context(listener)
        terminated = stack.enter_context(_terminated())
        beats = _heartbeats(core, settings)
        if beats is not None:
            stack.enter_context(beats)

        def ended() -> bool:
            limit_s = settings.orphan_s
            orphaned = beats is not None and limit_s is not None and beats.silent_s > limit_s
            return core.stopped or terminated.is_set() or orphaned

        _serve(core, listener, saver, ended)
        if saver.path is not None:
            saver.save()
            saver.wait()


def _serve(core: ServerCore, listener: Listener, saver: Saver, ended: Callable[[], bool]) -> None:
    while not ended():
        messages = listener.poll(_IDLE_S)
        for peer, message in messages:
            answer = core.handle(peer.hex(), message)
            saver.keep_fences()
            if answer is not None:
                listener.answer(peer, answer, message.head.get("id"))
            saver.tick(idle=False)
            for other, number, later in core.ready():
                listener.answer(bytes.fromhex(other), later, number)
        if not messages:
            saver.tick(idle=True)


def _heartbeats(core: ServerCore, settings: TaskSettings) -> Heartbeats | None:
    try:
        address = settings.chief_address
    except ClusterError:
        return None  # a cluster without a chief has no one to send beats to
    incarnation = secrets.token_hex(8)
    about = {
        "task": core.task,
        "incarnation": incarnation,
        "generation": settings.generation,
        "pid": os.getpid(),
        "every_s": settings.heartbeat_s,
    }
    return Heartbeats(
        address,
        settings.keys,
        core.task,
        settings.heartbeat_s,
        lambda: {**about, "version": core.state.version},
    )


@contextmanager
def _terminated() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, where this thread may say what signals do."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)


def _memory_bytes() -> int | None:
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    return max(0, physical - _HEADROOM_BYTES)


class Heartbeats:
    """A small thread that sends ``alive`` to ``address`` every ``heartbeat_s``.

    ``identity`` is the task's name. The chief need not be there yet: ZeroMQ connects when it is.
    A beat that cannot be sent is dropped, so that none is ever late. :attr:`silent_s` is the time
    since the chief last answered one.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        identity: str,
        heartbeat_s: float,
        head: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._address = address
        self._keys = keys
        self._identity = f"{identity}/alive".encode()
        self._heartbeat_s = heartbeat_s
        self._head = head
        self._numbers = itertools.count(1)
        self._heard_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since the chief last answered, or since the start."""
        return time.monotonic() - self._heard_s

    def __enter__(self) -> Heartbeats:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.routing_id = self._identity
        socket.sndhwm = 2
        socket.immediate = True  # no queue for a chief that is not there
        socket.ipv6 = True
        if self._keys is not None:
            secure_client(socket, self._keys)
        try:
            socket.connect(self._address)
            while not self._ended.wait(self._heartbeat_s):
                self._send(socket)
        finally:
            socket.close(0)
            context.term()

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            socket.recv_multipart()
            self._heard_s = time.monotonic()
        try:
            beat = encode(Message("alive", self._head()), next(self._numbers))
            socket.send_multipart(beat, zmq.NOBLOCK)
        except zmq.Again:
            return
