"""A worker's end of the iterators that its functions take elements from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ExhaustedError, TaskError
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


class _NotThere(Exception):
    """A dataset has no element of an index."""


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

    ``make`` makes the dataset. One with ``__getitem__`` and ``__len__`` is indexed, others are
    run through, and begun again where an earlier element is wanted.
    """

    def __init__(self, key: str, more: More, make: Callable[[], Any], passes_on: bool) -> None:
        super().__init__(key, more)
        self._make = make
        self._passes_on = passes_on
        self._dataset: Any = None
        self._running: Iterator[Any] | None = None
        self._at = 0  # index of the next element of the running iterator

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
                element = self._element(index)
            except _NotThere:
                missing = index
                self._ahead = deque(one for one in self._ahead if one < index)
                continue
            self.used += 1
            return element

    def _element(self, index: int) -> Any:
        if self._dataset is None:
            self._dataset = self._make()
        if hasattr(self._dataset, "__getitem__") and hasattr(self._dataset, "__len__"):
            if index >= len(self._dataset):
                raise _NotThere
            return self._dataset[index]
        return self._run_to(index)

    def _run_to(self, index: int) -> Any:
        if self._running is None or index < self._at:
            self._again()
        assert self._running is not None
        for element in self._running:
            self._at += 1
            if self._at == index + 1:
                return element
        raise _NotThere

    def _again(self) -> None:
        if self._running is not None:  # an iterator, or a generator, gives everything once
            self._dataset = self._make()
        try:
            self._running = iter(self._dataset)
        except TypeError as error:
            raise TaskError(
                f"dataset_fn returned a {type(self._dataset).__name__}, which is not iterable."
            ) from error
        self._at = 0


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
