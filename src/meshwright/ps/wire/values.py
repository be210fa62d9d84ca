"""Results of functions as plain values and arrays, and back: no pickle, so no code can hide in one.

A tree of ``None``, numbers, texts, bytes, tuples, lists, dicts and arrays becomes a head that
msgpack can hold, and a tuple of arrays. Python's types come back exactly; an array of JAX comes
back as NumPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ProtocolError, ShippingError
from .message import dtype_name
from .owned import owned

MOST_LEVELS = 100  # of lists in lists; a deeper one holds itself, or had better be an array
_WHAT_MAY = (
    "None, bool, int, float, complex, str, bytes, NumPy and JAX arrays and scalars, and tuples, "
    "lists and dicts of these"
)
# Whatever is no plain value of msgpack becomes a list that opens with one of these.
_TUPLE, _LIST, _DICT, _INT, _COMPLEX, _TEXT, _SCALAR, _ARRAY = range(8)
_SELF = (type(None), bool, float, bytes)


def pack_value(value: object) -> tuple[Any, tuple[np.ndarray, ...]]:
    """A value as a head of plain values and arrays, which later changes of it do not reach.

    Raises :class:`~meshwright.errors.ShippingError` that lists every part that cannot travel.

    >>> head, arrays = pack_value({"loss": np.float32(0.5), "shape": (3, 4)})
    >>> unpack_value(head, arrays)
    {'loss': np.float32(0.5), 'shape': (3, 4)}
    """
    packing = _Packing()
    head = packing.head(value, "the value", 0)
    if packing.faults:
        listed = "\n".join(f"  {fault}" for fault in packing.faults)
        raise ShippingError(
            f"a result cannot travel between tasks:\n{listed}\nWhat may travel: {_WHAT_MAY}."
        )
    return head, tuple(packing.arrays)


def unpack_value(head: Any, arrays: tuple[np.ndarray, ...] = ()) -> Any:
    """The value that :func:`pack_value` made these of; arrays are not copied.

    Raises :class:`~meshwright.errors.ProtocolError` where they hold no value.
    """
    try:
        return _value(head, arrays)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a value from another task cannot be read: {error!r}.") from error


class _Packing:
    """One value on its way into a head: the arrays met so far, and every fault."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.faults: list[str] = []

    def head(self, value: Any, path: str, level: int) -> Any:
        kind = type(value)
        if kind in _SELF:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else [_INT, _int_bytes(value)]
        if kind is str:
            return value if value.isascii() else [_TEXT, value.encode("utf-8", "surrogatepass")]
        if kind is complex:
            return [_COMPLEX, value.real, value.imag]
        if kind in (tuple, list, dict):
            return self._nested(value, path, level)
        if isinstance(value, np.generic):
            return self._array(np.asarray(value), _SCALAR, path)
        return self._other(value, path)

    def _nested(self, value: Any, path: str, level: int) -> Any:
        if level >= MOST_LEVELS:
            self._fault(path, f"is nested more than {MOST_LEVELS} levels deep")
            return None
        if type(value) is dict:
            pairs = []
            for key, item in value.items():
                packed_key = self.head(key, f"the key {key!r} of {path}", level + 1)
                pairs.append([packed_key, self.head(item, f"{path}[{key!r}]", level + 1)])
            return [_DICT, pairs]
        items = [self.head(item, f"{path}[{i}]", level + 1) for i, item in enumerate(value)]
        return [_TUPLE if type(value) is tuple else _LIST, items]

    def _other(self, value: Any, path: str) -> Any:
        # JAX's arrays are known by their module: this room never imports JAX.
        module = type(value).__module__.partition(".")[0]
        if type(value) is np.ndarray or module in ("jax", "jaxlib"):
            try:
                return self._array(np.asarray(value), _ARRAY, path)
            except Exception as error:
                self._fault(path, f"is a {_type_name(value)} and not an array of numbers: {error}")
                return None
        self._fault(path, f"is a {_type_name(value)}")
        return None

    def _array(self, array: np.ndarray, tag: int, path: str) -> Any:
        try:
            dtype_name(array.dtype)
        except ShippingError:
            self._fault(path, f"is an array of dtype {array.dtype}")
            return None
        self.arrays.append(owned(array))
        return [tag, len(self.arrays) - 1]

    def _fault(self, path: str, what: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(f"{path} {what}.")


def _value(head: Any, arrays: tuple[np.ndarray, ...]) -> Any:
    if not isinstance(head, list):
        return head
    tag, *rest = head
    if tag in (_TUPLE, _LIST):
        items = [_value(item, arrays) for item in rest[0]]
        return tuple(items) if tag == _TUPLE else items
    if tag == _DICT:
        return {_value(key, arrays): _value(item, arrays) for key, item in rest[0]}
    if tag == _INT:
        return int.from_bytes(rest[0], "little", signed=True)
    if tag == _TEXT:
        return rest[0].decode("utf-8", "surrogatepass")
    if tag == _COMPLEX:
        return complex(*rest)
    if tag == _SCALAR:
        return arrays[rest[0]][()]
    if tag == _ARRAY:
        return arrays[rest[0]]
    raise ValueError(f"unknown tag of a value: {tag!r}")


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _type_name(value: object) -> str:
    kind = type(value)
    room = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{room}{kind.__qualname__}"
