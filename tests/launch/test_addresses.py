"""Addresses as people and starters write them, those of IPv6 included; and a group over ``::1``."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port

from meshwright import ClusterError, ClusterSpec, Membership
from meshwright.launch.addresses import listener_at, split_address, to_bind
from meshwright.launch.membership import membership
from meshwright.launch.nodes import Hub, rendezvous


def _has_loopback() -> bool:
    try:
        with listener_at("[::1]"):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_loopback(), reason="this host has no ::1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n01:8476", ("n01", 8476)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:1234", ("[::1]", 1234)),
        ("[2001:db8::7]:65535", ("[2001:db8::7]", 65535)),
        ("[fe80::1%eth0]:80", ("[fe80::1%eth0]", 80)),
        ("[::ffff:10.0.0.1]:80", ("[::ffff:10.0.0.1]", 80)),
        *((text, None) for text in ("n01", ":80", "n01:", "n01:http", "n01:0", "n01:65536")),
        *((text, None) for text in ("::1", "::1:1234", "[::1]", "[::1", "[n01]:80", "a b:80", "")),
    ],
)
def test_an_address_is_read_right_or_refused_everywhere(text, expected):
    assert split_address(text) == expected
    takers: list[Callable[[], object]] = [
        lambda: Membership(0, 2, text),
        lambda: ClusterSpec({"worker": [text], "ps": ["z:1"]}),
    ]
    if expected is not None:
        assert all(taker() for taker in takers)
        return
    for taker in (*takers, lambda: rendezvous(text)):
        with pytest.raises(
            ClusterError,
            match=r"'host:port', the port from 1 to 65535, with an IPv6 address in brackets, ",
        ):
            taker()


def _workers(first: str) -> dict[str, str]:
    cluster = {"worker": [first, "n02:2"]}
    task = {"type": "worker", "index": 1}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (_workers("[2001:db8::7]:2222"), "[2001:db8::7]:2222"),
        (_workers("[2001:db8::7]"), "[2001:db8::7]:8476"),
        (_workers("2001:db8::7:2222"), None),
        (_torchrun := {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, None),
        ({**_torchrun, "MASTER_ADDR": "2001:db8::7"}, "[2001:db8::7]:29500"),
        ({**_torchrun, "MASTER_ADDR": "[::1]"}, "[::1]:29500"),
    ],
)
def test_starters_may_name_an_ipv6_host(variables, expected):
    if expected is None:
        with pytest.raises(ClusterError):
            membership(variables)
    else:
        assert getattr(membership(variables), "coordinator", None) == expected


@needs_ipv6
def test_a_listener_of_an_ipv6_host_is_reached_there():
    for host in ("[::1]", "[::]"):
        with listener_at(host) as listener:
            socket.create_connection(("::1", listener.getsockname()[1]), 5).close()
    assert to_bind("[2001:db8::7]:80") == "tcp://[::]:80"


@needs_ipv6
@pytest.mark.alone
def test_launchers_meet_at_an_ipv6_address():
    hub = rendezvous(f"[::1]:{free_port()}")
    try:
        assert isinstance(hub, Hub)
        share = hub.meet(2, 5)
        assert share is not None
        assert share.coordinator.startswith("[::1]:")
        assert share.meeting.startswith("tcp://[::1]:")
    finally:
        hub.close()


_PROGRAM = """
import sys
import meshwright as mw
mw.join(int(sys.argv[1]), 2, sys.argv[2])
import jax, jax.numpy as jnp
mesh = mw.create_mesh({"batch": -1})
x = mw.pack([jnp.ones([1]) + int(sys.argv[1])], mw.Layout(["batch"], mesh))
print("sum", float(jax.jit(jnp.sum)(x)))
"""


@needs_ipv6
@pytest.mark.alone
@pytest.mark.full
def test_two_processes_train_over_an_ipv6_address(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_SHARED_MEMORY", "0")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    address = f"[::1]:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0, out
            assert "sum 3.0" in out
            assert "without an agent" not in out
    finally:
        for process in processes:
            process.kill()
