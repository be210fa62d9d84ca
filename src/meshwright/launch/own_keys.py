"""Default keys of a cluster on this host: those of the user who runs it.

A port on loopback is open to every user of the host. So tasks that listen there encrypt with keys
from a file that only their user can read; the first task makes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from ..errors import ClusterError
from .keys import HOW_TO_MAKE, Keys

_NAME = "local_keys.json"


def keys_of_this_user() -> Keys:
    """The keys that all processes of this user share, made when they are first asked for.

    Raises :class:`~meshwright.errors.ClusterError` where there is no place for a private file.
    """
    faults = []
    for directory in _directories():
        try:
            _make_private(directory)
            return _keys_in(directory)
        except OSError as error:
            faults.append(f"{directory}: {error.strerror or error}")
    listed = "\n  ".join(faults)
    raise ClusterError(
        "the tasks of this cluster listen on loopback, which every user of this host can reach, "
        f"and no private file for their keys could be made:\n  {listed}\n{HOW_TO_MAKE} "
        "Set MESHWRIGHT_KEYS to its path in every task."
    )


def _directories() -> list[Path]:
    shared = Path(tempfile.gettempdir()) / f"meshwright-keys-{os.getuid()}"
    with contextlib.suppress(RuntimeError):  # no home directory
        return [Path.home() / ".local" / "state" / "meshwright", shared]
    return [shared]


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(0, "others can write to it")


def _keys_in(directory: Path) -> Keys:
    path = directory / _NAME
    if not path.exists():
        # Linked when it is whole: another task may look at the same time, and one of them wins.
        aside = directory / f".{_NAME}.{secrets.token_hex(8)}"
        Keys.make().save(aside)
        try:
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(aside)
        finally:
            aside.unlink()
    return Keys.load(path)
