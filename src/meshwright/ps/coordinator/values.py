"""What ``schedule`` returns, and what stands for the workers' own iterators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import CancelledError, ShippingError, TaskError, UnreachableError

OWN = "own"  # in the place of a sharding: a value of each worker's own, and no elements
LOOK_S = 0.5  # how often a wait asks whether there is still somebody to wait for


class RemoteValue:
    """The result of a scheduled function, which may not be there yet."""

    def __init__(
        self,
        changed: threading.Condition,
        step: int,
        name: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.step = step  # the id of the step
        self._changed = changed
        self._check = check  # raises where no result can come any more
        self._name = name
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the function has ended, in whichever way."""
        return self._is_done

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Wait for the function's result, and return it: arrays are NumPy's.

        Raises what the function raised; :class:`~meshwright.errors.CancelledError` where another
        one's error cancelled it; :class:`~meshwright.errors.UnreachableError` after ``timeout_s``;
        :class:`~meshwright.errors.TaskError` where a server was lost for good.
        """
        begun_s = time.monotonic()
        with self._changed:
            while not self._is_done:
                waited_s = time.monotonic() - begun_s
                if timeout_s is not None and waited_s >= timeout_s:
                    raise UnreachableError(
                        f"step {self.step} ({self._name}) has not ended after {timeout_s:.1f} s. "
                        "coordinator.report() shows what each worker does."
                    )
                self._check()
                left_s = LOOK_S if timeout_s is None else min(LOOK_S, timeout_s - waited_s)
                self._changed.wait(left_s)
        if self._error is not None:
            raise self._error
        return self._value

    get = fetch

    def set_value(self, value: Any) -> None:
        """The coordinator's, under its lock."""
        self._value, self._is_done = value, True

    def set_error(self, error: BaseException) -> None:
        """The coordinator's, under its lock."""
        self._error, self._is_done = error, True

    def cancel(self) -> None:
        """The coordinator's, under its lock."""
        self.set_error(
            CancelledError(
                f"step {self.step} ({self._name}) was cancelled, as another step raised an error. "
                "Schedule it again once that error has been handled."
            )
        )

    def __repr__(self) -> str:
        state = "waits" if not self._is_done else "failed" if self._error is not None else "ready"
        return f"RemoteValue(step {self.step}, {self._name}, {state})"

    def __reduce__(self) -> NoReturn:
        raise ShippingError(
            f"{self!r} cannot be an argument of a scheduled function: fetch() it first, and pass "
            "the value."
        )


@dataclass(frozen=True, eq=False)
class PerWorkerValues:
    """One value on each worker, such as an iterator over a dataset that each worker makes.

    Pass it to ``schedule``, or use it in a scheduled function: it gets its own worker's.
    """

    key: str
    sharding: str

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        if self.sharding == OWN:
            raise TaskError(f"{self.key} is on the workers: use it in a scheduled function.")
        raise TaskError(
            f"the elements of {self.key} are on the workers: call next() in a scheduled function "
            "that gets this iterator as an argument."
        )

    def __repr__(self) -> str:
        return f"PerWorkerValues({self.key!r}, sharding={self.sharding!r})"


@dataclass(frozen=True, eq=False)
class PerWorkerDataset:
    """A dataset that each worker makes itself; ``iter()`` restarts it on every worker."""

    dataset_fn: Callable[[], Any]
    sharding: str
    begin: Callable[[PerWorkerDataset], PerWorkerValues]

    def __iter__(self) -> Iterator[Any]:
        return self.begin(self)
