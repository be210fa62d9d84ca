"""Ports for servers of tests that start later."""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST, _LAST = 10_240, 32_000  # systems draw ports for whoever names none from 32,768 on
_random = random.SystemRandom()  # for tests beside this one draw ports, too


def free_ports(count: int) -> list[int]:
    """Ports in a row that nothing listens at, and that no system gives to somebody else."""
    while True:
        first = _random.randrange(_FIRST, _LAST)
        ports = [*range(first, first + count)]
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.create_server(("", port)))
            return ports


def free_port() -> int:
    """One of :func:`free_ports`."""
    return free_ports(1)[0]


def free_address() -> str:
    """An address on this machine on which nothing listens."""
    return f"127.0.0.1:{free_port()}"
