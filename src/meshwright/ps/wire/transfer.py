"""A message into and out of a ZeroMQ socket, without more copies than the socket itself makes."""

from __future__ import annotations

import numpy as np
import zmq

from ...errors import ProtocolError
from .message import PIECE_BYTES, Described, Frames, Opened, array_of, num_pieces
from .shared import Shared

# Plain integers: `|` on pyzmq's own flags costs more than a message's head.
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)
_RCVMORE, _EVENTS, _POLLIN = int(zmq.RCVMORE), int(zmq.EVENTS), int(zmq.POLLIN)

Socket = zmq.Socket[bytes]


class NotShared(ProtocolError):
    """A message refers to memory that this end does not share, or no longer."""


def send_frames(socket: Socket, frames: Frames, flags: int = 0) -> None:
    """Send one message; with ``NOBLOCK`` only its first frame can fail, then none is sent."""
    for frame in frames[:-1]:
        socket.send(frame, flags | SNDMORE)
    socket.send(frames[-1], flags)


def has_more(socket: Socket) -> bool:
    """Whether the message that is being read has more frames."""
    return bool(socket.getsockopt(_RCVMORE))


def has_message(socket: Socket) -> bool:
    """Whether a message can be read at once."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def skip(socket: Socket) -> None:
    """Throw away what is left of the message that is being read."""
    while has_more(socket):
        socket.recv()


def read_arrays(socket: Socket, opened: Opened, shared: Shared | None) -> tuple[np.ndarray, ...]:
    """The arrays of the message whose first frame has been opened, and the rest of its frames.

    Raises :class:`~meshwright.errors.ProtocolError` where they do not fit; some of the frames may
    then be left for :func:`skip`.
    """
    arrays = tuple([_array(socket, one, shared) for one in opened.arrays])
    if has_more(socket):
        raise ProtocolError("a message has more frames than its arrays need.")
    return arrays


def _array(socket: Socket, one: Described, shared: Shared | None) -> np.ndarray:
    if one.content is None:
        return array_of(one, _joined(socket, one.num_bytes))
    if isinstance(one.content, bytes):
        return array_of(one, one.content)
    if shared is None:
        raise NotShared("a message refers to shared memory, but none was agreed upon.")
    return shared.take(one)


def _joined(socket: Socket, num_bytes: int) -> np.ndarray:
    # The pieces go straight to where they belong: ZeroMQ keeps none of them.
    try:
        whole = np.empty(num_bytes, np.uint8)
    except (MemoryError, ValueError) as error:
        raise ProtocolError(f"a message announces an array of {num_bytes} bytes.") from error
    view = whole.data
    for piece in range(num_pieces(num_bytes)):
        part = view[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]
        if not has_more(socket) or socket.recv_into(part) != len(part):
            raise ProtocolError("a message has fewer bytes than its arrays need.")
    return whole
