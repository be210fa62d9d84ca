"""The calls that a worker has yet to run: begun by one thread, given back by another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from .runner import Call


class Inbox:
    """The calls that wait; one that was recalled is not begun.

    The coordinator may want calls back while a long function runs, so that another worker does
    them: the thread that says "alive" answers, and a call is either begun or given back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque()
        self._recalled: set[tuple[int, int]] = set()
        self._settled: set[tuple[int, int]] = set()  # begun, or given back

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    def begin(self) -> Call | None:
        """The next call that is not recalled."""
        with self._lock:
            while self._calls:
                call = self._calls.popleft()
                name = (call.step, call.stamp.attempt)
                if name in self._recalled:
                    self._recalled.discard(name)
                    continue
                self._begun_one(name)
                return call
        return None

    def recall(self, steps: Iterable[tuple[int, int]]) -> list[int]:
        """Steps that are given back; those that were begun are not among them.

        A call that has not come yet is given back too: it is dropped when it comes.
        """
        with self._lock:
            free = [name for name in steps if name not in self._settled]
            self._recalled.update(free)
            self._settled.update(free)
            return [step for step, _ in free]

    def empty(self) -> list[int]:
        """Give back all that was not begun."""
        with self._lock:
            names = [(call.step, call.stamp.attempt) for call in self._calls]
            self._calls.clear()
            self._settled.update(names)
            return [step for step, _ in names]

    def _begun_one(self, name: tuple[int, int]) -> None:
        self._settled.add(name)
        if len(self._settled) > 10_000:  # only the newest can still be asked for
            self._settled = set(sorted(self._settled)[5_000:])
