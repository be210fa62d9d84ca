"""Batches read and laid out while the devices still work on those before."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

AHEAD = 2
_SLOW_S = 2e-3  # a thread costs a loop of short steps more than it hides below this
_SLOW_READS = 2  # in a row: one may be the first of its source, or have been interrupted


class Prefetch:
    """Reads an iterator in a thread, at most ``number`` items ahead of the consumer.

    The thread starts only for a slow source: when two items in a row have taken more than 2 ms.
    Until then each item is read on request, or, with ``early``, one item before its time: its
    arrays are on their way to a device that still computes. An error of the iterator is raised in
    place of its item. Closing the generator stops the thread and waits for it.

    >>> import time
    >>> def slow():
    ...     for number in range(5):
    ...         time.sleep(0.004)
    ...         yield number
    >>> prefetch = Prefetch()
    >>> list(prefetch(slow())), list(prefetch(slow()))
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    """

    def __init__(self, number: int = AHEAD, *, early: bool = False) -> None:
        self._number, self._early = number, early
        self._slow_reads = 0

    @property
    def reads_in_thread(self) -> bool:
        """Whether the source was found to be slow."""
        return self._number > 0 and self._slow_reads >= _SLOW_READS

    def __call__(self, items: Iterator[T]) -> Generator[T, None, None]:
        """The same items."""
        try:
            here = self._read_here(items)
            yield from _one_early(here) if self._early else here
            if self.reads_in_thread:
                yield from _in_thread(items, self._number)
        finally:
            _close(items)

    def _read_here(self, items: Iterator[T]) -> Iterator[T]:
        """Items until the source turns out to be slow."""
        while not self.reads_in_thread:
            began_s = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            is_slow = time.perf_counter() - began_s > _SLOW_S
            self._slow_reads = self._slow_reads + 1 if is_slow else 0
            yield item


def _one_early(items: Iterator[T]) -> Iterator[T]:
    """Each item when the next one has been read, or has failed."""
    early: list[T] = []
    try:
        for item in items:
            yield from early
            early = [item]
    except Exception:
        yield from early
        raise
    yield from early


def _in_thread(items: Iterator[T], number: int) -> Iterator[T]:
    room = threading.Semaphore(number)
    read_ahead: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    stopped = threading.Event()

    def read() -> None:
        try:
            while room.acquire() and not stopped.is_set():
                read_ahead.put((next(items), None))
        except BaseException as error:  # also StopIteration: the consumer tells them apart
            read_ahead.put((None, error))

    reader = threading.Thread(target=read, name="meshwright-input", daemon=True)
    reader.start()
    try:
        while True:
            item, error = read_ahead.get()
            room.release()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stopped.set()
        room.release()
        reader.join()


def _close(items: Any) -> None:
    """Let a generator run its ``finally`` now."""
    close = getattr(items, "close", None)
    if close is not None:
        close()
