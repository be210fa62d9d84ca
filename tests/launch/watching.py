"""Looking at processes from outside, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

# What ``grouped.py`` prints last. Gloo prints parts of lines, so something may stand before it.
LOSS = r"loss \S+ 2 4\b"


def is_there(pid: int) -> bool:
    """Whether a process is running or stopped; one that has ended and is not noted is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def within(seconds: float, true: Callable[[], bool]) -> bool:
    """Whether this becomes true in so many seconds."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def all_gone(pids: Iterable[int]) -> Callable[[], bool]:
    """Tells whether none of these processes is there any more."""
    numbers = list(pids)
    return lambda: not any(map(is_there, numbers))


def soon_enough(limit_s: float, folder: Path, once: Callable[[Path], float]) -> bool:
    """Whether this takes less than so many seconds, of at most three times.

    Such a bound is for a machine that does nothing else; what is too slow by itself is so each
    time. Each time has a folder of its own.
    """
    for number in range(3):
        (own := folder / f"time{number}").mkdir()
        if once(own) < limit_s:
            return True
    return False


_SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ "$1" = nowhere ] && echo "Connection refused" >&2 && exit 255
case "$2" in *"--rendezvous $1:"*) ;; *) sleep 1;; esac  # all can listen at the first one's address
echo $$ > "{folder}/pid-$1"
exec sh -c "$2"
"""


def write_fake_ssh(folder: Path) -> Path:
    """The folder of an ``ssh`` that runs the command here; host ``nowhere`` refuses.

    The number of the process on each host is in ``FOLDER/pid-HOST``.
    """
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(_SSH.replace("{folder}", str(folder)))
    ssh.chmod(0o755)
    return folder / "bin"
