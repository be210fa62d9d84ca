"""Who may meet the launchers of a group, and what is said when a network fails."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port

from meshwright import ClusterError
from meshwright.launch.agreement import Attendance, Meeting, Party
from meshwright.launch.doors import group_keys
from meshwright.launch.joining import KEYS
from meshwright.launch.keys import Keys
from meshwright.launch.nodes import Hub, Share, Spoke, rendezvous

GROUPED = str(Path(__file__).parent / "grouped.py")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "keys.json", tmp_path / "others.json"
    for path in paths:
        Keys.make().save(path)
    return paths


@contextlib.contextmanager
def hub_at(address: str) -> Iterator[list[Share | None]]:
    """A hub that waits in a thread for one more host, and the share that it gets."""
    hub, shares = rendezvous(address, 2, 2), list[Share | None]()
    assert isinstance(hub, Hub)

    def meet() -> None:
        with contextlib.suppress(ClusterError):
            shares.append(hub.meet(1, 4.0))

    thread = threading.Thread(target=meet)
    thread.start()
    try:
        yield shares
    finally:
        thread.join()
        hub.close()


def test_a_host_with_the_same_keys_is_let_in_and_one_with_others_is_named(keys, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv(KEYS, str(keys[0]))
    with hub_at(address) as shares:
        monkeypatch.setenv(KEYS, str(keys[1]))
        stranger = rendezvous(address)
        assert isinstance(stranger, Spoke)
        with pytest.raises(
            ClusterError, match=rf"the rendezvous {address} .*{KEYS}=.*others\.json\. Use the same"
        ):
            stranger.meet(1, 8.0)
        stranger.close()
        assert not shares
        monkeypatch.setenv(KEYS, str(keys[0]))
        spoke = rendezvous(address)
        assert spoke.meet(1, 8.0) is not None
        spoke.close()
    assert shares[0] is not None
    assert shares[0].total == 2


def test_on_loopback_the_keys_are_those_of_the_user_and_elsewhere_their_absence_is_said(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(KEYS, raising=False)
    assert group_keys("127.0.0.1:1") == group_keys("tcp://localhost:2") is not None
    assert group_keys(f"ipc://{tmp_path}/meeting") is None
    assert group_keys("n01:7777") is None
    hub = rendezvous(f"0.0.0.0:{free_port()}")
    hub.close()
    assert "any program that reaches it may take part" in capsys.readouterr().err


def test_processes_with_other_keys_do_not_meet(keys):
    address = f"tcp://127.0.0.1:{free_port()}"
    meeting = Meeting(address, 1, 10.0, Keys.load(keys[0]))
    attendance = Attendance(address, Party(0, "n", 1, {}), 1, 10.0, Keys.load(keys[1]))
    try:
        with pytest.raises(ClusterError, match=r"rank 0 at tcp://127.* Use the same keys"):
            attendance.agree({})
    finally:
        attendance.close()
        meeting.close()


# Two hosts of a real network: namespaces with a cable between them


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """For each of two hosts, ``nodea`` at 10.77.0.1 and ``nodeb``, what to put before a command."""
    if os.getuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip and unshare")
    names, links = [f"mw{os.getpid()}{end}" for end in "ab"], [f"mw{end}" for end in "ab"]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.77.0.1 nodea\n10.77.0.2 nodeb\n")
    try:
        try:
            for name in names:
                _run("ip", "netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        # The ends of a cable are made inside, so that they meet no other's of the same name.
        inside = ("ip", "-n", names[0], "link")
        _run(*inside, "add", links[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        setup = f'hostname "$0" && mount --bind {hosts} /etc/hosts && exec "$@"'
        yield [
            ["ip", "netns", "exec", name, "unshare", "-mu", "sh", "-c", setup, f"node{end}"]
            for name, end in zip(names, "ab", strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.alone
@pytest.mark.full
def test_when_the_cable_is_cut_both_sides_name_the_other_and_end(two_hosts, tmp_path, keys):
    options = ["--processes", "1", "--devices", "1", "--nodes", "2", "--stall-timeout", "2"]
    launch = [sys.executable, "-m", "meshwright.cli", "launch", *options]
    command = [*launch, "--rendezvous", "10.77.0.1:7777", GROUPED, str(tmp_path), "goes on"]
    hosts = [
        subprocess.Popen(
            [*host, *command],
            env={**os.environ, KEYS: str(keys[0])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in two_hosts
    ]
    try:
        until_s = time.monotonic() + 90
        while not (tmp_path / "training").exists():
            assert time.monotonic() < until_s
            assert all(host.poll() is None for host in hosts), [h.communicate() for h in hosts]
            time.sleep(0.1)
        name = two_hosts[1][3]
        _run("ip", "-n", name, "link", "set", "mwb", "down")
        cut_s = time.monotonic()
        outputs = [host.communicate(timeout=60)[0] for host in hosts]
        took_s = time.monotonic() - cut_s
    finally:
        for host in hosts:
            host.kill()
            host.communicate()
    assert [host.returncode for host in hosts] == [1, 1], outputs
    assert re.search(r"rank 1 of 2 \(host nodeb\) is out of reach: .* silent for 2 s", outputs[0])
    assert "is out of reach: the agent at 10.77.0.1:7777 is silent" in outputs[1]
    assert took_s < 2 + 5 + 8  # to be named, for finally blocks in vain, and a busy host
