"""Channels within one process: they share a core, also from several threads, and never hang."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from answering import WAIT_S, Asked

from meshwright.errors import UnreachableError
from meshwright.ps.wire.memory import MemoryChannel
from meshwright.ps.wire.message import Message


def test_channels_of_one_name_do_not_take_each_others_answers() -> None:
    core = Asked()
    one, other = MemoryChannel(core, "ps:0"), MemoryChannel(core, "ps:0")
    numbers = [one.send(Message("echo", {"n": 1})), other.send(Message("echo", {"n": 2}))]
    one.close()
    assert other.wait(numbers[1]).head["n"] == 2


def test_an_answer_may_come_from_what_another_thread_does() -> None:
    core = Asked()

    def release() -> None:
        while "later" not in core.kinds:
            time.sleep(0.005)
        MemoryChannel(core, "ps:0", identity="worker:1").ask(Message("now"))

    thread = threading.Thread(target=release)
    thread.start()
    channel = MemoryChannel(core, "ps:0", identity="worker:0")
    assert channel.ask(Message("later")).head["was"] == "late"
    thread.join(WAIT_S)


def test_a_core_is_called_by_one_thread_at_a_time() -> None:
    core = Asked()

    def add(worker: int) -> None:
        channel = MemoryChannel(core, "ps:0", identity=f"worker:{worker}")
        for _ in range(200):
            channel.ask(Message("add", {}, (np.ones(3),)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(4)))
    assert core.total == 4 * 200 * 3


def test_what_nobody_can_answer_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = MemoryChannel(Asked(), "ps:0")
    late = channel.send(Message("later"))
    with pytest.raises(UnreachableError, match=r"after 0\.1 s; it waits for what another task"):
        channel.wait(late, 0.1)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with pytest.raises(UnreachableError, match="no task in this process does it"):
        channel.wait(late)


@pytest.mark.parametrize("size", [10, 5_000, 100_000])
def test_what_is_sent_does_not_change_with_its_array(size: int) -> None:
    array = np.ones(size)
    channel = MemoryChannel(Asked(), "ps:0")
    number = channel.send(Message("echo", {}, (array,)))
    array[:] = 7
    assert (channel.wait(number).arrays[0] == 1).all()
