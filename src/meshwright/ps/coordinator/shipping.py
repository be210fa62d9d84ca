"""Functions and their arguments as bytes: cloudpickle, with large arrays beside them.

Only a coordinator packs, and only its workers unpack, over channels that both have proved the keys
of. Nothing else that comes from the network is ever unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...errors import ShippingError

_OUT_OF_BAND_BYTES = 4096  # smaller buffers travel within the bytes
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), complex})

_copies: weakref.WeakValueDictionary[tuple[int, int], np.ndarray] = weakref.WeakValueDictionary()

Packed = tuple[bytes, tuple[np.ndarray, ...]]
Replace = Callable[[Any], Any]


def pack(
    value: Any, replace: Replace | None = None, what: str = "a value", out_of_band: bool = True
) -> Packed:
    """The bytes of a value, and its large buffers (within the bytes if not ``out_of_band``).

    Both are copies, so what is changed in the value afterwards does not travel.
    ``replace`` may give another object's ``__reduce__`` form for objects that stay here, or
    ``None``. Raises :class:`~meshwright.errors.ShippingError`, which names ``what``.
    """
    if _is_plain(value):
        return pickle.dumps(value, protocol=5), ()
    import cloudpickle

    buffers: list[np.ndarray] = []

    def aside(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not in one run of memory
            return True
        if raw.nbytes < _OUT_OF_BAND_BYTES or not out_of_band:
            return True
        buffers.append(_as_it_is_now(np.frombuffer(raw, np.uint8)))
        return False

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            replaced = None if replace is None else replace(obj)
            return super().reducer_override(obj) if replaced is None else replaced

    target = io.BytesIO()
    try:
        Pickler(target, protocol=5, buffer_callback=aside).dump(value)
    except ShippingError:
        raise
    except Exception as error:
        raise ShippingError(
            f"{what} cannot be sent to a worker: {type(error).__name__}: {error}. Make what it "
            "holds inside the function, or pass it as plain values and arrays."
        ) from error
    return target.getvalue(), tuple(buffers)


def _as_it_is_now(buffer: np.ndarray) -> np.ndarray:
    """A copy of memory that may be overwritten; an equal one that still lives serves as well."""
    if not buffer.flags.writeable:
        return buffer
    place = buffer.ctypes.data, buffer.nbytes
    copy = _copies.get(place)
    if copy is None or not np.array_equal(copy, buffer):
        copy = _copies[place] = buffer.copy()
    return copy


def unpack(data: bytes, buffers: tuple[np.ndarray, ...] = ()) -> Any:
    """What :func:`pack` packed. The buffers are copied, so that the value owns its memory.

    Raises :class:`~meshwright.errors.ShippingError` where a module is missing here.
    """
    try:
        return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])
    except (ImportError, AttributeError) as error:
        raise ShippingError(
            f"a function or its arguments cannot be read on the worker: {error}. "
            "Install there the same packages, in the same versions, as the coordinator has."
        ) from error


def key_of(data: bytes, buffers: tuple[np.ndarray, ...] = ()) -> str:
    """A key for a packed function: equal bytes have equal keys."""
    digest = hashlib.blake2b(data, digest_size=16)
    for buffer in buffers:
        digest.update(buffer.data)
    return digest.hexdigest()


def name_of(function: Any) -> str:
    """How a user would call this function.

    >>> name_of(len), name_of(functools.partial(max, 1))
    ('len', 'partial(max)')
    """
    if isinstance(function, functools.partial):
        return f"partial({name_of(function.func)})"
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.replace("<locals>.", "")


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator, whose elements the coordinator hands out one by one.

    Bytes and text in memory are values: Keras pickles its models and optimizers as such.

    >>> is_iterator(iter([1, 2])), is_iterator(io.BytesIO(b"lines"))
    (True, False)
    """
    return isinstance(value, Iterator) and not isinstance(value, io.BytesIO | io.StringIO)


def _is_plain(value: Any, levels: int = 20) -> bool:
    """Whether ``pickle`` alone can do it: the usual ``(args, kwargs)`` of numbers and texts."""
    if type(value) in _PLAIN:
        return True
    if type(value) in (tuple, list):
        return levels > 0 and all(map(_is_plain, value, itertools.repeat(levels - 1)))
    return type(value) is dict and not value
