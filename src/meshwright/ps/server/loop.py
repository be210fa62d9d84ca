"""The process of a parameter server: its core, a listener, and beats to the chief."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from ...errors import ClusterError
from ..wire.sockets import Keys, Listener
from .core import ServerCore
from .heartbeat import Heartbeats
from .saving import Saver
from .schemas import RESERVED

_IDLE_S = 0.05
_HEADROOM_BYTES = 256 << 20  # left to the process itself, and to the system


class _Task(Protocol):
    @property
    def index(self) -> int: ...


class Settings(Protocol):
    """What a server needs to know: :class:`meshwright.launch.settings.TaskSettings`."""

    @property
    def task(self) -> _Task: ...
    @property
    def keys(self) -> Keys | None: ...
    @property
    def heartbeat_s(self) -> float: ...
    @property
    def snapshot_dir(self) -> str | None: ...
    @property
    def snapshot_every(self) -> int | None: ...
    @property
    def generation(self) -> int: ...
    @property
    def orphan_s(self) -> float | None: ...
    @property
    def address(self) -> str: ...
    @property
    def chief_address(self) -> str: ...


def serve(settings: Settings) -> None:
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


def _heartbeats(core: ServerCore, settings: Settings) -> Heartbeats | None:
    try:
        address = settings.chief_address
    except ClusterError:
        return None  # a cluster that names no chief: nobody to tell
    incarnation = secrets.token_hex(8)
    told = {
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
        lambda: {**told, "version": core.state.version},
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
