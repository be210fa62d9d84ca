"""Launchers on hosts that come and go, reached by ssh from a place outside of them.

The launcher that the others meet at, and with it rank 0, is on the first host. When that host is
lost, or is no more wanted, all end, and the next one is the first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from ..errors import ClusterError
from .logs import LogPump
from .processes import Child, end_all
from .watch import say

_LOOK_EVERY_S = 0.1
_END_S = 75.0  # for launchers to save, or to notice that the first one is lost
_WAIT_S = 600.0  # for enough hosts
_COOL_S = 60.0  # until a host whose launcher has ended is tried again, as with Horovod
_OF_SSH = 255  # its own exit code, for a host that it does not reach, or reaches no more

Hosts = Mapping[str, int | None]  # with the processes of each, where they are listed


class StartLauncher(Protocol):
    """Starts a launcher on a host."""

    def __call__(self, name: str, processes: int | None, nodes: str, first: str) -> Child:
        """``nodes`` is the number of hosts, or ``MIN:MAX``; all meet at the first one."""
        ...


class ChangingHosts:
    """A group on the hosts that ``listed`` names: ``least`` to ``most`` of them at a time."""

    def __init__(
        self,
        listed: Callable[[], Hosts],
        start: StartLauncher,
        logs: LogPump,
        least: int,
        most: int,
    ) -> None:
        self._listed, self._start_on, self._logs = listed, start, logs
        self._least, self._most = least, most
        self._children: dict[str, Child] = {}
        self._leaving: set[str] = set()
        self._ended_s: dict[str, float] = {}

    def run(self) -> int:
        """Run to the end; the exit code of the first host's launcher.

        Raises :class:`~meshwright.errors.ClusterError` where there are too few hosts for long.
        """
        try:
            while True:
                first = self._first_host()
                if (code := self._session(first)) is not None:
                    return code
        finally:
            end_all(self._children.values(), 0.5)

    def _first_host(self) -> str:
        until_s = time.monotonic() + _WAIT_S
        while len(present := self._present()) < self._least:
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"there are {len(present)} hosts ({', '.join(present) or 'none'}) after "
                    f"{_WAIT_S:g} s, and {self._least} are needed."
                )
            time.sleep(_LOOK_EVERY_S)
        return next(iter(present))

    def _session(self, first: str) -> int | None:
        """The exit code; ``None``: another host is to be the first."""
        while True:
            self._follow(first)
            code = self._children[first].poll()
            if code is None and first not in self._listed():
                self._end_all(f"host {first!r} is not listed any more")
                return None
            if code is not None:
                is_lost = code == _OF_SSH or code == -signal.SIGKILL
                if not is_lost or not any(name != first for name in self._children):
                    self._end_all("")
                    return 128 - code if code < 0 else code
                self._ended_s[first] = time.monotonic()
                self._end_all(f"host {first!r} is lost", ask=False)
                return None
            time.sleep(_LOOK_EVERY_S)

    def _present(self) -> dict[str, int | None]:
        """The hosts to use, without those whose launcher has just ended."""
        now_s = time.monotonic()
        return {
            name: processes
            for name, processes in self._listed().items()
            if now_s - self._ended_s.get(name, -_COOL_S) >= _COOL_S
        }

    def _follow(self, first: str) -> None:
        """Start launchers where hosts have come, and end those of hosts that have gone."""
        for name, child in list(self._children.items()):
            if name != first and child.poll() is not None:
                del self._children[name]
                self._leaving.discard(name)
                self._ended_s[name] = time.monotonic()
        present, listed = self._present(), self._listed()
        for name, processes in {first: present.get(first), **present}.items():
            if name not in self._children:
                child = self._start_on(name, processes, f"{self._least}:{self._most}", first)
                self._children[name] = child
                self._logs.add(name, child.output)
        for name in set(self._children) - set(listed) - self._leaving - {first}:
            self._leaving.add(name)
            self._children[name].ask_to_end()

    def _end_all(self, why: str, ask: bool = True) -> None:
        """End all launchers, or wait for them where they end by themselves."""
        if why:
            say(f"{why}: the group is started again from another host.")
        if ask and why:
            for child in self._children.values():
                child.ask_to_end()
        until_s = time.monotonic() + _END_S
        while time.monotonic() < until_s:
            if all(child.poll() is not None for child in self._children.values()):
                break
            time.sleep(_LOOK_EVERY_S)
        end_all(self._children.values(), 0.5)
        self._children, self._leaving = {}, set()
