"""Hosts from a script of the user's: each line is ``host`` or ``host:slots``, as in Horovod."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from ..errors import ClusterError

_EVERY_S = 1.0
_LONGEST_S = 20.0
_HERE = ("localhost", "127.0.0.1", "::1")


def parse_hosts(text: str) -> dict[str, int | None]:
    """The hosts of a script's output, with the number of processes that each is to run, if given.

    Raises :class:`~meshwright.errors.ClusterError` for a number that is none.

    >>> parse_hosts("n01:4\\nn02\\n\\n")
    {'n01': 4, 'n02': None}
    """
    hosts = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        host, _, slots = line.partition(":")
        if not host or (slots and not slots.isdecimal()):
            raise ClusterError(f"expected lines such as n01:4; received {line!r}.")
        hosts[host] = int(slots) if slots else None
    return hosts


def places_here(hosts: Mapping[str, int | None]) -> int:
    """The places that these hosts have on this one.

    Raises :class:`~meshwright.errors.ClusterError` for other hosts.
    """
    own = (*_HERE, socket.gethostname(), socket.getfqdn())
    others = [host for host in hosts if host not in own]
    if others:
        raise ClusterError(
            f"{', '.join(others)}: a host discovery script may name this host only (localhost:4). "
            "For other hosts, reached by ssh, add --nodes MIN:MAX."
        )
    return sum(1 if slots is None else slots for slots in hosts.values())


class Discovery:
    """Asks a script every second; :attr:`hosts` is its newest answer.

    A script that fails changes nothing, but at first. Raises
    :class:`~meshwright.errors.ClusterError` where its first answer is invalid, or names others than
    this host where it ``is_local``.
    """

    def __init__(self, script: Path, is_local: bool = True) -> None:
        self._script, self._is_local = script.resolve(), is_local
        self.hosts = self._ask()
        self._last_error = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host discovery", daemon=True)
        self._thread.start()

    @property
    def places(self) -> int:
        """The places for processes on this host."""
        return places_here(self.hosts)

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            try:
                self.hosts, self._last_error = self._ask(), ""
            except ClusterError as error:
                if str(error) != self._last_error:
                    self._last_error = str(error)
                    print(f"meshwright launch: {error}", file=sys.stderr, flush=True)

    def _ask(self) -> dict[str, int | None]:
        where = f"host discovery script {str(self._script)!r}"
        try:
            result = subprocess.run(
                [self._script], capture_output=True, text=True, timeout=_LONGEST_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"{where} cannot be run: {error}.") from error
        if result.returncode:
            raise ClusterError(f"{where} ended with {result.returncode}: {result.stderr.strip()}")
        try:
            hosts = parse_hosts(result.stdout)
            if self._is_local:
                places_here(hosts)
            return hosts
        except ClusterError as error:
            raise ClusterError(f"{where}: {error}") from None
