"""A variable on the servers, as the user holds it: in the coordinator and inside functions."""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ArrayError, TaskError
from ..worker.context import Context, current
from ..worker.updates import Update
from .cutting import checked_rows
from .placing import ShardPlace, VariableSpec

_FITS_ALL = 6e4  # floats of every size hold it

Initial = tuple[Mapping[str, Any], np.ndarray | None, tuple[int, ...], str]


class Variable:
    """A variable that lies on the servers, made by ``strategy.variable``.

    Inside a scheduled function, changes are kept until the function returns and are then applied
    once, whatever happens to the worker; the function's own reads see them. Outside, they are
    applied at once. A variable travels to workers as a reference, not as its values.

    >>> import meshwright as mw
    >>> with mw.ParameterServer() as strategy:
    ...     count = strategy.variable(np.zeros(2), name="count")
    ...     count.assign_add([1.0, 2.0])
    ...     print(count.name, count.shape, count.read())
    count (2,) [1. 2.]
    """

    def __init__(self, spec: VariableSpec, home: Any = None) -> None:
        self.spec = spec
        self._home = home  # the strategy; None on a worker

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.spec.dtype)

    @property
    def shards(self) -> tuple[ShardPlace, ...]:
        """Where its rows lie: server, first row and end of each shard."""
        return self.spec.shards

    def read(self) -> np.ndarray:
        """The whole value, as the servers have it now. For a scalar, NumPy's.

        Raises :class:`~meshwright.errors.UnreachableError` where a server does not answer.
        """
        context = self._context()
        if context is None:
            return self._outside(lambda servers: servers.read([self.spec])[0])[()]
        is_local = context.updates.sets(self.name)
        value = (
            np.empty(self.shape, self.dtype) if is_local else context.servers.read([self.spec])[0]
        )
        return context.updates.seen(self.spec, value)[()]

    def lookup(self, rows: Any) -> np.ndarray:
        """Some rows, in the order asked for; only they travel.

        ``rows`` may have any dims, as ids of an embedding have: the result has the shape
        ``(*rows.shape, *row)``. Raises :class:`~meshwright.errors.ArrayError` for an unknown row.
        """
        ids = np.asarray(rows)
        values = self._rows(ids.reshape(-1))
        return values.reshape(*ids.shape, *values.shape[1:])

    def _rows(self, rows: np.ndarray) -> np.ndarray:
        rows = checked_rows(self.spec, rows)  # none may be given as an empty list of floats
        context = self._context()
        if context is None:
            return self._outside(lambda servers: servers.lookup(self.spec, rows))
        values = context.servers.lookup(self.spec, rows)
        return context.updates.seen_rows(self.spec, rows, values)

    def __getitem__(self, key: Any) -> np.ndarray:
        """Part of the value, by NumPy's rules: ``variable[2:5]``, ``variable[rows, 0]``.

        Only the rows that the first index picks travel. Raises ``IndexError`` for a row that is not
        there, and :class:`~meshwright.errors.ArrayError` for a scalar or a hash table.
        """
        if not self.shape or self.spec.is_hash:
            kind = "a hash table: use lookup(keys)" if self.spec.is_hash else "a scalar: use read()"
            raise ArrayError(f"variable {self.name!r} cannot be sliced: it is {kind}.")
        first, *rest = key if isinstance(key, tuple) and key else (key,)
        if first is None or first is Ellipsis or not all(map(_is_basic, rest)):
            return self.read()[key]
        rows = np.asarray(np.arange(self.shape[0])[first])
        values = self.lookup(rows.reshape(-1)).reshape(*rows.shape, *self.shape[1:])
        return values[(*[slice(None)] * rows.ndim, *rest)]

    __iter__ = None  # each row would be a message of its own: loop over read()

    def assign(self, value: Any) -> None:
        """Set the whole value."""
        self._change("assign", self._whole(value))

    def assign_add(self, value: Any) -> None:
        """Add to the whole value; concurrent adds lose nothing."""
        self._change("add", self._whole(value))

    def assign_sub(self, value: Any) -> None:
        """Subtract from the whole value."""
        self._change("sub", self._whole(value))

    def rows_assign(self, rows: Any, values: Any) -> None:
        """Set some rows; of a repeated one, the last value stays."""
        self._change("rows_assign", *self._by_rows(rows, values))

    def rows_add(self, rows: Any, values: Any) -> None:
        """Add to some rows; a repeated one gets both values."""
        self._change("rows_add", *self._by_rows(rows, values))

    def rows_sub(self, rows: Any, values: Any) -> None:
        """Subtract from some rows."""
        self._change("rows_sub", *self._by_rows(rows, values))

    def __repr__(self) -> str:
        return f"Variable({self.name!r}, shape={self.shape}, dtype={self.spec.dtype})"

    def __reduce__(self) -> Any:
        return Variable, (self.spec,)

    def elsewhere(self, strategy: Any) -> str:
        """What is wrong where it lies on other servers than those of this strategy, or nothing.

        Servers know variables by their names, and another strategy may have one of this name.
        """
        if self._home is None or self._home.has_servers_of(strategy):
            return ""
        return (
            f"variable {self.name!r} was made by another strategy, and lies on servers that this "
            "one does not use. Use it with that strategy and its coordinator, or read() it and "
            "pass the value."
        )

    def _change(self, op: str, *arrays: np.ndarray) -> None:
        if self.dtype.kind == "b" and op in ("sub", "rows_sub"):
            raise ArrayError(
                f"variable {self.name!r} holds booleans, from which nothing can be subtracted. "
                "Make it with dtype='int32'."
            )
        update = Update(self.spec, op, arrays)
        context = self._context()
        if context is None:
            self._outside(lambda servers: servers.push([update]))
        else:
            context.change(update)

    def _context(self) -> Context | None:
        context = current()
        if context is None and self._home is None:
            raise TaskError(
                f"variable {self.name!r} is a reference, and there is no worker here that could "
                "follow it. Use the variable in a function that the coordinator schedules."
            )
        return context

    def _outside(self, do: Any) -> Any:
        return self._home.with_servers(do)

    def _numbers(self, value: Any) -> np.ndarray:
        try:
            array = np.asarray(value)
        except ValueError:  # lists of several lengths
            array = np.empty((), object)
        if not _is_of_numbers(array.dtype):
            raise ArrayError(
                f"variable {self.name!r} of dtype {self.dtype} takes real numbers; received "
                f"{reprlib.repr(value)}."
            )
        if array.dtype == self.dtype:
            return array
        fitted = _fitted(array, self.dtype, self.name)
        fitted.flags.writeable = False  # a new array: no copy is needed to send it
        return fitted

    def _whole(self, value: Any) -> np.ndarray:
        array = self._numbers(value)
        if array.shape != self.shape:
            try:
                # What is kept is the full array: a server takes no shape but the shard's own.
                array = np.broadcast_to(array, self.shape)
            except ValueError:
                raise ArrayError(
                    f"variable {self.name!r} has shape {self.shape}; received a value of shape "
                    f"{array.shape}."
                ) from None
        return array

    def _by_rows(self, rows: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = np.asarray(rows)
        expected = (len(rows) if rows.ndim else 0, *self.shape[1:])
        array = self._numbers(values)
        if not self.shape or rows.ndim != 1 or array.shape != expected:
            raise ArrayError(
                f"variable {self.name!r} of shape {self.shape} takes one dim of row numbers and "
                f"values of shape (rows, *{self.shape[1:]}); received rows of shape {rows.shape} "
                f"and values of shape {array.shape}."
            )
        return checked_rows(self.spec, rows), array


def _is_basic(index: Any) -> bool:
    """Whether NumPy takes an index dim by dim, and does not pair it with that of another dim."""
    return index is Ellipsis or index is None or isinstance(index, int | np.integer | slice)


def initial(value: Any, shape: Sequence[int] | None = None, dtype: Any = None) -> Initial:
    """How servers make it, the value (if it is one), the shape and the dtype's name.

    A Python float is float32, an int int32, and an array keeps its dtype, as in TensorFlow. Raises
    :class:`~meshwright.errors.ArrayError` where shape or value are missing or do not agree, for a
    dtype that servers do not hold, and for a value that the dtype cannot hold.

    >>> initial(0.0)
    ({'kind': 'value'}, array(0., dtype=float32), (), 'float32')
    >>> initial("zeros", (2, 3))
    ({'kind': 'zeros', 'params': {}, 'seed': None}, None, (2, 3), 'float32')
    >>> initial(np.zeros(2))[3]
    'float64'
    """
    rule = _rule(value)
    if rule is None:
        return _value(value, shape, dtype)
    if shape is None:
        raise ArrayError(f"a variable made by {rule['kind']!r} needs a shape: shape=(rows, ...).")
    if rule["kind"] not in ("zeros", "ones", "constant") and rule["seed"] is None:
        rule = {**rule, "seed": int.from_bytes(os.urandom(4), "little")}
    return rule, None, _dims(shape), _held("float32" if dtype is None else dtype)


def _dims(shape: Any) -> tuple[int, ...]:
    try:
        dims = tuple(operator.index(dim) for dim in shape)
    except TypeError:
        dims = (-1,)
    if min(dims, default=0) < 0:
        raise ArrayError(
            f"shape={shape!r}: a shape is a tuple of whole numbers, at least 0, such as (3, 2)."
        )
    return dims


def _value(value: Any, shape: Sequence[int] | None, dtype: Any) -> Initial:
    array = np.asarray(value)
    _held(array.dtype if dtype is None else dtype)
    if dtype is not None:
        array = _converted(array, np.dtype(dtype))
    elif not hasattr(value, "dtype") and array.dtype == np.float64:  # of Python's floats
        array = _converted(array, np.dtype("float32"))
    elif isinstance(value, int) and not isinstance(value, bool):
        array = _converted(array, np.dtype("int32"))
    if shape is not None and (dims := _dims(shape)) != array.shape:
        try:
            array = np.broadcast_to(array, dims)
        except ValueError:
            raise ArrayError(f"a value of shape {array.shape} does not fill {dims}.") from None
    return (
        {"kind": "value"},
        np.ascontiguousarray(array).reshape(array.shape),
        array.shape,
        array.dtype.name,
    )


def _held(dtype: Any) -> str:
    """The name of a dtype of numbers. Servers refuse bfloat16, by the name of the variable."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or not _is_of_numbers(kind) or kind.itemsize > 8:  # no long doubles
        shown = dtype if kind is None else kind.str
        raise ArrayError(
            f"a variable of dtype {shown!r} is not supported by servers, which hold floats, "
            "integers and booleans of NumPy. Pass numbers, or another dtype=."
        )
    return kind.name


def _is_of_numbers(dtype: np.dtype) -> bool:
    """Whether it is of real numbers, of NumPy or of ``ml_dtypes``."""
    return dtype.kind in "fiub" or (dtype.kind == "V" and not dtype.name.startswith("void"))


def _fitted(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """What is assigned, added or subtracted: a whole number is not made of a fraction."""
    if dtype.kind in "iu" and array.dtype.kind not in "iub":
        lost = array[(array != np.trunc(array)) | np.isinf(array)]
        if lost.size:
            raise ArrayError(
                f"variable {name!r} holds whole numbers ({dtype}); received {lost[0]}. Round it, "
                "or make the variable with dtype='float32'."
            )
    return _converted(array, dtype)


def _converted(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy with the same numbers, rounded; none may be too large."""
    if array.dtype == dtype:
        return array.copy()
    if dtype.kind == "f" and array.ndim == 0 and abs(float(array)) <= _FITS_ALL:
        return array.astype(dtype)  # the checks below slow counters by a tenth
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            there = array.astype(dtype)
        except (TypeError, ValueError) as error:
            raise ArrayError(
                f"a value of dtype {array.dtype} cannot be stored as {dtype}: {error}. Pass "
                "numbers."
            ) from error
        is_float, is_bool = dtype.kind in "fV", dtype.kind == "b"
        same = np.isinf(there) == np.isinf(array) if is_float else there == np.trunc(array)
    lost = array[~np.asarray(same)]
    if lost.size and not is_bool:
        raise ArrayError(
            f"value {lost[0]} cannot be stored as {dtype}. Make the variable with a dtype that "
            "holds it, such as 'float64' or 'int64'."
        )
    return there


def _rule(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        return {"kind": value, "params": {}, "seed": None}
    if isinstance(value, Mapping):
        return _checked_rule({"params": {}, "seed": None, **value})
    get_config: Any = getattr(value, "get_config", None)
    if get_config is not None:  # one of Keras'
        config = dict(get_config())
        seed = config.pop("seed", None)
        kind = _snake(type(value).__name__)
        if type(value).__module__.partition(".")[0] != "keras":
            raise ArrayError(
                f"initializer {kind!r} is a class of your own, which servers do not have. Pass its "
                "values, initializer(shape)."
            )
        params = {key: _plain(kind, key, one) for key, one in config.items()}
        return {"kind": kind, "params": params, "seed": seed if isinstance(seed, int) else None}
    return None


def _checked_rule(rule: dict[str, Any]) -> dict[str, Any]:
    """A mapping of the user's own; raises :class:`ArrayError` with all that is wrong with it."""
    kind, params, seed = rule.get("kind"), rule["params"], rule["seed"]
    faults = []
    if not isinstance(kind, str):
        faults.append(f"kind must be a name, such as 'normal'; received {kind!r}.")
    if not isinstance(params, Mapping | None):
        faults.append(f"params must be a mapping, such as {{'stddev': 0.1}}; received {params!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer | None):
        faults.append(f"seed must be a whole number or None; received {seed!r}.")
    if faults:
        raise ArrayError("\n".join(f"an initializer's {fault}" for fault in faults))
    return {**rule, "seed": None if seed is None else int(seed)}


def _plain(kind: str, name: str, value: Any) -> int | float | str:
    """What an initializer takes, as a message holds it."""
    number = np.asarray(value).item() if np.ndim(value) == 0 else None
    if not isinstance(number, int | float | str):
        raise ArrayError(
            f"initializer {kind!r} has {name}={value!r}; servers take one number. Pass its values, "
            "initializer(shape)."
        )
    return number


def _snake(name: str) -> str:
    parts = "".join(f" {letter}" if letter.isupper() else letter for letter in name).split()
    kind = "_".join(parts).lower()
    return {"random_normal": "normal", "random_uniform": "uniform"}.get(kind, kind)
