"""Answers on their way from the thread of a model to event loops, many with one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary, ref

_deliveries: WeakKeyDictionary[asyncio.AbstractEventLoop, Delivery] = WeakKeyDictionary()


async def answer_of(future: Future[Any], within_s: float | None = None) -> Any:
    """The result of a future that another thread sets; cancelling cancels the future.

    ``asyncio.wrap_future`` wakes the loop once per future, a system call each that also hands the
    interpreter from thread to thread. Here the answers of a batch wake it once. Raises TimeoutError
    after ``within_s`` seconds.
    """
    loop = asyncio.get_running_loop()
    delivery = _deliveries.get(loop)
    if delivery is None:
        delivery = _deliveries.setdefault(loop, Delivery(loop))
    waiting = loop.create_future()
    future.add_done_callback(lambda finished: delivery.send(finished, waiting))
    timer = None if within_s is None else loop.call_later(within_s, _give_up, waiting)
    try:
        return await waiting
    except (asyncio.CancelledError, TimeoutError):
        future.cancel()
        raise
    finally:
        if timer is not None:
            timer.cancel()


def _give_up(waiting: asyncio.Future[Any]) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())


class Delivery:
    """Brings finished futures to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # which is the key of this value in a weak dictionary
        self._finished: deque[tuple[Future[Any], asyncio.Future[Any]]] = deque()
        self._is_called = False

    def send(self, finished: Future[Any], waiting: asyncio.Future[Any]) -> None:
        """Called in any thread."""
        self._finished.append((finished, waiting))
        if not self._is_called:
            self._is_called = True
            self._call()

    def _call(self) -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop: nothing waits in it any more
            if (loop := self._loop()) is not None:
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False  # before looking, so that what comes from now on calls again
        while self._finished:
            finished, waiting = self._finished.popleft()
            if waiting.done():
                continue
            if finished.cancelled():
                waiting.cancel()
            elif (error := finished.exception()) is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(finished.result())
