"""Batches of a shape that is not compiled yet: another thread compiles, and then answers them.

Meanwhile the thread of the batches goes on with requests whose shapes are compiled.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from .batches import Batches
from .requests import Request
from .weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from .forward import Shape

_MOST = 8  # batches that are put aside; with more, the others wait


class Aside:
    """Compiles what some batches need, in the order in which they came.

    ``weights`` gives those of the moment at which a batch is computed.
    """

    def __init__(self, batches: Batches, weights: Callable[[], Weights]) -> None:
        self._batches, self._weights = batches, weights
        self._room = threading.Semaphore(_MOST)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshwright-serve-compiles")

    def takes(self, requests: list[Request]) -> bool:
        """Whether these requests are answered here; not where they can be computed at once."""
        shapes = self._batches.missing(requests)
        if not shapes or not self._room.acquire(blocking=False):
            return False
        self._thread.submit(self._answer, requests, shapes)
        return True

    def close(self) -> None:
        """Answer what was taken, and end the thread."""
        self._thread.shutdown()

    def _answer(self, requests: list[Request], shapes: list[Shape]) -> None:
        try:
            self._batches.forward.compile(shapes)
        except Exception as error:
            self._batches.fail(requests, error)
        else:
            self._batches.answer(requests, self._weights())
        finally:
            self._room.release()
