"""``meshwright launch --hosts``: the same launcher on every host, started by ssh."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import ClusterError
from .joining import KEYS
from .logs import LogPump
from .processes import Child, Command, end_all, free_port

_LOOK_EVERY_S = 0.1
_AFTER_FIRST_S = 20.0  # the launchers of the other hosts end their processes by themselves
_OF_SSH = 255  # its own exit code, for a host that it does not reach
_OF_SHELL = (126, 127)  # the shell's, for a program that is not there


def run_on_hosts(
    hosts: Sequence[str],
    options: Sequence[str],
    arguments: Sequence[str],
    least: int | None = None,
) -> int:
    """Run ``meshwright launch`` with these options on every host; the first exit code but 0.

    Every host needs the same Python, at the same path, and the same working folder. Rank 0 runs on
    the first host. With ``least`` the group goes on as long as there are that many hosts. The first
    one must stay, and its exit code is the result. When this launcher ends, those on the hosts save
    and end. Raises :class:`~meshwright.errors.ClusterError` for a host that is named twice, or that
    ssh does not reach.
    """
    names = [host.strip() for host in hosts]
    if not all(names) or len(set(names)) < len(names):
        raise ClusterError(f"--hosts must name different hosts, as in a,b,c; received {hosts}.")
    ssh = shutil.which("ssh")
    if ssh is None:
        raise ClusterError("--hosts needs the program ssh, which is not installed here.")
    at = names[0].rpartition("@")[2]
    if least is not None and not 1 <= least <= len(names):
        raise ClusterError(f"--nodes asks for {least} hosts, and --hosts names {len(names)}.")
    number = str(len(names)) if least is None else f"{least}:{len(names)}"
    meeting = ["--nodes", number, "--rendezvous", f"{at}:{free_port()}"]
    launch = [sys.executable, "-m", "meshwright.cli", "launch", *options, *meeting, *arguments]
    keys = {KEYS: os.environ[KEYS]} if os.environ.get(KEYS) else {}  # the same path everywhere
    settings = shlex.join(["env", *(f"{name}={path}" for name, path in keys.items())])
    remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {settings} {shlex.join(launch)}"
    logs, children = LogPump(show=True, to_stdout=True), {}
    try:
        for name in names:
            # -tt: what runs there ends when this ssh does, however that ends.
            children[name] = Child(Command.of([ssh, "-tt", "-o", "BatchMode=yes", name, remote]))
            logs.add(name, children[name].output)
        with contextlib.suppress(KeyboardInterrupt):
            return _wait(children, logs, names[0] if least is not None else None)
        return 130
    finally:
        end_all(children.values(), 0.5)
        logs.close(timeout_s=2.0)


def _wait(children: dict[str, Child], logs: LogPump, counts: str | None) -> int:
    """The first exit code but 0; or that of the host that ``counts``, when it has ended."""
    first, until_s = 0, float("inf")
    while time.monotonic() < until_s:
        codes = {name: child.poll() for name, child in children.items()}
        for name, code in codes.items():
            if code == _OF_SSH and counts in (None, name):
                lines = "; ".join(logs.last_lines(name, wait_s=0.5)) or "it says nothing"
                raise ClusterError(f"ssh does not reach host {name!r}: {lines}.")
            if code in _OF_SHELL and counts in (None, name):
                lines = "; ".join(logs.last_lines(name, wait_s=0.5))
                raise ClusterError(
                    f"host {name!r} cannot run {sys.executable} in {Path.cwd()}: {lines}. Install "
                    "the same Python at the same path there, and share the working folder."
                )
        of_all = codes.values() if counts is None else [codes[counts]]
        first = first or next((code for code in of_all if code), 0)
        if first or (counts is not None and codes[counts] is not None):
            until_s = min(until_s, time.monotonic() + _AFTER_FIRST_S)
        if None not in codes.values():
            break
        time.sleep(_LOOK_EVERY_S)
    return 128 - first if first < 0 else first
