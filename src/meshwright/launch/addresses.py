"""Addresses of tasks as ZeroMQ wants them: one form to connect to, another to bind."""

from __future__ import annotations

import ipaddress

_ALL_INTERFACES = "0.0.0.0"


def to_connect(address: str) -> str:
    """The endpoint that a peer connects to.

    >>> to_connect("n01:8888"), to_connect("ipc:///run/x/ps0")
    ('tcp://n01:8888', 'ipc:///run/x/ps0')
    """
    return address if "://" in address else f"tcp://{address}"


def to_bind(address: str) -> str:
    """The endpoint that the task itself binds.

    A host's name may stand for an interface that only others can see (a container's service, a
    NAT), and ZeroMQ binds no names; so all interfaces are bound, but for an address on loopback.

    >>> to_bind("n01:8888"), to_bind("localhost:8888"), to_bind("ipc:///run/x/ps0")
    ('tcp://0.0.0.0:8888', 'tcp://127.0.0.1:8888', 'ipc:///run/x/ps0')
    """
    if address.startswith("ipc://"):
        return address
    host, port = _host_and_port(address)
    if not is_local(address):
        return f"tcp://{'[::]' if host.startswith('[') else _ALL_INTERFACES}:{port}"
    return f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}"


def to_listen(host: str) -> str:
    """The interface for a listener that others reach by this host's name; ``""`` is all.

    >>> to_listen("127.0.0.1"), to_listen("n01")
    ('127.0.0.1', '')
    """
    name = "127.0.0.1" if host == "localhost" else host
    return name if is_local(f"{host}:0") else ""


def is_local(address: str) -> bool:
    """Whether no other host can reach a task there.

    >>> is_local("127.0.0.1:80"), is_local("n01:80")
    (True, False)
    """
    if address.startswith("ipc://"):
        return True
    host = _host_and_port(address)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, port
