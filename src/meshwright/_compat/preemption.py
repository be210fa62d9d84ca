"""JAX's notice of SIGTERM, for as long as something asks for it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def leaving_sigterm() -> Iterator[None]:
    """Around ``jax.distributed.initialize``: SIGTERM stays what it was until JAX is asked about it.

    JAX 0.10 (``jax/_src/distributed.py``) starts its preemption service with the group. That takes
    SIGTERM away from the program in native code, so one that never asks whether it was preempted
    could not be ended by it.
    """
    import jax
    from jax._src import distributed

    name = "jax_enable_preemption_service"
    enabled = getattr(jax.config, name)
    jax.config.update(name, False)
    try:
        yield
    finally:
        jax.config.update(name, enabled)
    if enabled:
        distributed.global_state.preemption_sync_manager = _OnDemand(distributed.global_state)


class Heard:
    """Whether this process has heard SIGTERM, at once, where JAX looks once a second."""

    def __init__(self) -> None:
        self.here = False


@contextlib.contextmanager
def hearing_sigterm() -> Iterator[Heard]:
    """Inside, JAX hears SIGTERM and tells all processes; afterwards it is what it was before.

    Python sets and restores signals in its main thread alone: a program that trains in another one
    leaves SIGTERM to JAX, and nothing is heard ``here``.
    """
    from jax._src import distributed

    heard = Heard()
    manager = distributed.global_state.preemption_sync_manager
    is_ours = isinstance(manager, _OnDemand)
    before = signal.getsignal(signal.SIGTERM)
    if is_ours and not manager.hears:
        manager.start()
    if manager is None or threading.current_thread() is not threading.main_thread():
        yield heard
        return
    native = _get_native(signal.SIGTERM)  # JAX's handler: Python does not know it
    if native in (None, signal.SIG_DFL, signal.SIG_IGN):
        yield heard
        return
    tell_jax = _HANDLER(native)

    def hear(number: int, _: Any) -> None:
        heard.here = True
        tell_jax(number)

    signal.signal(signal.SIGTERM, hear)
    if native == _get_native(signal.SIGTERM):  # a handler of Python's; calling it would not end
        signal.signal(signal.SIGTERM, before)
        yield heard
        return
    try:
        yield heard
    finally:
        if is_ours and before is not None:
            signal.signal(signal.SIGTERM, before)
            manager.hears = False
        else:
            _set_native(signal.SIGTERM, native)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_get_native, _set_native = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
_get_native.argtypes, _get_native.restype = (ctypes.c_int,), ctypes.c_void_p
_set_native.argtypes, _set_native.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p


class _OnDemand:
    """Stands in the place of JAX's preemption manager, and starts it when it is first asked."""

    def __init__(self, state: Any) -> None:
        self._state, self._manager = state, None
        self.hears = False

    def start(self) -> None:
        """Make a new manager, which takes SIGTERM; JAX's service knows what earlier ones heard."""
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        self.shutdown()
        self._manager = _jax.create_preemption_sync_manager()
        self._manager.initialize(self._state.client)
        self.hears = True

    def reached_sync_point(self, step: int) -> bool:
        if not self.hears:
            self.start()
        assert self._manager is not None
        return self._manager.reached_sync_point(step)

    def shutdown(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()
            self._manager = None
