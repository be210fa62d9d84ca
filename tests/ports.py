"""Free ports for servers that a test starts later."""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST, _LAST = 10_240, 32_000  # below the ephemeral range, which starts at 32,768 on Linux
_random = random.SystemRandom()  # not seeded: test processes that run at once must differ


def free_ports(count: int) -> list[int]:
    """Consecutive ports with no listener, outside the range that the system assigns from."""
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
