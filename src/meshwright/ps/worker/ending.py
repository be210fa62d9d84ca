"""SIGTERM for a worker: what runs is finished and reported, if that takes not too long."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any

_PATIENCE_S = 1.5  # a cluster on one host kills what has not ended after two seconds


class Ending(contextlib.AbstractContextManager["Ending"]):
    """Notes SIGTERM; what has not ended soon after it is ended where it stands.

    An exception out of the handler might come in the midst of anything: an import, a callback of
    JAX, which would print it.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Ending:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _hear(self, _number: int, _frame: object) -> None:
        self.asked = True
        timer = threading.Timer(_PATIENCE_S, _end_here)
        timer.daemon = True
        timer.start()


def _end_here() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)
