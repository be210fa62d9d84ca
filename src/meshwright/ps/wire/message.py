"""A message between two tasks: a kind, a head of plain values, and arrays as raw buffers.

On the wire its first frame is the mark of the protocol with its version and then, in msgpack, the
head, what the arrays are, and the small arrays themselves: most messages are this one frame. A
larger array follows in frames of at most :data:`PIECE_BYTES`, so that one piece is encrypted while
another is on its way; or it lies in shared memory (:mod:`meshwright.ps.wire.shared`).
Nothing here opens a socket, and nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

from ...errors import ProtocolError, ShippingError

PROTOCOL = 2  # raised with every change that an older peer would misunderstand
INLINE_BYTES = 16 << 10  # an array smaller than this travels inside the first frame
PIECE_BYTES = 128 << 10
_MARK = b"meshwright-ps/"
_PREFIX = _MARK + str(PROTOCOL).encode() + b"\n"
# In msgpack an array is a count and then its items, here: kind, head, arrays, notes.
_ARRAY_OF_4 = b"\x94"
_NO_ARRAYS_NO_NOTES = b"\x90\xc0"

Frames = Sequence[bytes | memoryview]
Place = Sequence[int]  # segment, offset: where an array lies in shared memory


@dataclass(frozen=True)
class Message:
    """One message: ``kind``, plain values in ``head``, and ``arrays``.

    >>> import numpy as np
    >>> sent = Message("push", {"step": 7}, (np.arange(3.0),))
    >>> got = decode(encode(sent))
    >>> got.kind, got.head, got.arrays
    ('push', {'step': 7}, (array([0., 1., 2.]),))
    """

    kind: str
    head: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[np.ndarray, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


class Described(NamedTuple):
    """One array in a first frame: its bytes (a small one), its place, or ``None``: frames follow.

    The frames are as many as :func:`num_pieces` says.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    content: bytes | Place | None

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= dim
        return size


class Opened(NamedTuple):
    """What a first frame holds; ``notes`` are the transport's own, such as what may be reused."""

    kind: str
    head: dict[str, Any]
    arrays: tuple[Described, ...]
    notes: dict[str, Any]


def encode(
    message: Message,
    number: int | None = None,
    place: Callable[[np.ndarray], Place | None] | None = None,
    notes: Callable[[], Mapping[str, Any]] | None = None,
) -> list[bytes | memoryview]:
    """The frames of a message; a large array is not copied where it lies in one run of memory.

    ``number`` goes into the head as ``"id"``. ``place`` may put a large array into shared memory
    and say where it lies; ``notes``, called after it, are what the transport itself has to tell.
    Raises :class:`~meshwright.errors.ShippingError` for a head that holds more than plain values,
    or an array of objects.
    """
    head = message.head if number is None else {**message.head, "id": number}
    pack = _packers.pack
    try:
        packed_head = pack(message.kind) + pack(head)
    except (TypeError, ValueError, OverflowError) as error:
        raise ShippingError(
            f"the head of message {message.kind!r} cannot travel: {error}. It may hold None, "
            "booleans, 64-bit integers, floats, texts, bytes, and lists and dicts of these."
        ) from error
    if not message.arrays and notes is None:
        return [_PREFIX + _ARRAY_OF_4 + packed_head + _NO_ARRAYS_NO_NOTES]
    described, buffers = _describe(message.arrays, place)
    transport_notes = notes() if notes is not None else None  # of what has just been placed as well
    return [
        _PREFIX + _ARRAY_OF_4 + packed_head + pack(described) + pack(transport_notes or None),
        *buffers,
    ]


def decode(frames: Frames) -> Message:
    """The message of these frames; its arrays are not to be written to.

    Raises :class:`~meshwright.errors.ProtocolError` for another version or a broken message.
    """
    if not frames:
        raise ProtocolError("a message has no frames; expected at least 1.")
    opened = open_first(bytes(frames[0]))
    rest = list(frames[:0:-1])
    arrays = []
    for one in opened.arrays:
        if one.content is None:
            pieces = [rest.pop() for _ in range(min(num_pieces(one.num_bytes), len(rest)))]
            arrays.append(array_of(one, pieces[0] if len(pieces) == 1 else b"".join(pieces)))
        else:
            arrays.append(array_of(one, one.content))
    if rest:
        raise ProtocolError(f"a message has {len(rest)} frames more than its arrays need.")
    return Message(opened.kind, opened.head, tuple(arrays))


def open_first(frame: bytes) -> Opened:
    """Read the first frame of a message; raises :class:`~meshwright.errors.ProtocolError`."""
    if not frame.startswith(_PREFIX):
        check_version(frame.partition(b"\n")[0])
    try:
        packed = memoryview(frame)[len(_PREFIX) :]
        kind, head, described, notes = msgpack.unpackb(packed, strict_map_key=False)
        if type(kind) is not str or type(head) is not dict:
            raise ValueError("its kind must be a string, and its head a mapping")
        if notes is not None and type(notes) is not dict:
            raise ValueError("its notes must be a mapping")
        arrays = ()
        if described:
            arrays = tuple([Described(dtype_of(d), _dims(dims), c) for d, dims, c in described])
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message cannot be read: {error}.") from error
    return Opened(kind, head, arrays, notes or {})


def array_of(described: Described, buffer: Any) -> np.ndarray:
    """The array that these bytes hold: a view of them that is not to be written to."""
    try:
        array = np.frombuffer(buffer, described.dtype)
        array = array.reshape(described.shape)
    except (ValueError, TypeError) as error:
        raise ProtocolError(
            f"an array of a message cannot be read: it is {described.dtype} of shape "
            f"{described.shape}, and {error}."
        ) from error
    array.flags.writeable = False
    return array


def check_version(mark: bytes) -> None:
    """Raise :class:`~meshwright.errors.ProtocolError` unless the peer speaks this version."""
    if not mark.startswith(_MARK):
        raise ProtocolError("a peer sent something that is not a Meshwright message.")
    theirs = mark.removeprefix(_MARK)[:20].decode(errors="replace")
    if theirs != str(PROTOCOL):
        raise ProtocolError(
            f"this task speaks version {PROTOCOL} of the protocol, and its peer version {theirs}. "
            "Run the same version of Meshwright in every task."
        )


def num_pieces(num_bytes: int) -> int:
    """The number of frames of an array of ``num_bytes`` bytes.

    >>> num_pieces(400_000)
    4
    """
    return -(-num_bytes // PIECE_BYTES)


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype on the wire.

    NumPy has no code of its own for bfloat16 and similar types: they go by name (ml_dtypes). Raises
    :class:`~meshwright.errors.ShippingError` for objects and records.
    """
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        raise ShippingError(f"an array of dtype {dtype} cannot travel: it holds no plain numbers.")
    name = dtype.str if dtype.kind != "V" else dtype.name
    if name.startswith("void"):
        raise ShippingError(f"an array of dtype {dtype} cannot travel: it holds no plain numbers.")
    return name


@functools.lru_cache(256)  # bounded: the names come from the peer
def dtype_of(name: str) -> np.dtype:
    """The dtype of a name from the wire; raises ``TypeError`` or ``ValueError`` if there is none.

    >>> dtype_of("<f4")
    dtype('float32')
    """
    if name.isidentifier() and name.startswith(("bfloat", "float", "int", "uint")):
        dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    else:
        dtype = np.dtype(name)
    if dtype.hasobject:  # NumPy would read the peer's bytes as addresses
        raise TypeError(f"expected a dtype of plain numbers; received {name!r}")
    return dtype


def _describe(
    arrays: tuple[np.ndarray, ...], place: Callable[[np.ndarray], Place | None] | None
) -> tuple[list[tuple[str, tuple[int, ...], bytes | Place | None]], list[memoryview]]:
    """The arrays' dtypes, shapes and contents, and the frames of those that follow in frames."""
    names = [dtype_name(array.dtype) for array in arrays]  # all, before one takes up any room
    described, buffers = [], []
    for name, array in zip(names, arrays, strict=True):
        content: bytes | Place | None = None
        if array.nbytes < INLINE_BYTES:
            content = array.tobytes()
        elif place is not None:
            content = place(array)
        if content is None:
            buffers.extend(pieces_of(array))
        described.append((name, array.shape, content))
    return described, buffers


def pieces_of(array: np.ndarray, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """The bytes of an array in pieces, of its own memory where that is in one piece."""
    whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    for start in range(0, array.nbytes, piece_bytes):
        yield whole[start : start + piece_bytes]


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    dims = tuple(shape)
    if any(type(dim) is not int or dim < 0 for dim in dims):
        raise ValueError(f"expected a shape of non-negative integers; received {dims}")
    return dims


def _plain(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a value of type {type(value).__qualname__}")


class _Packers(threading.local):
    """A msgpack encoder for each thread: making one costs more than packing most messages."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(default=_plain, use_bin_type=True).pack


_packers = _Packers()
