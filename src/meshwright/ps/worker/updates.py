"""What a function has asked to change: kept until it returns, and seen by its own reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..shared.placing import VariableSpec
from ..wire.owned import owned

_SUMS = {  # a sign would be none of an unsigned integer
    "add": np.add,
    "sub": np.subtract,
    "rows_add": np.add,
    "rows_sub": np.subtract,
}


@dataclass(frozen=True)
class Update:
    """One change of a variable: ``op`` is one that servers know, such as ``"add"``.

    Ops on rows (``"rows_add"``, ``"rows_sub"``, ``"rows_assign"``, ``"rows_gradient"``) have two
    arrays: row numbers of the whole variable, and their values.
    """

    spec: VariableSpec
    op: str
    arrays: tuple[np.ndarray, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def by_rows(self) -> bool:
        return self.op.startswith("rows_")

    def as_it_is_now(self) -> Update:
        """The same change, whose arrays the function may overwrite before it returns."""
        return Update(self.spec, self.op, tuple(map(owned, self.arrays)), self.options)


class Updates:
    """The updates of one step, in order."""

    def __init__(self) -> None:
        self._all: list[Update] = []

    def add(self, update: Update) -> None:
        self._all.append(update)

    def take(self) -> list[Update]:
        """All of them; none are left."""
        updates, self._all = self._all, []
        return updates

    def sets(self, name: str) -> bool:
        """Whether a variable's value is known here without asking a server."""
        return any(one.op == "assign" and one.spec.name == name for one in self._all)

    def seen(self, spec: VariableSpec, value: np.ndarray) -> np.ndarray:
        """A value read from the servers, as this step's own updates leave it."""
        mine = [one for one in self._all if one.spec.name == spec.name]
        for one in mine:
            value = _applied(value, one)
        return value

    def seen_rows(self, spec: VariableSpec, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Rows read from the servers, as this step's own updates leave them."""
        for one in [one for one in self._all if one.spec.name == spec.name]:
            values = _applied_to_rows(rows, values, one)
        return values


def _applied(value: np.ndarray, update: Update) -> np.ndarray:
    if update.op == "assign":
        return update.arrays[0].astype(value.dtype)
    if update.op in ("add", "sub"):
        return _SUMS[update.op](value, update.arrays[0].astype(value.dtype))
    if update.op in ("rows_add", "rows_sub"):
        value = value.copy()
        rows, change = update.arrays
        _SUMS[update.op].at(value, rows, change.astype(value.dtype))
    elif update.op == "rows_assign":
        value = value.copy()
        value[update.arrays[0]] = update.arrays[1]
    return value  # gradients: only the server's optimizer knows what they do


def _applied_to_rows(rows: np.ndarray, values: np.ndarray, update: Update) -> np.ndarray:
    if update.op == "assign":
        return update.arrays[0][rows].astype(values.dtype)
    if update.op in ("add", "sub"):
        change = np.broadcast_to(update.arrays[0], update.spec.shape)[rows]
        return _SUMS[update.op](values, change.astype(values.dtype))
    if update.op not in ("rows_add", "rows_sub", "rows_assign"):
        return values
    values = values.copy()
    for row, change in zip(update.arrays[0].tolist(), update.arrays[1], strict=True):
        at = rows == row
        if update.op == "rows_assign":
            values[at] = change
        else:
            values[at] = _SUMS[update.op](values[at], change.astype(values.dtype))
    return values
