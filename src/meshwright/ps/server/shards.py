"""Shards: what a server holds of a variable, its slots beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import ArrayError
from .initial_values import Draw, rows_by_key
from .marks import Marks

_FIRST_ROWS = 256  # room for as many rows when a hash table is made
_UNSEEN = -1


class Shard:
    """Some rows of a variable, or all of it; ``slots`` are its optimizer's arrays.

    ``steps`` counts the gradients that its optimizer has taken. What :meth:`full` gives is the
    memory itself, to be changed in place.
    """

    is_hash = False

    def __init__(self, name: str, values: np.ndarray, init: dict[str, Any]) -> None:
        self.name = name
        self.init = init
        self.slots: dict[str, np.ndarray] = {}
        self.steps = 0
        self.marks: Marks | None = None  # of rows that change, once somebody asks for these
        self._values = values

    @property
    def dtype(self) -> np.dtype:
        return self._values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def values(self) -> np.ndarray:
        """The values; not a copy."""
        return self._values

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes

    @property
    def slot_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots.values())

    def slot(self, name: str) -> np.ndarray:
        """One slot; not a copy."""
        return self.slots[name]

    def full(self, name: str | None = None) -> np.ndarray:
        """The array that positions index: the values, or a slot."""
        return self._values if name is None else self.slots[name]

    def add_slot(self, name: str, first: float | None, dtype: np.dtype, per: str) -> None:
        """Make a slot: one number ``per`` ``"element"``, ``"row"`` or ``"variable"``.

        It begins as the number ``first``, or as the values where that is ``None``.
        """
        shapes = {"element": self.full().shape, "row": self.full().shape[:1], "variable": ()}
        self.slots[name] = np.full(shapes[per], self.full() if first is None else first, dtype)

    def positions(self, rows: np.ndarray, *, make: bool = True) -> np.ndarray:
        """Where these rows lie; raises :class:`~meshwright.errors.ArrayError` for one outside."""
        check_rows(self.name, rows)
        if not self.shape:
            raise ArrayError(f"variable {self.name!r} is a scalar, and has no rows.")
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= self.shape[0]):
            wrong = rows[(rows < 0) | (rows >= self.shape[0])]
            raise ArrayError(
                f"row {int(wrong[0])} is out of range for {self.name!r}, which has rows 0 to "
                f"{self.shape[0] - 1} here ({len(wrong)} such rows)."
            )
        return rows

    def changed(self, at: np.ndarray | None = None) -> None:
        """Mark the rows at these positions, or all rows, as changed."""
        if self.marks is not None:
            self.marks.add() if at is None else self.marks.add(at)

    def lookup(self, rows: np.ndarray, *, make: bool = True) -> np.ndarray:
        """A copy of these rows."""
        return np.take(self._values, self.positions(rows), axis=0)


class HashShard(Shard):
    """A table whose rows are named by any 64-bit keys, and made when first used.

    A key's first values depend on the key and the table's seed alone, so that they do not depend
    on which server makes them, or when.
    """

    is_hash = True

    def __init__(
        self, name: str, row_shape: Sequence[int], dtype: np.dtype, init: dict[str, Any]
    ) -> None:
        super().__init__(name, np.empty((_FIRST_ROWS, *row_shape), dtype), init)
        self._places: dict[int, int] = {}
        self._draw = Draw.of(init, (1, *row_shape))
        self.check_room: Callable[[int], None] = lambda more_bytes: None
        self.first: dict[str, float | None] = {}  # of each slot, for rows to come

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._places), *self._values.shape[1:])

    @property
    def values(self) -> np.ndarray:
        return self._values[: len(self._places)]

    def slot(self, name: str) -> np.ndarray:
        slot = self.slots[name]
        return slot if not slot.ndim else slot[: len(self._places)]

    @property
    def keys(self) -> np.ndarray:
        """The keys, in the order of the rows."""
        return np.fromiter(self._places, np.int64, len(self._places))

    def add_slot(self, name: str, first: float | None, dtype: np.dtype, per: str) -> None:
        super().add_slot(name, first, dtype, per)
        self.first[name] = first

    def positions(self, rows: np.ndarray, *, make: bool = True) -> np.ndarray:
        """The positions of these keys' rows; new rows are made, or given as -1 if not ``make``."""
        check_rows(self.name, rows)
        keys = rows.astype(np.int64, copy=False)
        places = self._places_of(keys)
        if make and len(places) and int(places.min()) == _UNSEEN:
            self._make(np.unique(keys[places == _UNSEEN]))
            return self._places_of(keys)
        return places

    def lookup(self, rows: np.ndarray, *, make: bool = True) -> np.ndarray:
        places = self.positions(rows, make=make)
        if make or not len(places) or int(places.min()) != _UNSEEN:
            return np.take(self._values, places, axis=0)
        values = self._rows_by_key(rows.astype(np.int64))
        values[places != _UNSEEN] = self._values[places[places != _UNSEEN]]
        return values

    def first_of(self, slot: str, values: np.ndarray) -> np.ndarray | float:
        """What a slot of new rows begins as, where these are their values."""
        first = self.first[slot]
        return values if first is None else first

    def load(self, keys: np.ndarray, values: np.ndarray, slots: dict[str, np.ndarray]) -> None:
        """Hold these rows and their slots, in this order, and no others."""
        gone = None if self.marks is None else np.setdiff1d(self.keys, keys)
        self._places = dict(zip(keys.tolist(), range(len(keys)), strict=True))
        self._values, self.slots = values, slots
        if self.marks is not None and gone is not None:
            is_kept = self.marks.reload(gone, len(values))
            self.marks = self.marks if is_kept else None

    def _places_of(self, keys: np.ndarray) -> np.ndarray:
        return np.array([self._places.get(key, _UNSEEN) for key in keys.tolist()], np.int64)

    def _make(self, keys: np.ndarray) -> None:
        start, stop = len(self._places), len(self._places) + len(keys)
        if stop > len(self._values):
            self._grow(max(stop, len(self._values) * 3 // 2))
        self._values[start:stop] = self._rows_by_key(keys)
        for name, slot in self.slots.items():
            if slot.ndim:
                slot[start:stop] = self.first_of(name, self._values[start:stop])
        self._places.update(zip(keys.tolist(), range(start, stop), strict=True))
        if self.marks is not None:
            self.marks.add(slice(start, stop))

    def _grow(self, capacity: int) -> None:
        of_rows = [self._values, *(slot for slot in self.slots.values() if slot.ndim)]
        row_bytes = sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in of_rows)
        self.check_room((capacity - len(self._values)) * row_bytes)
        self._values = _grown(self._values, capacity)
        if self.marks is not None:
            self.marks.grow(capacity)
        for name, slot in self.slots.items():
            if slot.ndim:
                self.slots[name] = _grown(slot, capacity)

    def _rows_by_key(self, keys: np.ndarray) -> np.ndarray:
        seed = int(self.init.get("seed") or 0)
        return rows_by_key(self._draw, seed, keys, self.row_shape, self.dtype)


def _grown(array: np.ndarray, capacity: int) -> np.ndarray:
    larger = np.empty((capacity, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def check_rows(name: str, rows: np.ndarray) -> None:
    """Raise :class:`~meshwright.errors.ArrayError` unless ``rows`` can name rows."""
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ArrayError(
            f"rows of {name!r} must be integers along one dim; received {rows.dtype} of shape "
            f"{rows.shape}."
        )
