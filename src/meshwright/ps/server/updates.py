"""The updates of one push: checked before anything is changed, then applied one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ArrayError, ModelError, ProtocolError, TaskError
from .codecs import decode_gradient
from .groups import AVERAGE, Groups, begin_averages
from .rounds import Gradient
from .rows import add_rows, subtract_rows
from .shards import Shard
from .store import Store


@dataclass(frozen=True)
class Change:
    """One checked update that is not a gradient."""

    op: str
    shard: Shard
    values: np.ndarray  # those that are sent; the shard's own where none are
    rows: np.ndarray | None = None

    def apply(self) -> None:
        """Change the variable, in place."""
        OPS[self.op](self.shard.full() if self.rows is not None else self.shard.values, self)
        self.shard.changed(self.rows)


def _into(table: np.ndarray, change: Change, ufunc: np.ufunc) -> None:
    ufunc(table, change.values, out=table, casting="same_kind")


def _rows_assign(table: np.ndarray, change: Change) -> None:
    table[change.rows] = change.values


def _average(table: np.ndarray, change: Change) -> None:
    begin_averages(change.shard)
    np.copyto(table, change.shard.slot(AVERAGE))


OPS: dict[str, Callable[[np.ndarray, Change], Any]] = {
    "assign": lambda table, change: np.copyto(table, change.values, casting="same_kind"),
    "add": lambda table, change: _into(table, change, np.add),
    "sub": lambda table, change: _into(table, change, np.subtract),
    "average": _average,
    "rows_assign": _rows_assign,
    "rows_add": lambda table, change: add_rows(table, np.asarray(change.rows), change.values),
    "rows_sub": lambda table, change: subtract_rows(table, np.asarray(change.rows), change.values),
}
GRADIENTS = ("gradient", "rows_gradient")


@dataclass(frozen=True)
class Checked:
    """What a push asks for, all of it possible."""

    changes: tuple[Change, ...]
    gradients: tuple[Gradient, ...]


def check_updates(
    store: Store,
    groups: Groups,
    updates: Sequence[Sequence[Any]],
    arrays: Sequence[np.ndarray],
    staleness: int,
) -> Checked:
    """Check every update of a push against the store; changes nothing but to make hashed rows.

    Each update is [name, op, number of arrays, options], and takes its arrays in turn. Raises
    an error that names all that is wrong.
    """
    if sum(int(update[2]) for update in updates) != len(arrays):
        raise ProtocolError(
            f"a push of {len(updates)} updates brings {len(arrays)} arrays, and says that they "
            f"are {sum(int(update[2]) for update in updates)}."
        )
    shards = store.get(update[0] for update in updates)
    changes: list[Change] = []
    gradients: list[Gradient] = []
    faults: list[Exception] = []
    start = 0
    for shard, (_, op, count, options) in zip(shards, updates, strict=True):
        own = arrays[start : start + count]
        start += count
        try:
            if op in GRADIENTS:
                gradients.append(_gradient(groups, shard, op, own, options or {}, staleness))
            else:
                changes.append(_change(shard, op, own))
        except (ArrayError, ModelError, TaskError) as fault:
            faults.append(fault)
    if faults:
        raise _all_of(faults)
    return Checked(tuple(changes), tuple(gradients))


def _change(shard: Shard, op: str, arrays: Sequence[np.ndarray]) -> Change:
    if op not in OPS:
        raise TaskError(f"unknown operation {op!r}; expected one of {', '.join(_ALL)}.")
    by_rows = op.startswith("rows_")
    count = 0 if op == "average" else 1 + by_rows
    if len(arrays) != count:
        raise ArrayError(f"{op} of {shard.name!r} takes {count} arrays, not {len(arrays)}.")
    if op == "average" and AVERAGE not in shard.slots:
        raise ModelError(f"{shard.name!r} has no averages: its optimizer needs use_ema=True.")
    values = arrays[-1] if arrays else shard.values
    if not np.can_cast(values.dtype, shard.dtype, "same_kind"):
        raise ArrayError(
            f"{op} of {shard.name!r}, which is {shard.dtype}; received {values.dtype}."
        )
    if by_rows:
        rows = _rows(shard, arrays[0], values)
        return Change(op, shard, values, rows)
    _check_shape(shard, op, values)
    return Change(op, shard, values)


def _check_shape(shard: Shard, op: str, values: np.ndarray) -> None:
    if values.shape == shard.shape:
        return
    try:
        fits = np.broadcast_shapes(values.shape, shard.shape) == shard.shape
    except ValueError:
        fits = False
    if not fits:
        raise ArrayError(
            f"{op} of {shard.name!r}, which has shape {list(shard.shape)} here; received shape "
            f"{list(values.shape)}."
        )


def _rows(shard: Shard, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    if values.shape != (len(rows) if rows.ndim else 0, *shard.row_shape):
        raise ArrayError(
            f"{rows.size} rows of {shard.name!r}, each of shape {list(shard.row_shape)}; received "
            f"values of shape {list(values.shape)}."
        )
    return shard.positions(rows)


def _gradient(
    groups: Groups,
    shard: Shard,
    op: str,
    arrays: Sequence[np.ndarray],
    options: Mapping[str, Any],
    staleness: int,
) -> Gradient:
    group = groups.of(shard.name)
    if group is None:
        raise ModelError(
            f"variable {shard.name!r} has no optimizer here, so a gradient means nothing to it. "
            "Send the optimizer first."
        )
    scale = float(options.get("scale", 1.0))
    if options.get("staleness"):
        scale /= max(1, staleness)
    codec, compensation = options.get("codec"), float(options.get("compensation") or 0.0)
    together, adaptive = str(options.get("together") or ""), bool(options.get("adaptive"))
    if op == "gradient":
        values = decode_gradient(codec, arrays, shard.shape)
        _check_float(shard, op, values)
        return Gradient(shard.name, values, None, scale, compensation, together, adaptive)
    if not arrays or not shard.shape:
        raise ArrayError(f"{op} of {shard.name!r} takes rows and their values.")
    values = decode_gradient(codec, arrays[1:], (len(arrays[0]), *shard.row_shape))
    _check_float(shard, op, values)
    rows = _rows(shard, arrays[0], values)
    if not adaptive:  # rows are corrected before they are unscaled
        compensation /= group.twin.loss_scale_factor or 1.0
    return Gradient(shard.name, values, rows, scale, compensation, together, adaptive)


def _check_float(shard: Shard, op: str, values: np.ndarray) -> None:
    if values.dtype.kind != "f":
        raise ArrayError(f"{op} of {shard.name!r} takes floats; received {values.dtype}.")


def _all_of(faults: Sequence[Exception]) -> Exception:
    if len(faults) == 1:
        return faults[0]
    listed = "\n".join(f"- {fault}" for fault in faults)
    return ArrayError(f"a push is refused as a whole, for {len(faults)} of its updates:\n{listed}")


_ALL = (*OPS, *GRADIENTS)
