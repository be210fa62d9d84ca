"""Whether all processes of a group see one folder under the name that each was given."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from ..launch.join import agree, compared_member

_calls = itertools.count()  # a name that no host has looked up yet: NFS remembers what is not there


def check_shared(directory: Path) -> None:
    """Have rank 0 write a file there that all others must see; alone, nothing is done.

    Raises :class:`~meshwright.AgreementError` in all processes where some do not see it.
    """
    member = compared_member()
    if member is None:
        return
    mark = directory / f".shared-{member.address[1]}-{next(_calls)}"
    if member.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        agree("checkpoint folder", dict)  # rank 0 has written
        name = f"checkpoint folder {directory}, which all must share"
        agree("checkpoint folder", lambda: {name: _seen(mark, member.rank)})
    finally:
        if member.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink()


def _seen(mark: Path, rank: int) -> str:
    if rank == 0 or mark.exists():
        return "shared with rank 0"
    return "another folder than that of rank 0 (mount the same file system on every host)"
