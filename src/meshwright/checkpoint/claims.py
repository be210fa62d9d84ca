"""One run at a time writes to a directory: two would remove each other's unfinished checkpoints.

The claim is a lock of the directory itself, so no file is left behind, and the system takes it back
from a process that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError

_WAIT_S = 5.0  # for the end of a run that is being killed
_AGAIN_S = 0.05
_lock = threading.Lock()
_held: dict[Path, tuple[int, int]] = {}  # the descriptor that holds it, and how many runs share it


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[bool]:
    """Hold a directory, which is made, for this process; yields whether nothing here held it yet.

    Raises :class:`CheckpointError` where another process holds it, or it cannot be made. File
    systems without locks hold nothing.
    """
    make_directory(directory)
    key = directory.resolve()
    with _lock:
        descriptor, count = _held.get(key) or (_locked(directory), 0)
        _held[key] = descriptor, count + 1
    try:
        yield not count
    finally:
        with _lock:
            if key in _held:  # a fork has let go of it
                _let_go(key)


def is_held(directory: Path) -> bool:
    """Whether a run of this process or of another one holds the directory."""
    with _lock:
        if directory.resolve() in _held:
            return True
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        return not _try(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Make it; raises :class:`CheckpointError` where that is not possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(directory, error) from error


def not_writable(directory: Path, error: OSError) -> CheckpointError:
    """What to raise where a directory cannot be made or tidied."""
    return CheckpointError(
        f"checkpoints cannot be written to {directory}: {error}. Name another directory."
    )


def _locked(directory: Path) -> int:
    descriptor, until_s = os.open(directory, os.O_RDONLY), time.monotonic() + _WAIT_S
    while not _try(descriptor):
        if time.monotonic() >= until_s:
            os.close(descriptor)
            raise CheckpointError(
                f"another process is running that writes its checkpoints to {directory}: two runs "
                "would remove each other's. Wait until it has ended, or name another directory."
            )
        time.sleep(_AGAIN_S)
    return descriptor


def _try(descriptor: int) -> bool:
    """Lock the directory by this descriptor; whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that has no locks
        return True
    return True


def _let_go(key: Path) -> None:
    descriptor, count = _held.pop(key)
    if count > 1:
        _held[key] = descriptor, count - 1
    else:
        os.close(descriptor)


def _forget() -> None:
    """In a fork: the claim is its parent's, and would outlive it in this process."""
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
