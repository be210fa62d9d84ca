"""A server as a process: it serves, tells the chief that it lives, and comes back after a kill."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import ProtocolError
from meshwright.launch.keys import Keys
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.sockets import Listener, SocketChannel

pytestmark = pytest.mark.alone
LIMIT_S = 60.0
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/ps0"


@pytest.fixture
def start(address: str, tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen] = []
    script = Path(__file__).with_name("server_process.py")

    def begin(*options: str) -> subprocess.Popen:
        command = [sys.executable, str(script), address, *options]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


@pytest.fixture
def channel(address: str) -> Iterator[SocketChannel]:
    with SocketChannel(address, None, "ps:0", timeout_s=LIMIT_S) as opened:
        yield opened


def create(channel: SocketChannel, name: str, shape: list[int], kind: str = "zeros") -> Message:
    head = {"name": name, "shape": shape, "dtype": "<f4", "init": {"kind": kind}}
    return channel.ask(Message("create", head))


def push(channel: SocketChannel, name: str, op: str, array: np.ndarray, step: int | None) -> dict:
    head = {"step": step, "updates": [[name, op, 1, {}]]}
    return dict(channel.ask(Message("push", head, (array,))).head)


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_a_server_serves_without_a_chief_and_ends_when_told(start, channel) -> None:
    process = start()
    create(channel, "w", [200_000])
    values = np.random.default_rng(0).normal(size=200_000).astype("f")
    for step in (0, 0, 1):
        push(channel, "w", "add", values, step)
    result = channel.ask(Message("read", {"names": ["w"]})).arrays[0]
    assert np.array_equal(result, values + values)
    channel.ask(Message("stop"))
    assert process.wait(LIMIT_S) == 0


def test_a_server_says_that_it_lives_also_to_a_chief_that_comes_late(
    start, channel, tmp_path
) -> None:
    chief = f"ipc://{tmp_path}/chief"
    keys = Keys.make()
    keys.save(tmp_path / "keys")
    start("--chief", chief, "--keys", str(tmp_path / "keys"))
    with Listener(chief, keys) as listener:
        beats: list[tuple[bytes, Message]] = []
        until(lambda: len(beats.extend(listener.poll(0.1)) or beats) >= 3, "no beats came")
    for peer, message in beats:
        assert peer == b"ps:0/alive"
        assert message.kind == "alive"
        assert (message.head["task"], message.head["generation"]) == ("ps:0", 0)


@pytest.mark.full
def test_a_server_ends_when_its_chief_has_gone(start, channel, tmp_path) -> None:
    chief = f"ipc://{tmp_path}/chief"
    with Listener(chief) as listener:
        process = start("--chief", chief, "--orphan", "1.5")
        create(channel, "w", [3])
        end = time.monotonic() + 3
        while time.monotonic() < end:
            for peer, message in listener.poll(0.1):
                listener.answer(peer, Message("ok"), message.head.get("id"))
        assert process.poll() is None
    assert process.wait(LIMIT_S) == 0


def test_terminating_saves_and_ends_well(start, channel, tmp_path) -> None:
    process = start("--directory", str(tmp_path), "--every", "1000")
    create(channel, "w", [3])
    push(channel, "w", "add", np.ones(3, "f"), 0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    start("--directory", str(tmp_path), "--generation", "1")
    assert channel.ask(Message("read", {"names": ["w"]})).arrays[0].tolist() == [1, 1, 1]


@pytest.mark.full
def test_a_killed_server_comes_back_with_its_last_snapshot(start, channel, tmp_path) -> None:
    options = ("--directory", str(tmp_path), "--every", "10")
    process = start(*options)
    create(channel, "w", [1000])
    random = np.random.default_rng(4)
    step = 0
    for generation in range(1, 6):
        version = total = 0
        pushes = int(random.integers(15, 60))
        while pushes > 0 or not (
            total or generation > 1
        ):  # a slow disk takes a while for the first
            pushes -= 1
            reply = push(channel, "w", "add", np.ones(1000, "f"), step)
            assert reply["applied"]
            version, total = reply["version"], reply["snapshot"]["version"]
            step += 1
        channel.ask(Message("fence", {"incarnation": f"old{generation}"}))
        process.kill()
        process.wait()
        process = start(*options, "--generation", str(generation))
        hello = channel.ask(Message("hello", {"task": "worker:0", "incarnation": "x"})).head
        assert hello["generation"] == generation
        assert total <= hello["version"] <= version
        values = channel.ask(Message("read", {"names": ["w"]})).arrays[0]
        assert (values == hello["version"]).all(), "all of a push, or nothing of it"
        with pytest.raises(ProtocolError, match="declared dead"):
            channel.ask(Message("hello", {"incarnation": "old1"}))


@pytest.mark.full_for("Adam")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_server_is_small_while_it_serves(optimizer, start, channel, tmp_path) -> None:
    """50 MB of variables, with up to twice as much of slots; all besides stays below 150 MB."""
    process = start("--directory", str(tmp_path), "--every", "6")
    names = [f"w{index}" for index in range(5)]
    for name in names:
        create(channel, name, [2_500_000])
    config = {"class_name": optimizer, "config": {}}
    channel.ask(Message("optimizer", {"group": "g", "config": config, "names": names}))
    gradient = np.ones(2_500_000, "f")
    for step in range(20):
        push(channel, names[step % 5], "gradient", gradient, step)
        channel.ask(Message("read", {"names": [names[step % 5]]}))
    until(lambda: channel.ask(Message("stats")).head["snapshots"] >= 2, "too few snapshots")
    stats = channel.ask(Message("stats")).head
    total_bytes = stats["variable_bytes"] + stats["slot_bytes"]
    assert total_bytes == {"SGD": 50_000_000, "Adam": 150_000_000}[optimizer]
    peak = peak_bytes(process.pid)
    more_bytes = peak - total_bytes
    print(f"a server with {total_bytes / 1e6:.0f} MB of state took {more_bytes / 1e6:.0f} MB more")
    assert more_bytes < 150e6
    modules = Path(f"/proc/{process.pid}/maps").read_text()
    assert "jaxlib" not in modules


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("the memory of another process is told by /proc")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    assert match is not None
    return int(match[1]) * 1024
