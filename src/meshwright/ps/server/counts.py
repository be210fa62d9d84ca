"""What a server has done, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MOST_STALE = 1024  # staleness from here on is counted as this


@dataclass
class Counts:
    """Counts since the start of the process; ``staleness``: of the pushes that were applied."""

    pushes: int = 0  # applied
    refused: int = 0  # answered with an error
    duplicates: int = 0  # applied before
    dropped: int = 0  # too late for their round
    reads: int = 0
    lookups: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    snapshots: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def stale(self, staleness: int) -> None:
        """A push of this staleness was applied."""
        self.staleness[min(staleness, MOST_STALE)] += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a message."""
        told = {name: value for name, value in vars(self).items() if name != "staleness"}
        return {**told, "staleness": dict(sorted(self.staleness.items()))}
