"""``meshwright launch --hosts``: the same launcher on every host, started by ssh."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import ClusterError
from .addresses import join_address
from .changing_hosts import ChangingHosts, Hosts
from .discovery import Discovery
from .joining import KEYS
from .logs import LogPump
from .processes import Child, Command, end_all, free_port

_LOOK_EVERY_S = 0.1
_AFTER_FIRST_S = 20.0  # the launchers of the other hosts end their processes by themselves
_OF_SSH = 255  # its own exit code, for a host that it does not reach
_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2")
_OF_SHELL = (126, 127)  # the shell's, for a program that is not there


def run_on_hosts(
    hosts: Sequence[str],
    options: Sequence[str],
    arguments: Sequence[str],
    least: int | None = None,
) -> int:
    """Run ``meshwright launch`` with these options on every host; the first exit code but 0.

    Every host needs the same Python, at the same path, and the same working folder. Rank 0 runs on
    the first host. With ``least`` the group goes on as long as there are that many hosts; when the
    first one is lost, the next takes its place. When this launcher ends, those on the hosts save
    and end. Raises :class:`~meshwright.errors.ClusterError` for a host that is named twice, or that
    ssh does not reach.
    """
    names = [host.strip() for host in hosts]
    if not all(names) or len(set(names)) < len(names):
        raise ClusterError(f"--hosts must name different hosts, as in a,b,c; received {hosts}.")
    if least is not None and not 1 <= least <= len(names):
        raise ClusterError(f"--nodes asks for {least} hosts, and --hosts names {len(names)}.")
    if least is not None:
        fixed = dict.fromkeys(names)
        return _run_on_changing(lambda: fixed, options, arguments, least, len(names))
    start, children = _Ssh(options, arguments), dict[str, Child]()
    logs = LogPump(show=True, to_stdout=True)
    try:
        for name in names:
            children[name] = start(name, None, str(len(names)), names[0])
            logs.add(name, children[name].output)
        with contextlib.suppress(KeyboardInterrupt):
            return _wait(children, logs)
        return 130
    finally:
        end_all(children.values(), 0.5)
        logs.close(timeout_s=2.0)


def run_on_listed_hosts(
    script: Path, options: Sequence[str], arguments: Sequence[str], least: int, most: int
) -> int:
    """The same on ``least`` to ``most`` hosts that a script lists, asked again every second.

    A host that comes is taken in, and one that is not listed any more saves and leaves. Raises
    :class:`~meshwright.errors.ClusterError` where the script fails at first.
    """
    with contextlib.closing(Discovery(script, is_local=False)) as discovery:
        return _run_on_changing(lambda: discovery.hosts, options, arguments, least, most)


def _run_on_changing(
    listed: Callable[[], Hosts],
    options: Sequence[str],
    arguments: Sequence[str],
    least: int,
    most: int,
) -> int:
    logs = LogPump(show=True, to_stdout=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            return ChangingHosts(listed, _Ssh(options, arguments), logs, least, most).run()
        return 130
    finally:
        logs.close(timeout_s=2.0)


class _Ssh:
    """Starts launchers by ssh; those that know each other by their first host share a port of it.

    Raises :class:`~meshwright.errors.ClusterError` where ssh is not installed.
    """

    def __init__(self, options: Sequence[str], arguments: Sequence[str]) -> None:
        ssh = shutil.which("ssh")
        if ssh is None:
            raise ClusterError("several hosts need the program ssh, which is not installed here.")
        self._ssh, self._options, self._arguments = ssh, options, arguments
        self._port = free_port()

    def __call__(self, name: str, processes: int | None, nodes: str, first: str) -> Child:
        if name == first:  # for a new group
            self._port = free_port()
        at = join_address(first.rpartition("@")[2], self._port)
        own = [] if processes is None else ["--processes", str(processes)]
        meeting = ["--nodes", nodes, "--rendezvous", at]
        launch = [sys.executable, "-m", "meshwright.cli", "launch", *self._options, *own, *meeting]
        keys = {KEYS: os.environ[KEYS]} if os.environ.get(KEYS) else {}  # the same path everywhere
        settings = shlex.join(["env", *(f"{name}={path}" for name, path in keys.items())])
        command = f"exec {settings} {shlex.join([*launch, *self._arguments])}"
        remote = f"cd {shlex.quote(str(Path.cwd()))} && {command}"
        # -tt: what runs there ends when this ssh does, however that ends.
        argv = (self._ssh, "-tt", "-o", "BatchMode=yes", *_ALIVE, name, remote)
        return Child(Command(argv, closes_pipes=True))


def _wait(children: dict[str, Child], logs: LogPump) -> int:
    """The first exit code but 0, once all have ended."""
    first, until_s = 0, float("inf")
    while time.monotonic() < until_s:
        codes = {name: child.poll() for name, child in children.items()}
        for name, code in codes.items():
            _check(name, code, logs)
        first = first or next((code for code in codes.values() if code), 0)
        if first:
            until_s = min(until_s, time.monotonic() + _AFTER_FIRST_S)
        if None not in codes.values():
            break
        time.sleep(_LOOK_EVERY_S)
    return 128 - first if first < 0 else first


def _check(name: str, code: int | None, logs: LogPump) -> None:
    """Raise :class:`ClusterError` for a host that cannot be reached, or cannot run this."""
    if code == _OF_SSH:
        lines = "; ".join(logs.last_lines(name, wait_s=0.5)) or "it says nothing"
        raise ClusterError(f"ssh does not reach host {name!r}: {lines}.")
    if code in _OF_SHELL:
        lines = "; ".join(logs.last_lines(name, wait_s=0.5))
        raise ClusterError(
            f"host {name!r} cannot run {sys.executable} in {Path.cwd()}: {lines}. Install "
            "the same Python at the same path there, and share the working folder."
        )
