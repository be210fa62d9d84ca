"""Batches that each process makes itself, with one end for all: ``tf.data``, generators.

How many batches a process will make is not known in advance. So before each step the processes
exchange whether they have one, and an epoch ends where the first has none left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .. import _compat
from ..errors import DataError
from ..launch.progress import inside
from ..warn import warn
from .groups import Group
from .rows import LocalBatch

Make = Callable[[int, int], Iterable[Any]]
Exchange = Callable[[int], list[int]]
_WAIT_S = 600.0  # making a batch may take one process much longer than another
_readings = itertools.count()


@dataclass(frozen=True, eq=False)
class OwnBatches:
    """Batches that ``make(index, count)`` yields for process ``index`` of ``count``."""

    make: Make
    batch_size = num_batches = None

    def __repr__(self) -> str:
        return f"mw.shard({getattr(self.make, '__name__', type(self.make).__name__)})"

    def reading(self, group: Group) -> OwnReading:
        """The batches of a group of processes."""
        return OwnReading(self, group)

    def __iter__(self) -> OwnReading:
        return self.reading(Group.of_processes())


class OwnReading:
    """The batches of one epoch, up to the end that all processes have in common.

    ``exchange`` sends the number of rows of the next batch here, and returns those of all. The
    state counts the batches of this process, and only as many processes can go on from it.
    """

    def __init__(self, source: OwnBatches, group: Group, exchange: Exchange | None = None) -> None:
        self._source, self.group = source, group
        self._exchange = exchange or (_Store() if jax.process_count() > 1 else lambda rows: [rows])
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._epoch, self.taken, self._rows = epoch, 0, 0
        self._items: Iterator[Any] = iter(self._source.make(self.group.index, self.group.number))

    def __iter__(self) -> OwnReading:
        return self

    def __next__(self) -> Any:
        batch, rows = next(self._items, None), 0
        if batch is not None:
            rows = int(np.shape(jax.tree.leaves(batch)[0])[0])
            self._rows = self._rows or rows
            rows = rows if rows == self._rows or self.group.number == 1 else 0
        of_all = self._exchange(rows)
        if not all(of_all):
            if rows:
                first = of_all.index(0)
                warn(
                    f"{self._source!r}: process {first} has no whole batch after {self.taken}; "
                    "the epoch ends there, and what other processes have left is not used."
                )
            raise StopIteration
        if len(set(of_all)) > 1 and self.group.number > 1:
            raise DataError(
                f"{self._source!r}: batches of one step must have as many rows in each process; "
                f"received {of_all}."
            )
        self.taken += 1
        return batch if self.group.number == 1 else LocalBatch(batch)

    @property
    def is_in_order(self) -> bool:
        """Whether the batches of all processes together are the rows in their order."""
        return self.group.number == 1

    def state_after(self, taken: int) -> dict[str, Any]:
        """The state after ``taken`` batches of the epoch."""
        return {"own": taken, "epoch": self._epoch, "processes": self.group.number}

    def get_state(self) -> dict[str, Any]:
        """Where this process stands after the batches that were yielded."""
        return self.state_after(self.taken)

    def goes_on_from(self, state: Any) -> bool:
        """Whether this is a state of such batches."""
        return isinstance(state, dict) and "own" in state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there: what was trained on is made again, and left out."""
        if state["processes"] != self.group.number:
            raise DataError(
                f"{self._source!r}: the checkpoint was written in the middle of an epoch by "
                f"{state['processes']} processes, and there are {self.group.number}. A position "
                "among batches that each process makes is one for as many processes only. Resume "
                f"with {state['processes']}, or pass files or rows by number."
            )
        self.begin(state["epoch"])
        for _ in range(state["own"]):
            next(self)


class _Store:
    """Numbers that all processes exchange through JAX's coordination service."""

    def __init__(self) -> None:
        self._store = _compat.GroupStore(f"meshwright/batches/{next(_readings)}", _WAIT_S)
        self._round = 0

    def __call__(self, own: int) -> list[int]:
        rank, round_ = jax.process_index(), self._round
        self._round += 1
        self._store.set(f"{round_}/{rank}", str(own))
        with inside("barrier"):
            of_all = [
                int(self._store.get(f"{round_}/{other}")) for other in range(jax.process_count())
            ]
        if round_:  # all have come here, so none still reads those before
            self._store.delete(f"{round_ - 1}/{rank}")
        return of_all
