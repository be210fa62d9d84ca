"""The queue before a model: one thread takes what waits, as much as fits a batch, and begins it.

While a batch is computed, requests gather for the next, so batches grow with the load by
themselves and an idle server answers at once (dynamic batching as in Clipper and Triton).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import DeadlineError, NotReadyError, OverloadedError
from .figures import Figures
from .requests import Request
from .waiting import Waiting

_LATE = "the request was not started within its time; {waiting} row(s) wait before the model."


class Batcher:
    """Hands batches to ``compute``, in a thread of its own, which answers their requests.

    A batch has requests of one shape, the oldest first, ``max_rows`` rows at most unless one
    request alone has more; of those that would fit, ``rows_of_next`` may take fewer rows.
    """

    def __init__(
        self,
        compute: Callable[[list[Request]], None],
        figures: Figures,
        *,
        max_rows: int,
        queue_rows: int,
        wait_s: float = 0.0,
        alone: bool = False,
        name: str = "model",
        rows_of_next: Callable[[int], int] = lambda waiting: waiting,
    ) -> None:
        self._compute = compute
        self._figures = figures
        self._max_rows = max_rows
        self._queue_rows = queue_rows
        self._wait_s = wait_s
        self._alone = alone
        self._rows_of_next = rows_of_next
        self._waiting = Waiting()
        self._changed = threading.Condition()
        self._is_open = True
        self._running: list[Request] = []
        self._thread = threading.Thread(
            target=self._run, name=f"meshwright-serve-{name}", daemon=True
        )
        self._thread.start()

    @property
    def queued(self) -> tuple[int, int]:
        """Requests and rows that wait."""
        with self._changed:
            self._expire()
            return len(self._waiting), self._waiting.rows

    @property
    def rows_in_flight(self) -> int:
        return sum(request.rows for request in self._running if not request.future.done())

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises :class:`OverloadedError` where the queue is full, :class:`NotReadyError` where it is
        closed.
        """
        with self._changed:
            if not self._is_open:
                raise NotReadyError(
                    "the server is stopping and accepts no more requests. Try again later."
                )
            if not self._has_room(request):
                self._expire()
            if not self._has_room(request):
                raise OverloadedError(*self._overloaded(self._waiting.rows, request.rows))
            self._waiting.add(request)
            self._changed.notify()
        request.future.add_done_callback(lambda future: self._forget(request))

    def fail(self, error: Exception) -> None:
        """Fail what waits and what is being computed, which goes on without anybody waiting."""
        with self._changed:
            requests = self._waiting.clear()
        for request in requests:
            if request.future.set_running_or_notify_cancel():
                request.fail(error)
        for request in self._running:
            request.fail(error)

    def close(self) -> None:
        """Refuse more, answer what waits, and end the thread."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            if batch:
                self._compute(batch)
            self._running = [r for r in self._running if not r.future.done()]

    def _take(self) -> list[Request] | None:
        """The next batch, once there is one; ``None`` once the queue is closed and empty."""
        with self._changed:
            while True:
                self._expire()
                batch = self._waiting.batch(1 if self._alone else self._max_rows)
                if not batch:
                    if not self._is_open:
                        return None
                    self._changed.wait()
                    continue
                age_s = time.monotonic() - batch[0].arrived_s
                rows = sum(request.rows for request in batch)
                is_full = self._alone or rows >= self._max_rows
                if is_full or age_s >= self._wait_s or not self._is_open:
                    if (fewer := self._rows_of_next(rows)) < rows and len(batch) > 1:
                        batch = self._waiting.batch(fewer)
                    return self._started(batch)
                self._changed.wait(self._wait_s - age_s)

    def _started(self, batch: list[Request]) -> list[Request]:
        for request in batch:
            self._waiting.remove(request)
        started = [r for r in batch if r.future.set_running_or_notify_cancel()]
        self._running = self._running + started
        return started

    def _forget(self, request: Request) -> None:
        """A cancelled request leaves the queue."""
        if request.future.cancelled():
            with self._changed:
                self._waiting.remove(request)

    def _expire(self) -> None:
        """Late requests leave the queue with their error."""
        late = self._waiting.take_late(time.monotonic())
        for request in late:
            if request.future.set_running_or_notify_cancel():
                message = _LATE.format(waiting=self._waiting.rows)
                request.future.set_exception(DeadlineError(message))

    def _has_room(self, request: Request) -> bool:
        return self._waiting.rows + request.rows <= self._queue_rows

    def _overloaded(self, waiting: int, rows: int) -> tuple[str, float]:
        speed = self._figures.rows_per_s
        retry_after_s = max((waiting + rows - self._queue_rows) / speed if speed else 1.0, 0.01)
        return (
            f"{waiting} row(s) wait and {rows} more were sent; at most {self._queue_rows} may wait "
            f"(queue_rows). Try again in {retry_after_s:.2g} s.",
            retry_after_s,
        )
