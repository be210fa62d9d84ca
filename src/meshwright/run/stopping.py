"""Ctrl-C and SIGTERM while training: the step under way is finished, saved, and then it stops."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .. import _compat
from ..errors import Preempted

PREEMPTED_CODE = 75  # EX_TEMPFAIL of sysexits.h: try the same again


class Stopping(contextlib.AbstractContextManager["Stopping"]):
    """Notes SIGINT, and SIGTERM where ``saves``, instead of stopping in the middle of a step.

    A second signal stops at once. Only the main thread can handle signals; in other threads, and
    for a signal that is ignored, nothing changes. The previous handlers are restored afterwards.
    In several processes JAX hears SIGTERM, for all of them must stop at the same step.
    """

    def __init__(self, saves: bool) -> None:
        self._saves = saves
        self._signal: int | None = None
        self._at_once = False
        self._questions = 0
        self._before: dict[int, Any] = {}
        self._hearing = contextlib.ExitStack()
        self._heard = _compat.Heard()

    def __enter__(self) -> Stopping:
        if self._saves and _several_processes():
            self._heard = self._hearing.enter_context(_compat.hearing_sigterm())
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            handles = number == signal.SIGINT or (self._saves and not _several_processes())
            if handles and before not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
        self._hearing.close()
        if self._heard.here and self._signal is None and kind is None:
            # It came after finish(): the others go on, so it is a signal to the program again.
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def is_asked(self) -> bool:
        """Whether this process has heard a signal."""
        return self._signal is not None

    def asked(self) -> bool:
        """Whether to save and stop now, between two steps; all processes get the same answer."""
        self._questions += 1
        if self._saves and _several_processes() and _all_reached(self._questions):
            self._signal = signal.SIGTERM
        return self.is_asked

    def finish(self) -> None:
        """Note a SIGTERM of any process that JAX has not passed on before the last step.

        All processes must call this, after their last save.
        """
        if not (self._saves and _several_processes() and _is_served()) or self.is_asked:
            return
        if _any_process(self._heard.here):
            self._signal = signal.SIGTERM

    @property
    def saves(self) -> bool:
        """Whether the state is to be saved before stopping.

        After Ctrl-C each of several processes may be at another step, which makes no checkpoint.
        """
        return self._saves and not (self._signal == signal.SIGINT and _several_processes())

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal stops without waiting: nothing is changed that has to be finished."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def error(self) -> BaseException:
        """What to raise after saving: KeyboardInterrupt, or :class:`Preempted`."""
        if self._signal == signal.SIGTERM:
            return Preempted(PREEMPTED_CODE)
        return KeyboardInterrupt()

    def _hear(self, number: int, _: Any) -> None:
        again, self._signal = self._signal is not None, number
        if again or self._at_once:
            raise self.error()


def _several_processes() -> bool:
    return jax.process_count() > 1


def _is_served() -> bool:
    """Whether JAX passes SIGTERM on."""
    return jax.config.jax_enable_preemption_service  # pyright: ignore[reportAttributeAccessIssue]


def _all_reached(step: int) -> bool:
    """Whether a process was asked to stop, and this is the step at which all of them do."""
    return _is_served() and multihost_utils.reached_preemption_sync_point(step)


def _any_process(flag: bool) -> bool:
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
