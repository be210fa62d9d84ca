"""Shared memory: who agrees to it, that nothing of it stays, and that blocks are used again."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import KEYS, WAIT_S, Asked, serving
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ProtocolError
from meshwright.ps.wire import segments
from meshwright.ps.wire import shared as sharing
from meshwright.ps.wire.message import Message, encode, open_first
from meshwright.ps.wire.segments import Segment
from meshwright.ps.wire.shared import ALIGNED_BYTES, Shared, Space
from meshwright.ps.wire.sockets import SocketChannel

LARGE = np.arange(100_000, dtype=np.float32)
HELLO = Message("hello")


@pytest.fixture(params=[True, False] if segments._UNNAMED else [False], ids=["unnamed", "named"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where segments are made that have a name, and nothing else is."""
    monkeypatch.setattr(segments, "_UNNAMED", request.param)
    monkeypatch.setattr(segments, "_folders", lambda: [tmp_path])
    return tmp_path


@pytest.fixture
def ends(folder: Path) -> Iterator[tuple[Shared, Shared]]:
    one = Shared.offer()
    assert one is not None
    other = Shared.accepting(one.offered)
    assert other is not None
    one.hear(other.notes())
    yield one, other
    one.close()
    other.close()


def carried(sender: Shared, receiver: Shared, array: np.ndarray) -> tuple[np.ndarray, int]:
    """The array at the other end, and how many bytes went in frames."""
    frames = encode(Message("push", {}, (array,)), 1, sender.place, sender.notes)
    opened = open_first(bytes(frames[0]))
    receiver.hear(opened.notes)
    return receiver.take(opened.arrays[0]), sum(map(len, frames))


@given(st.lists(st.one_of(st.integers(0, 700), st.integers(-9, -1)), max_size=60))
def test_blocks_never_overlap_and_all_room_comes_back(moves: list[int]) -> None:
    space = Space(2048)
    record: dict[int, int] = {}
    for move in moves:
        if move >= 0:
            start = space.take(move)
            stops = -(-max(1, move) // ALIGNED_BYTES) * ALIGNED_BYTES
            if start is None:
                ends = sorted([0, *record, *record.values(), 2048])
                gaps = [b - a for a, b in zip(ends[::2], ends[1::2], strict=True)]
                assert max(gaps) < stops
            else:
                assert start % ALIGNED_BYTES == 0
                assert start + stops <= 2048
                assert all(start + stops <= a or b <= start for a, b in record.items())
                record[start] = start + stops
        elif record:
            start = list(record)[move % len(record)]
            space.give(start)
            space.give(start)
            del record[start]
        assert space.taken_bytes == sum(b - a for a, b in record.items())
    for start in record:
        space.give(start)
    assert space.take(2048) == 0


def test_large_arrays_are_carried_by_memory_and_leave_no_file(
    ends: tuple[Shared, Shared], folder: Path
) -> None:
    one, other = ends
    for sender, receiver in ((one, other), (other, one)):
        result, num_bytes = carried(sender, receiver, LARGE)
        np.testing.assert_array_equal(result, LARGE)
        assert num_bytes < 300
        assert not result.flags.writeable
    assert list(folder.iterdir()) == []


def test_a_block_is_used_again_when_no_array_lies_in_it(ends: tuple[Shared, Shared]) -> None:
    one, other = ends
    array, _ = carried(one, other, LARGE)
    view = array[10:].reshape(2, -1)
    del array
    addresses = set()
    for n in range(20):
        result, _ = carried(one, other, LARGE + n)
        assert result[0] == n
        addresses.add(result.ctypes.data)
        del result
        carried(other, one, LARGE)  # its notes tell of the free blocks
    assert len(addresses) <= 3
    assert view[0, 0] == 10
    assert view.ctypes.data - 40 not in addresses


def test_segments_grow_as_they_are_needed(ends: tuple[Shared, Shared], folder: Path) -> None:
    one, other = ends
    arrays = [carried(one, other, np.full(200_000, float(n)))[0] for n in range(12)]
    assert all((array == n).all() for n, array in enumerate(arrays))
    sizes = [segment.num_bytes for segment in one._filled.segments]
    assert sizes == sorted(sizes)
    assert len(sizes) <= 6
    assert sum(sizes) <= 4 * sum(array.nbytes for array in arrays)
    assert list(folder.iterdir()) == []


def test_beyond_the_limit_arrays_travel_in_frames(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LIMIT_BYTES", 2 << 20)
    with connected() as channel:
        replies = [channel.ask(Message("echo", {}, (np.full(50_000, n),))) for n in range(30)]
        shared = channel._shared
        assert shared is not None
        assert sum(one.num_bytes for one in shared._filled.segments) <= 2 << 20
    assert all((answer.arrays[0] == n).all() for n, answer in enumerate(replies))


def test_where_memory_is_short_arrays_travel_in_frames(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = segments._reserve

    def full(fd: int, num_bytes: int) -> None:
        if num_bytes > 4096:
            raise OSError(28, "No space left on device")
        reserve(fd, num_bytes)

    monkeypatch.setattr(segments, "_reserve", full)
    with connected() as channel:
        (result,) = channel.ask(Message("echo", {}, (LARGE,))).arrays
        np.testing.assert_array_equal(result, LARGE)
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"host": "another"},
        {"probe": "meshwright-" + "0" * 32},
        {"probe": "../../etc/passwd"},
        {"probe": f"meshwright-{'0' * 32}@{os.getpid()}:0"},
        {"probe": f"meshwright-{'0' * 32}@1000000000:0"},
        {"probe": 3},
        {"host": None},
    ],
)
def test_an_offer_that_cannot_be_kept_is_not_agreed_to(folder: Path, change: Any) -> None:
    one = Shared.offer()
    assert one is not None
    assert Shared.accepting({**one.offered, **change}) is None
    assert len(list(folder.iterdir())) == (0 if segments._UNNAMED else 1)
    one.close()
    one.close()
    assert list(folder.iterdir()) == []


def test_a_peer_on_another_host_is_served_by_frames(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shared, "accepting", classmethod(lambda cls, offered: None))
    with connected() as channel:
        (result,) = channel.ask(Message("echo", {}, (LARGE,))).arrays
        np.testing.assert_array_equal(result, LARGE)
        assert channel._shared is None
        assert list(folder.iterdir()) == []


def test_nobody_elses_file_is_opened_or_removed(folder: Path) -> None:
    name = "meshwright-" + "a" * 32
    (folder / "precious").write_bytes(bytes(4096))
    (folder / name).symlink_to(folder / "precious")
    with pytest.raises(OSError, match="symbolic"):
        Segment.find(name, 4096)
    (folder / name).unlink()
    (folder / name).write_bytes(bytes(4096))  # readable to others
    with pytest.raises(OSError, match="not as its peer described"):
        Segment.find(name, 4096)
    assert (folder / name).exists()
    assert (folder / "precious").exists()


@pytest.mark.parametrize("place", [[0, 1 << 40], [0, -64], [9, 0], [0], ["a", 0], 7])
def test_a_place_that_is_none_is_refused(ends: tuple[Shared, Shared], place: Any) -> None:
    one, other = ends
    carried(one, other, LARGE)
    frames = encode(Message("push", {}, (LARGE,)), 1, lambda array: place)
    with pytest.raises(ProtocolError, match="does not lie where a message says"):
        other.take(open_first(bytes(frames[0])).arrays[0])


def test_arrays_outlive_the_channel(folder: Path) -> None:
    with connected() as channel:
        (result,) = channel.ask(Message("echo", {}, (LARGE,))).arrays
    gc.collect()
    np.testing.assert_array_equal(result, LARGE)


@contextmanager
def connected() -> Iterator[SocketChannel]:
    """A channel with shared memory, to a listener in a thread."""
    with (
        serving(Asked(), keys=KEYS.of("ps")) as listener,
        SocketChannel(listener.address, KEYS.of("worker"), "ps:0", hello=HELLO) as channel,
    ):
        channel.connect(WAIT_S)
        yield channel


CLIENT = """
import sys, time
import numpy as np
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.sockets import SocketChannel
channel = SocketChannel(sys.argv[1], None, "ps:0", hello=Message("hello"))
channel.connect(20)
held = [channel.ask(Message("echo", {}, (np.ones(n * 50_000),)), 20) for n in range(1, 9)]
print(channel._shared is not None and channel._shared.agreed, flush=True)
time.sleep(60)
"""


def test_a_killed_client_leaves_no_memory_behind() -> None:
    with serving(Asked()) as listener:
        before = set(_system_segments())
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, listener.address],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline() == "True\n"
        finally:
            for client in clients:
                client.send_signal(signal.SIGKILL)
                client.wait(WAIT_S)
                assert client.stdout is not None
                client.stdout.close()
        assert set(_system_segments()) == before
        assert len(listener._shared) == 2
        with SocketChannel(listener.address, None, "ps:0", hello=HELLO) as another:
            another.connect(WAIT_S)
            until = time.monotonic() + WAIT_S
            while len(listener._shared) > 1 and time.monotonic() < until:
                time.sleep(0.01)
            assert len(listener._shared) == 1


def _system_segments() -> list[str]:
    shm = Path("/dev/shm")
    return [path.name for path in shm.glob("meshwright-*")] if shm.is_dir() else []
