"""The requests that wait before a model: adding, leaving and expiring cost the same in any queue.

A queue whose operations cost more the longer it is collapses under overload: refusing a request
must be cheaper than answering one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator

from .requests import Lengths, Request

_SPARE = 64  # entries of the heap beyond two per request that waits


class Waiting:
    """Requests in the order of their arrival, apart by the shape that they are computed in."""

    def __init__(self) -> None:
        self.rows = 0
        self._lanes: dict[Lengths, OrderedDict[Request, None]] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._counter = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._lanes.values())

    def add(self, request: Request) -> None:
        self._lanes.setdefault(request.padded, OrderedDict())[request] = None
        self.rows += request.rows
        if request.deadline_s is not None:
            self._note_deadline(request, request.deadline_s)

    def remove(self, request: Request) -> bool:
        """Take a request out; ``False`` where it does not wait any more."""
        lane = self._lanes.get(request.padded)
        if lane is None or request not in lane:
            return False
        del lane[request]
        if not lane:
            del self._lanes[request.padded]
        self.rows -= request.rows
        return True

    def clear(self) -> list[Request]:
        """Take all of them out."""
        requests = list(self)
        for request in requests:
            self.remove(request)
        return requests

    def take_late(self, now_s: float) -> list[Request]:
        """Take out those whose deadline has passed."""
        late = list[Request]()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heapq.heappop(self._deadlines)[2]
            if self.remove(request):
                late.append(request)
        return late

    def batch(self, max_rows: int) -> list[Request]:
        """The oldest request and those that fit beside it, which stay; nothing where none wait.

        A request that does not fit is passed by, so that a large one does not leave a batch half
        empty. It is the oldest, sooner or later.
        """
        if not self._lanes:
            return []
        lane = min(self._lanes.values(), key=lambda lane: next(iter(lane)).arrived_s)
        batch, rows = list[Request](), 0
        for request in itertools.islice(lane, 2 * max_rows):
            if batch and rows + request.rows > max_rows:
                continue
            batch.append(request)
            rows += request.rows
            if rows >= max_rows:
                break
        return batch

    def _note_deadline(self, request: Request, deadline_s: float) -> None:
        heapq.heappush(self._deadlines, (deadline_s, next(self._counter), request))
        if len(self._deadlines) > 2 * len(self) + _SPARE:  # answered ones would keep their arrays
            self._deadlines = [entry for entry in self._deadlines if self._waits(entry[2])]
            heapq.heapify(self._deadlines)

    def _waits(self, request: Request) -> bool:
        return request in self._lanes.get(request.padded, ())
