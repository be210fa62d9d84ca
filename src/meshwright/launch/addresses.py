"""Addresses of tasks as ZeroMQ wants them: one form to connect to, another to bind."""

from __future__ import annotations

import ipaddress
import re
import socket

_ALL_INTERFACES = "0.0.0.0"
_FORM = re.compile(r"(?:\[([^\[\]/\s]+)\]|([^:/\s\[\]]+)):(\d{1,5})", re.ASCII)
ADDRESS_FORM = (
    "'host:port', the port from 1 to 65535, with an IPv6 address in brackets, as in '[::1]:8476'"
)


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of ``host:port``, an IPv6 host in brackets; ``None`` for any other text.

    >>> split_address("n01:8476"), split_address("[::1]:8476"), split_address("::1:8476")
    (('n01', 8476), ('[::1]', 8476), None)
    """
    match = _FORM.fullmatch(address)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        return None
    if match[1] is not None and not is_ipv6(match[1]):
        return None
    return match[2] or f"[{match[1]}]", int(match[3])


def join_address(host: str, port: int | str) -> str:
    """``host:port``, with brackets round an IPv6 host that has none.

    >>> join_address("n01", 8476), join_address("::1", 8476), join_address("[::1]", 8476)
    ('n01:8476', '[::1]:8476', '[::1]:8476')
    """
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    """Whether this is an IPv6 address without brackets.

    >>> is_ipv6("2001:db8::7"), is_ipv6("[::1]"), is_ipv6("n01:80")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def listener_at(host: str) -> socket.socket:
    """A socket that listens where :func:`to_listen` says, on a free port."""
    if host.startswith("["):
        both = host == "[::]" and socket.has_dualstack_ipv6()
        where = (host.strip("[]"), 0)
        return socket.create_server(where, family=socket.AF_INET6, dualstack_ipv6=both)
    return socket.create_server((host, 0))


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

    >>> to_listen("127.0.0.1"), to_listen("n01"), to_listen("[::1]"), to_listen("[2001:db8::7]")
    ('127.0.0.1', '', '[::1]', '[::]')
    """
    if is_local(f"{host}:0"):
        return "127.0.0.1" if host == "localhost" else host
    return "[::]" if host.startswith("[") else ""


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
