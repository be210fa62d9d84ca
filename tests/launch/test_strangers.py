"""What a group does with messages of programs that do not belong to it, and with slow answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from meshwright.launch import join, nodes
from meshwright.launch.agreement import Attendance, Meeting, Party, differences
from meshwright.launch.doors import NO_KEYS, Entrance, Visit
from meshwright.launch.failure import Failure
from meshwright.launch.nodes import Hub, Spoke

FAILURE = Failure(1, 2, "n02", 17, "step", 3, "was killed")
NONSENSE = [
    [b"\xc1"],
    [b"two", b"frames"],
    [msgpack.packb([1, 2])],
    [msgpack.packb({"kind": "status"})],
    [msgpack.packb({"kind": "join", "host": 3, "processes": "x", "rank": None, "round": 0})],
    [msgpack.packb({"rank": "x", "host": "n", "pid": 1, "facts": {}, "round": 0, "processes": 2})],
    [msgpack.packb({"rank": 0, "host": "n", "pid": 1, "facts": 7, "round": 0, "processes": 2})],
]


def test_a_meeting_goes_on_after_messages_that_nobody_of_the_group_sends(tmp_path: Path):
    address = f"ipc://{tmp_path}/meeting"
    parties = [Party(rank, "n01", rank, {}) for rank in range(2)]
    with (
        contextlib.closing(Meeting(address, 2)),
        contextlib.closing(Visit(address, None, "it", 0)) as stranger,
        contextlib.closing(Attendance(address, parties[0], 2, 2.0)) as one,
        contextlib.closing(Attendance(address, parties[1], 2, 2.0)) as other,
    ):
        for frames in NONSENSE:
            stranger.socket.send_multipart(frames)
        one.say({"epochs": "3"})
        other.say({"epochs": "3"})
        assert one.answer()["seed"] == other.answer()["seed"]


def test_texts_that_look_like_json_and_are_not_are_compared_whole():
    parties = [Party(r, "n01", r, {"batch": f"{{'x': ({8 * r}, 4)}}"}) for r in range(2)]
    assert differences(parties)[0].startswith("batch: {'x': (0, 4)} on rank 0")


def test_the_hub_leaves_such_messages_out_and_takes_a_socket_over():
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    entrance = Entrance(None)
    entrance.listen(listener, "127.0.0.1")
    with (
        contextlib.closing(Hub(entrance, "127.0.0.1", 2, 2, 9.0)) as hub,
        contextlib.closing(Visit(f"tcp://{address}", None, "it", 0)) as stranger,
    ):
        for frames in NONSENSE:
            stranger.socket.send_multipart(frames)
        time.sleep(0.1)
        assert hub.exchange([], False, None, False) is None
        stranger.socket.send(msgpack.packb({"kind": "join", **HOST}) or b"")
        share = hub.meet(1, 2.0)
        assert share is not None
        assert share.total == 3


HOST: dict[str, Any] = {"processes": 2, "host": "n02", "rank": None, "round": 0}


def test_a_hub_that_decides_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nodes, "_DECISION_S", 0.4)
    router = zmq.Context.instance().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def decide() -> None:
        decides_s = time.monotonic() + 0.8
        while True:
            sender, _ = router.recv_multipart()
            ends = time.monotonic() > decides_s
            said = {"kind": "end", "failure": None, "why": None} if ends else {"kind": "heard"}
            if ends:
                said["failure"] = {**vars(FAILURE), "lines": []}
            router.send_multipart([sender, msgpack.packb(said) or b""])
            if ends:
                return

    monkeypatch.setattr(nodes, "group_keys", lambda _: None)
    thread = threading.Thread(target=decide)
    thread.start()
    try:
        with contextlib.closing(Spoke(f"127.0.0.1:{port}", True, 0.4)) as spoke:
            assert spoke.end(FAILURE, "") is None  # so the group is started again
        thread.join(5.0)
        with contextlib.closing(Spoke(f"127.0.0.1:{port}", True, 0.4)) as spoke:
            assert "does not say whether" in (spoke.end(FAILURE, "") or "")
    finally:
        router.close(0)


def test_agents_of_a_job_that_was_suspended_do_not_take_each_other_for_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(nodes, "_PAUSE_S", 0.2)
    with contextlib.closing(Spoke("127.0.0.1:9", False, 0.3)) as spoke:
        assert spoke.exchange([], False, None, False) is None
        time.sleep(0.5)  # it was stopped
        assert spoke.exchange([], False, None, False) is None
        until_s = time.monotonic() + 2.0
        while (failure := spoke.exchange([], False, None, False)) is None:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        assert "is out of reach" in failure.what


def test_a_meeting_that_anybody_can_reach_is_said_to_be_one(capfd: pytest.CaptureFixture[str]):
    join._warn_without_keys("tcp://n01:4711", None)
    join._warn_without_keys("ipc:///somewhere", None)
    assert capfd.readouterr().err == f"meshwright: the group meets at n01:4711: {NO_KEYS}\n"
