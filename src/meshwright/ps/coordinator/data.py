"""Which step gets which element: every element goes to one step, also when workers die.

An element is bound to the step that it was handed to. A step that runs again on another worker gets
the same elements, and what a step did not take goes to the next. Elements are sent ahead of the
steps that will take them. If a step takes more or fewer than the one before, the elements of the
steps behind it on its worker are bound again, so that one worker takes them in order. Pure, except
for the user's own iterators.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator
from typing import Any

from ...errors import ClusterError, ScheduledError

SHARDINGS = ("dynamic", "static", "copy")


Drawn = tuple[int, Any]  # the place of an element in its stream, and the element


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    return ScheduledError(f"{type(error).__name__} was raised by an iterator: {error}")


class Stream:
    """Elements one by one, of which some may come back: the first of them always goes out next."""

    def __init__(self, draw: Iterator[Any]) -> None:
        self._draw = draw
        self._places = itertools.count()
        self._returned: list[Drawn] = []  # a heap
        self._end: int | None = None
        self._error: Exception | None = None  # what the iterator raised, to be raised in its place
        self.ended = False  # nothing more can be drawn; some may still come back

    def take(self, most: int, *, ahead: bool = False) -> list[Drawn]:
        """The next elements, fewer (or none) at the end.

        What the iterator raises is kept, when it is drawn from ``ahead``, for the one who asks.
        """
        elements: list[Drawn] = []
        while len(elements) < most:
            if self._returned:
                elements.append(heapq.heappop(self._returned))
                continue
            try:
                if self._error is None:
                    elements.append((next(self._places), next(self._draw)))
                    continue
            except StopIteration:
                self.ended = True
                break
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # of sys.exit as well: who draws goes on
                self._error = _as_exception(error)
            if elements or ahead:
                break
            error, self._error = self._error, None
            raise error
        return elements

    def put_back(self, element: Drawn) -> None:
        """An element that was not used; an index behind the end does not come back."""
        if self._end is None or element[1] < self._end:
            heapq.heappush(self._returned, element)

    def stop_at(self, index: int) -> None:
        """There is no element of this index or above: for streams of indices."""
        self._draw, self._end, self.ended = iter(()), index, True
        self._returned = [element for element in self._returned if element[1] < index]
        heapq.heapify(self._returned)

    @property
    def dry(self) -> bool:
        return self.ended and not self._returned and self._error is None


class ElementSource:
    """Where the steps that use one iterator get their elements from.

    ``sharding`` is ``"shared"`` for an iterator of the coordinator's own. For iterators that each
    worker makes, the elements here are indices: ``"dynamic"`` hands them out on demand,
    ``"static"`` gives worker i of n every n-th, and ``"copy"`` gives each worker all.

    >>> source = ElementSource("dynamic")
    >>> source.more(7, "worker:0"), source.more(8, "worker:1")
    ([0], [1])
    """

    def __init__(
        self, sharding: str, draw: Iterator[Any] | None = None, num_workers: int = 1
    ) -> None:
        self.sharding = sharding
        self._whole = Stream(itertools.count() if draw is None else draw)
        self._streams: dict[str, Stream] = {}
        if sharding == "static":
            counts = (itertools.count(index, num_workers) for index in range(num_workers))
            self._streams = {f"worker:{i}": Stream(count) for i, count in enumerate(counts)}
        self._absent: list[str] = []  # workers whose static share others may take
        self._bound: dict[int, list[tuple[Stream, Drawn]]] = {}
        self._usual = 0  # how many the last step took: so many are sent along with the next

    def ahead(self, step: int, worker: str) -> list[Any]:
        """What goes along with a call: what is bound to the step, or as many as the last took."""
        if step not in self._bound:
            self._take(step, worker, self._usual, ahead=True)
        return [element for _, (_, element) in self._bound.get(step, [])]

    def more(self, step: int, worker: str, ended_at: int | None = None) -> list[Any]:
        """One more element for a step, or none at the end.

        ``ended_at`` tells that the worker found no element of that index.
        """
        if ended_at is not None:
            self._stop(step, ended_at)
        return self._take(step, worker, 1)

    def in_order(
        self, step: int, worker: str, num_used: int, later: Collection[int], missing: int | None
    ) -> tuple[list[Any], list[tuple[int, list[Any]]]]:
        """One more element for a step, and what the ``later`` steps on its worker get after it.

        The step has taken ``num_used`` so far. None of the later ones has begun, ever.
        """
        if missing is not None:
            self._stop(step, missing)
        self.took(step, num_used)
        for other in later:
            self._return(self._bound.pop(other, []))
        elements = self._take(step, worker, 1)
        return elements, [(other, self.ahead(other, worker)) for other in later]

    def remaining(self, step: int, num_used: int, missing: int | None) -> list[Any]:
        """What is bound to a step beyond what it has taken: for one that was begun before."""
        if missing is not None:
            self._stop(step, missing)
        return [element for _, (_, element) in self._bound.get(step, [])[num_used:]]

    def took(self, step: int, num_used: int) -> None:
        """A step takes ``num_used`` of its elements: the others may go to other steps."""
        bound = self._bound.get(step, [])
        if len(bound) > num_used:
            self._bound[step] = bound[:num_used]
            self._return(bound[num_used:])

    def expect(self, num_used: int) -> None:
        """The last step took ``num_used``: the next one is expected to take as many."""
        self._usual = num_used

    def freed(self, step: int) -> None:
        """A step has left its worker undone. Its elements wait for it, unless they are local."""
        if self.sharding in ("static", "copy"):
            self._return(self._bound.pop(step, []))

    def ended(self, step: int, num_used: int) -> None:
        """A step has ended, and took ``num_used`` of its elements."""
        self._usual = num_used
        self._return(self._bound.pop(step, [])[num_used:])

    def leave(self, worker: str) -> None:
        """A worker is gone: what it had to do of a static share may go to others."""
        if worker not in self._absent:
            self._absent.append(worker)

    def enter(self, worker: str) -> None:
        if worker in self._absent:
            self._absent.remove(worker)

    def dry(self, worker: str) -> bool:
        """Whether this worker, as far as is known, can get nothing more."""
        return all(stream.dry for stream in self._of(worker))

    @property
    def passes_on(self) -> bool:
        """Whether a step that finds nothing on one worker may find something on another."""
        return self.sharding in ("static", "copy")

    def _of(self, worker: str) -> list[Stream]:
        if self.sharding == "copy":
            return [self._streams.setdefault(worker, Stream(itertools.count()))]
        if self.sharding == "static":
            names = [worker, *(name for name in self._absent if name != worker)]
            return [self._streams[name] for name in names if name in self._streams]
        return [self._whole]

    def _take(self, step: int, worker: str, most: int, *, ahead: bool = False) -> list[Any]:
        elements: list[Any] = []
        for stream in self._of(worker):
            drawn_now = stream.take(most - len(elements), ahead=ahead)
            self._bound.setdefault(step, []).extend((stream, drawn) for drawn in drawn_now)
            elements.extend(element for _, element in drawn_now)
        return elements

    def _stop(self, step: int, index: int) -> None:
        bound = self._bound.get(step, [])
        for stream in [stream for stream, (_, element) in bound if element == index]:
            stream.stop_at(index)
        # What is not there was never handed out.
        self._bound[step] = [(stream, pair) for stream, pair in bound if pair[1] < index]

    def _return(self, pairs: list[tuple[Stream, Drawn]]) -> None:
        for stream, element in pairs:
            stream.put_back(element)


def check_sharding(sharding: str) -> str:
    """``sharding`` itself, or :class:`~meshwright.errors.ClusterError`."""
    if sharding not in SHARDINGS:
        raise ClusterError(
            "sharding must be 'dynamic' (each element to one step, on demand), 'static' (worker i "
            "of n takes every n-th) or 'copy' (each worker takes all, as TensorFlow); received "
            f"{sharding!r}."
        )
    return sharding
