"""The process of a parameter server: its core, a listener, and beats to the chief."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ...errors import ClusterError
from ..wire.heartbeat import Heartbeat
from ..wire.schema import RESERVED
from ..wire.sockets import Listener, SocketChannel
from .core import ServerCore
from .saving import Saver

if TYPE_CHECKING:
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
    with ExitStack() as stack:
        listener = Listener(
            settings.address,
            settings.keys,
            task=core.task,
            reserved=lambda message: message.kind in RESERVED,
        )
        stack.enter_context(listener)
        # Not before: a second one, which cannot listen, leaves the snapshots of the first.
        if settings.generation > 0:
            saver.restore()
        else:
            saver.begin()
        terminated = stack.enter_context(_terminated())
        heartbeat = _heartbeat(core, settings)
        if heartbeat is not None:
            stack.callback(heartbeat.stop)

        def ended() -> bool:
            limit_s = settings.orphan_s
            silent_s = 0.0 if heartbeat is None else heartbeat.silent_s
            orphaned = limit_s is not None and silent_s > limit_s
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


def _heartbeat(core: ServerCore, settings: TaskSettings) -> Heartbeat | None:
    try:
        address = settings.chief_address
    except ClusterError:
        return None  # a cluster without a chief has no one to send beats to
    about = {
        "task": core.task,
        "incarnation": secrets.token_hex(8),
        "generation": settings.generation,
        "pid": os.getpid(),
        "every_s": settings.heartbeat_s,
    }
    return Heartbeat(
        lambda: SocketChannel(address, settings.keys, "chief:0", identity=f"{core.task}/alive"),
        lambda: {**about, "version": core.state.version},
        settings.heartbeat_s,
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
