"""Large arrays between two tasks of one host, through memory that both have mapped.

Messages still go over the channel, so a peer that is not admitted there gets nothing here; they
hold only the position of an array. Each direction has segments of its own. Its sender fills them,
and makes new ones of twice the size when they are full. A block is free again when the receiver has
dropped the last array in it and says so in the notes of its next message: the contents of an array
do not change while it is held. Ray's Plasma and BytePS share memory in the same way.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import ProtocolError
from .message import Described, Place
from .segments import Segment, host

LIMIT_BYTES = 512 << 20  # for each direction of a channel; beyond it arrays travel in frames
_FIRST_BYTES = 1 << 20
_PROBE_BYTES = 4096
ALIGNED_BYTES = 64  # a line of the processor's cache, and what JAX wants of an array it may keep


class Shared:
    """The shared memory of one channel, seen from one of its ends.

    One end makes an :meth:`offer`, in the notes of its first message; the other one answers it
    with :meth:`accepting`, if it can. Both then pass every message's notes to :meth:`hear`.
    """

    def __init__(self, probe: Segment, *, agreed: bool) -> None:
        self._probe = probe
        self._filled = _Filled()
        self._peers: list[Segment] = []
        self._freed: deque[tuple[int, int]] = deque()  # filled as arrays go, from any thread
        self._agreeing = agreed  # yet to be told
        self.agreed = agreed

    @classmethod
    def offer(cls) -> Shared | None:
        """A new one that the peer has yet to agree to, or ``None``: this host has no memory."""
        try:
            return cls(Segment.make(_PROBE_BYTES), agreed=False)
        except OSError:
            return None

    @classmethod
    def accepting(cls, offered: Mapping[str, Any]) -> Shared | None:
        """The other end of an offer; ``None`` where it comes from another host."""
        try:
            if offered["host"] != host():
                return None
            return cls(Segment.find(offered["probe"], _PROBE_BYTES), agreed=True)
        except (OSError, KeyError, TypeError):
            return None

    @property
    def offered(self) -> dict[str, Any]:
        """The offer, as the peer must hear it."""
        return {"host": host(), "probe": self._probe.name}

    def place(self, array: np.ndarray) -> Place | None:
        """Copy an array to where the peer can see it; ``None`` where there is no room left."""
        return self._filled.place(array) if self.agreed else None

    def take(self, described: Described) -> np.ndarray:
        """The array that the peer has placed: a view that does not change while it is held."""
        try:
            segment, offset = described.content  # type: ignore[misc]
            if segment < 0 or not 0 <= offset <= self._peers[segment].num_bytes:
                raise IndexError(f"there is no place {segment}, {offset}")  # NumPy takes any
            block = _Block((described.num_bytes,), np.uint8, self._peers[segment].memory, offset)
            array = np.ndarray(described.shape, described.dtype, block)
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"an array does not lie where a message says: {error}.") from error
        block.place = (segment, offset)
        block.freed = self._freed
        return array

    def notes(self) -> dict[str, Any]:
        """What the next message must carry to the peer: new segments, and free blocks."""
        notes: dict[str, Any] = {}
        if self._agreeing:
            notes["agreed"], self._agreeing = True, False
        if self._filled.untold:
            notes["segments"] = self._filled.untold
            self._filled.untold = []
        if self._freed:
            notes["free"] = [self._freed.popleft() for _ in range(len(self._freed))]
        return notes

    def hear(self, notes: Mapping[str, Any]) -> None:
        """Take in the notes of a message from the peer, before its arrays are taken."""
        self.agreed = self.agreed or notes.get("agreed") is True
        try:
            for name, num_bytes in notes.get("segments", ()):
                self._peers.append(Segment.find(name, num_bytes))
            for segment, offset in notes.get("free", ()):
                self._filled.free(segment, offset)
        except (OSError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"shared memory cannot be used: {error}.") from error

    def peer_is_gone(self) -> bool:
        """Whether the process that made the offer has ended (asked at the other end)."""
        return self._probe.owner_is_gone()

    def close(self) -> None:
        """Release all segments; safe to call twice, and arrays that are held stay."""
        for segment in (self._probe, *self._peers, *self._filled.segments):
            segment.close()


class _Filled:
    """The segments of the direction in which this end sends."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.untold: list[tuple[str, int]] = []
        self._spaces: list[Space] = []

    def place(self, array: np.ndarray) -> Place | None:
        place = self._find(array.nbytes)
        if place is None and self._grow(array.nbytes):
            place = self._find(array.nbytes)
        if place is None:
            return None
        segment, offset = place
        there = np.ndarray(array.shape, array.dtype, self.segments[segment].memory, offset)
        np.copyto(there, array)
        return place

    def _find(self, num_bytes: int) -> tuple[int, int] | None:
        for segment, space in enumerate(self._spaces):
            offset = space.take(num_bytes)
            if offset is not None:
                return segment, offset
        return None

    def free(self, segment: int, offset: int) -> None:
        self._spaces[segment].give(offset)

    def _grow(self, num_bytes: int) -> bool:
        so_far = sum(space.num_bytes for space in self._spaces)
        grown_bytes = max(_FIRST_BYTES, so_far, 1 << (num_bytes - 1).bit_length())
        size = min(grown_bytes, LIMIT_BYTES - so_far)
        if size < num_bytes:
            return False
        try:
            segment = Segment.make(size)
        except OSError:
            return False  # such memory is short (a container has 64 MiB): frames will do
        self.segments.append(segment)
        self.untold.append((segment.name, size))
        self._spaces.append(Space(size))
        return True


class _Block(np.ndarray):
    """The base of an array in shared memory: says that its place is free when it goes."""

    place: tuple[int, int] | None = None
    freed: deque[tuple[int, int]] | None = None

    def __del__(self) -> None:
        if self.freed is not None and self.place is not None:
            self.freed.append(self.place)


class Space:
    """Blocks in a run of ``num_bytes`` bytes; holds no memory itself.

    >>> space = Space(256)
    >>> space.take(100), space.take(100), space.take(100)
    (0, 128, None)
    >>> space.give(0)
    >>> space.take(10)
    0
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)]  # start and stop, in order; no two touch
        self._spans: dict[int, int] = {}  # start -> stop

    @property
    def taken_bytes(self) -> int:
        return sum(stop - start for start, stop in self._spans.items())

    def take(self, num_bytes: int) -> int | None:
        """The start of a block that was free, or ``None``: no free block is as large."""
        size = max(1, -(-num_bytes // ALIGNED_BYTES)) * ALIGNED_BYTES
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                spare = [(start + size, stop)] if stop - start > size else []
                self._free[index : index + 1] = spare
                self._spans[start] = start + size
                return start
        return None

    def give(self, start: int) -> None:
        """Free the block that starts here; one that is not taken is ignored."""
        stop = self._spans.pop(start, None)
        if stop is None:
            return
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
