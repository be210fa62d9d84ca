"""Processes of one host that sum arrays in memory which all of them map.

Gloo sends each byte through TCP on loopback: into the kernel, out of it, and into a buffer. Here a
process writes what others need into shared memory once, and each sums a share of it, as NCCL and
MPI do within a host. They wait for each other at Unix sockets, so a wait costs no CPU time, and the
end of a process is an error in all others at once. Both are Linux's own: a name in the abstract
space, which ends with its process and its network namespace, and a file without a name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import _compat
from .membership import Membership

SHARED_MEMORY = "MESHWRIGHT_SHARED_MEMORY"  # "0": processes of one host sum through gloo, too
_WINDOW = 32 << 20  # bytes that each process writes at once, so that the memory stays small
_BLOCK = 1 << 19  # bytes that are added at once
_TOKEN = struct.Struct("=QQ")  # the number of the wait, and the bytes that are then summed
_LINE = 64  # bytes: no two processes write to one line of a cache
_CONNECT_S = 10.0
_KEY = "meshwright/neighbors"


# Short copies keep Python's lock: to take it again beside a busy thread may last 5 ms.
_move_short, _move_long = ctypes.PyDLL(None).memmove, ctypes.CDLL(None).memmove
_move_short.argtypes = _move_long.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SHORT = 4 << 20


class Span(NamedTuple):
    """Where an array lies in the memory of this process."""

    address: int
    nbytes: int


class Neighbors:
    """This process among those of its host: rank, sockets to the others, and the shared file."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], memory: int) -> None:
        self.rank, self.count = rank, len(peers) + 1
        self._peers, self._memory = peers, memory
        self._rows: Any = None
        self._number = 0

    def sum(self, sources: Sequence[Span], targets: Sequence[Span]) -> None:
        """Write the sums of float32 arrays over all processes; a source may be its own target.

        One process adds each share, so all get the same bits. Raises ``ConnectionError`` when
        another process has ended, or sums something else.
        """
        nbytes = sum(span.nbytes for span in sources)
        for start in range(0, nbytes, _WINDOW):
            self._sum_window(sources, targets, start, min(start + _WINDOW, nbytes))

    def _sum_window(
        self, sources: Sequence[Span], targets: Sequence[Span], start: int, stop: int
    ) -> None:
        """Sum a cut of the arrays, taken as if they lay behind each other."""
        share = -(-(stop - start) // (self.count * _LINE)) * _LINE
        rows = self._shared(share * self.count, stop)

        def share_of(rank: int) -> tuple[int, int]:
            first = min(start + rank * share, stop)
            return first, min(first + share, stop)

        def sums_of(rank: int) -> Any:  # of two, the row that was just read: it is in the cache
            return rows[1 - rank if self.count == 2 else self.count]

        first, last = share_of(self.rank)
        for cut in ((start, first), (last, stop)):
            _gather(sources, *cut, rows[self.rank][cut[0] - start :])
        self._wait(stop)
        others = [row for i, row in enumerate(rows[: self.count]) if i != self.rank]
        for at in range(first, last, _BLOCK):  # which stays in the cache
            end = min(at + _BLOCK, last)
            _add(sources, targets, at, end, [row[at - start :] for row in others])
            _gather(targets, at, end, sums_of(self.rank)[at - start :])
        self._wait(stop)
        for rank in range(self.count):
            if rank != self.rank:
                cut = share_of(rank)
                _scatter(sums_of(rank)[cut[0] - start :], targets, *cut)

    def close(self) -> None:
        """Leave the others. Safe to call twice."""
        for peer in self._peers.values():
            peer.close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _wait(self, stop: int) -> None:
        """Return when all have come here: after ``log2`` of their number of exchanges."""
        self._number += 1
        token, distance = _TOKEN.pack(self._number, stop), 1
        while distance < self.count:
            receiver = (self.rank + distance) % self.count
            sender = (self.rank - distance) % self.count
            try:
                self._peers[receiver].sendall(token)
                received = self._peers[sender].recv(_TOKEN.size, socket.MSG_WAITALL)
            except OSError as error:
                raise _ended(receiver if isinstance(error, BrokenPipeError) else sender) from error
            if len(received) < _TOKEN.size:
                raise _ended(sender)
            if received != token:
                raise ConnectionError(
                    f"rank {sender} sums {_TOKEN.unpack(received)[1]} bytes and rank {self.rank} "
                    f"{stop}: their programs differ"
                )
            distance *= 2

    def _shared(self, nbytes: int, stop: int) -> Any:
        """A row of bytes for each process, and one for sums; the memory grows when it must.

        Two need none for sums: what one writes into the other's row, that one reads alone.
        """
        import numpy as np

        if self._rows is None or self._rows.shape[1] < nbytes:
            self._wait(stop)  # until no process reads the rows as they were
            rows = 2 if self.count == 2 else self.count + 1
            whole = nbytes * rows
            if os.fstat(self._memory).st_size < whole:
                os.ftruncate(self._memory, whole)
            memory = np.frombuffer(mmap.mmap(self._memory, whole), np.uint8)
            self._rows = memory.reshape(rows, nbytes)
        return self._rows


def _ended(rank: int) -> ConnectionError:
    return ConnectionError(f"rank {rank} has ended while gradients were summed")


def _gather(spans: Sequence[Span], start: int, stop: int, row: Any) -> None:
    """Copy a cut of arrays to the beginning of a row."""
    place = row.ctypes.data
    for address, offset, nbytes in _pieces(spans, start, stop):
        _move(place + offset, address, nbytes)


def _scatter(row: Any, spans: Sequence[Span], start: int, stop: int) -> None:
    """Copy the beginning of a row to a cut of arrays."""
    place = row.ctypes.data
    for address, offset, nbytes in _pieces(spans, start, stop):
        _move(address, place + offset, nbytes)


def _add(
    sources: Sequence[Span], targets: Sequence[Span], start: int, stop: int, rows: Sequence[Any]
) -> None:
    """Write a cut of arrays plus the beginnings of rows to the same cut of other arrays."""
    import numpy as np

    pieces = zip(_pieces(sources, start, stop), _pieces(targets, start, stop), strict=True)
    for (source, offset, nbytes), (target, _, _) in pieces:
        value, total = _floats(source, nbytes), _floats(target, nbytes)
        for row in rows:
            np.add(value, row[offset : offset + nbytes].view("f"), out=total)
            value = total


def _floats(address: int, nbytes: int) -> Any:
    import numpy as np

    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, "f")


def _move(target: int, source: int, nbytes: int) -> None:
    (_move_short if nbytes <= _SHORT else _move_long)(target, source, nbytes)


def _pieces(spans: Sequence[Span], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The pieces of a cut: their addresses, where they lie within the cut, and their bytes."""
    offset = 0
    for address, nbytes in spans:
        first, last = max(start, offset), min(stop, offset + nbytes)
        if first < last:
            yield address + first - offset, first - start, last - first
        offset += nbytes


_neighbors: Neighbors | None = None


def neighbors() -> Neighbors | None:
    """The memory that this group shares; ``None`` if it lies on several hosts, or cannot."""
    return _neighbors


def meet(member: Membership, wait_s: float) -> None:
    """Share memory with all processes of the group if they run on one host, and all of them can.

    They ask each other through JAX's coordination service.
    """
    global _neighbors
    if member.processes < 2:
        return
    store = _compat.GroupStore(_KEY, wait_s)
    host = _host()
    if member.rank == 0:
        store.set("host", f"{host} {secrets.token_hex(16)}")
    theirs, name = store.get("host").split(" ")
    listener = _listener(name, member.rank) if host and theirs == host else None
    try:
        if _all_agree(store, "here", member, listener is not None) and listener is not None:
            connections = _connected(name, member, listener)
            if _all_agree(store, "met", member, connections is not None):
                _neighbors = connections
    finally:
        if listener is not None:
            listener.close()


def _host() -> str:
    """What processes that can reach each other's sockets have in common; empty where none can."""
    if os.environ.get(SHARED_MEMORY) == "0" or not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').readlink()}/{os.getuid()}"
    except OSError:
        return ""


def _all_agree(store: Any, what: str, member: Membership, own: bool) -> bool:
    """Whether all processes say yes; rank 0 counts."""
    store.set(f"{what}/{member.rank}", str(own))
    if member.rank == 0:
        answers = [store.get(f"{what}/{rank}") for rank in range(member.processes)]
        store.set(what, str(all(answer == "True" for answer in answers)))
    return store.get(what) == "True"


def _listener(name: str, rank: int) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_address(name, rank))
    except OSError:
        listener.close()
        return None
    listener.listen()
    listener.settimeout(_CONNECT_S)
    return listener


def _address(name: str, rank: int) -> str:
    return f"\0meshwright-{name}-{rank}"


def _connected(name: str, member: Membership, listener: socket.socket) -> Neighbors | None:
    """Connected to all others; rank 0 has made the memory."""
    peers: dict[int, socket.socket] = {}
    try:
        for rank in range(member.rank):
            peers[rank] = _reached(_address(name, rank), member.rank)
        peers |= dict(_accepted(listener, member))
        if member.rank == 0:
            memory = os.memfd_create("meshwright")
            for peer in peers.values():
                socket.send_fds(peer, [b"m"], [memory])
        else:
            memory = socket.recv_fds(peers[0], 1, 1)[1][0]
    except (OSError, IndexError):
        for peer in peers.values():
            peer.close()
        return None
    for peer in peers.values():
        peer.settimeout(None)
    return Neighbors(member.rank, peers, memory)


def _reached(address: str, own: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(_CONNECT_S)
    peer.connect(address)
    peer.sendall(own.to_bytes(4, "big"))
    return peer


def _accepted(listener: socket.socket, member: Membership) -> Iterator[tuple[int, socket.socket]]:
    for _ in range(member.rank + 1, member.processes):
        peer, _ = listener.accept()
        peer.settimeout(_CONNECT_S)
        yield int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big"), peer
