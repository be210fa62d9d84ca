"""A message between two tasks: a kind, a head of plain values, and arrays as raw buffers.

On the wire it is several frames: the mark of the protocol with its version, the head in msgpack,
then one frame for each array. Nothing here opens a socket, and nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from ...errors import ProtocolError

PROTOCOL = 1  # raised with every change that an older peer would misunderstand
_MARK = b"meshwright-ps/"

Frames = Sequence[bytes | memoryview]


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


def encode(message: Message) -> list[bytes | memoryview]:
    """The frames of a message; arrays are not copied where they lie in one run of memory."""
    arrays = [np.ascontiguousarray(array).reshape(array.shape) for array in message.arrays]
    described = [(_dtype_name(array.dtype), array.shape) for array in arrays]
    head = msgpack.packb((message.kind, message.head, described), use_bin_type=True)
    buffers = (memoryview(array.reshape(-1).view(np.uint8)) for array in arrays)
    return [_MARK + str(PROTOCOL).encode(), head, *buffers]


def decode(frames: Frames) -> Message:
    """The message of these frames; its arrays are views of them, and not to be written to.

    Raises :class:`~meshwright.errors.ProtocolError` for another version or a broken message.
    """
    if len(frames) < 2:
        raise ProtocolError(f"a message has {len(frames)} frames, where at least 2 belong.")
    check_version(bytes(frames[0]))
    try:
        kind, head, described = msgpack.unpackb(frames[1], raw=False, strict_map_key=False)
        arrays = tuple(
            np.frombuffer(buffer, np.dtype(dtype)).reshape(shape)
            for (dtype, shape), buffer in zip(described, frames[2:], strict=True)
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message cannot be read: {error}.") from error
    return Message(kind, head, arrays)


def check_version(mark: bytes) -> None:
    """Raise :class:`~meshwright.errors.ProtocolError` unless the peer speaks this version."""
    if not mark.startswith(_MARK):
        raise ProtocolError("a peer sent something that is no message of Meshwright's.")
    theirs = mark.removeprefix(_MARK).decode(errors="replace")
    if theirs != str(PROTOCOL):
        raise ProtocolError(
            f"this task speaks version {PROTOCOL} of the protocol, and its peer version {theirs}. "
            "Run the same version of Meshwright in every task."
        )


def _dtype_name(dtype: np.dtype) -> str:
    # NumPy has no code of its own for bfloat16 and its like: they go by name (ml_dtypes).
    return dtype.str if dtype.kind != "V" else dtype.name
