"""A worker's end of the iterators that its functions take elements from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DataError, ExhaustedError, TaskError
from .context import current

# (iterator's key, index that is not there) -> more elements
More = Callable[[str, int | None], list[Any]]
# Elements for the step that asked, and for later ones on this worker, in the place of what they had
Given = tuple[list[Any], list[tuple[int, list[Any]]]]


@dataclass(frozen=True)
class Asked:
    """A step wants one more element: it has taken ``used`` so far.

    ``missing`` is an index that the dataset does not have, and ``before`` the steps that have run
    here and are not reported yet, with how many each took.
    """

    key: str
    step: int
    used: int = 0
    missing: int | None = None
    before: Sequence[Sequence[int]] = ()


class PassedOn(BaseException):
    """This worker has no element for the step: another worker may. Not the user's to catch."""


class IndexedElements:
    """The elements of a dataset by number; by index, where it can be indexed.

    Others are iterated, and made again where an earlier element is needed, for a step that another
    worker has lost. Such a dataset must come in the same order each time that it is made.

    >>> letters = IndexedElements(lambda: iter("abc"))
    >>> letters[1], letters[2], letters[0]
    ('b', 'c', 'a')
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._dataset = make()
        self._running: Iterator[Any] | None = None
        self._next = 0

    def __getitem__(self, number: int) -> Any:
        """Raises :class:`~meshwright.ExhaustedError` behind the last element."""
        dataset = self._dataset
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            if number >= len(dataset):
                raise _no_element(number, len(dataset))
            return dataset[number]
        if self._running is not None and number < self._next:
            self._dataset, self._running = self._make(), None
        if self._running is None:
            self._running, self._next = self._iterator(), 0
        for element in self._running:
            self._next += 1
            if self._next == number + 1:
                return element
        raise _no_element(number, self._next)

    def _iterator(self) -> Iterator[Any]:
        try:
            return iter(self._dataset)
        except TypeError as error:
            kind = type(self._dataset).__name__
            raise DataError(f"dataset_fn must return an iterable; received {kind}.") from error


def _no_element(number: int, length: int) -> ExhaustedError:
    return ExhaustedError(f"the dataset has {length} elements; number {number} was requested.")


class Elements:
    """The elements of one iterator, for one step at a time: of any iterator of the coordinator's.

    The elements that came with the call are used first; then the coordinator is asked. Where a
    step leaves some, the next one asks first: they come before those that it has.
    """

    def __init__(self, key: str, more: More) -> None:
        self.key = key
        self.used = 0  # elements that this step has taken
        self.ran_dry = False
        self._more = more
        self._ahead: deque[Any] = deque()
        self._left_some = False

    def begin(self, elements: list[Any]) -> None:
        """A step begins, with these elements."""
        self._left_some = self._left_some or bool(self._ahead)
        self.used, self.ran_dry = 0, False
        self._ahead = deque([] if self._left_some else elements)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        element = self._fetch(None)
        self.used += 1
        return element

    def _fetch(self, missing: int | None) -> Any:
        if not self._ahead:
            self._ahead.extend(self._more(self.key, missing))
            self._left_some = False
        if not self._ahead:
            self.ran_dry = True
            raise StopIteration
        return self._ahead.popleft()


class LocalElements(Elements):
    """The elements of a dataset that this worker makes itself; the coordinator says which.

    ``make`` makes the dataset.
    """

    def __init__(self, key: str, more: More, make: Callable[[], Any], passes_on: bool) -> None:
        super().__init__(key, more)
        self._make = make
        self._passes_on = passes_on
        self._elements: IndexedElements | None = None

    def __next__(self) -> Any:
        missing: int | None = None
        while True:
            try:
                index = self._fetch(missing)
            except StopIteration:
                if self._passes_on and not self.used:
                    raise PassedOn from None
                raise
            try:
                if self._elements is None:
                    self._elements = IndexedElements(self._make)
                element = self._elements[index]
            except ExhaustedError:
                missing = index
                self._ahead = deque(one for one in self._ahead if one < index)
                continue
            self.used += 1
            return element


def worker_iterator(key: str) -> Any:
    """What an iterator of the coordinator's becomes on a worker: unpickling calls this."""
    context = current()
    if context is None or context.iterator is None:
        raise TaskError("an iterator of a coordinator can be used by scheduled functions only.")
    return context.iterator(key)


def exhausted(key: str, num_used: int) -> ExhaustedError:
    """The error of a function that asked for one element more than there is."""
    return ExhaustedError(
        f"the dataset has no more elements: {key} gave this step {num_used}, and then ended. "
        "Schedule fewer steps, repeat the dataset, or loop over the iterator with `for`."
    )
