"""A folder for one run, which only its owner may enter, and which is always removed.

A process that is killed cannot clean up. The next run removes its folder: the lock in it is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "meshwright-"
_LOCK = "lock"
_LONGEST_PATH = 70  # a socket's path has 107 characters at most, and a name comes after this
_YOUNG_S = 60.0  # a folder without a lock may be one that is just being made


class PrivateFolder:
    """A new folder for this process: ``path``, with mode 0700."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _LONGEST_PATH - len(_PREFIX) - 8:
            parent = Path("/tmp")  # mkdtemp makes it private there as well
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with all that it holds; safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path) -> None:
    """Remove the folders of runs that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or just being removed
            status = folder.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNG_S:
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
