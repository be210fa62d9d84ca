"""Memory of a host that outlives the ranks there: an agent holds it, and its ranks write to it.

Each piece is an anonymous file of the agent, which its ranks open by a name. It is gone when the
agent is, however that ends.
"""

from __future__ import annotations

import os
from pathlib import Path

MEMORY = "MESHWRIGHT_MEMORY"  # a folder
PIECES = 3  # for each rank: two that hosts may still need, and the one that is being written


class HostMemory:
    """The memory of ``places`` ranks, under names in ``folder``; where the system cannot, files."""

    def __init__(self, folder: Path, places: int) -> None:
        self.folder, self._descriptors = folder / "memory", list[int]()
        self.folder.mkdir()
        for name in (
            piece_name(place, piece) for place in range(places) for piece in range(PIECES)
        ):
            if not hasattr(os, "memfd_create"):
                (self.folder / name).touch()
                continue
            descriptor = os.memfd_create(f"meshwright-{name}")
            self._descriptors.append(descriptor)
            (self.folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")

    def close(self) -> None:
        """Give the memory back."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def piece_name(place: int, piece: int) -> str:
    """The name of a piece of the rank at this place of its host."""
    return f"{place}.{piece}"


def host_memory() -> Path | None:
    """The memory that the agent of this host keeps for its ranks, if it does."""
    folder = os.environ.get(MEMORY)
    return Path(folder) if folder else None
