"""What a server forgets when it dies: pure book-keeping of versions and step ids."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

_MOST_KEPT = 1_000_000  # acknowledged steps per server, where no snapshot ever frees them


@dataclass(frozen=True)
class Loss:
    """A server died, and came back as its last snapshot had it.

    ``steps`` are the ids of the steps whose updates were applied there and are gone.
    """

    server: str
    generation: int
    steps: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.server} died and was restored from its last snapshot: the updates of "
            f"{len(self.steps)} steps to it are lost{_ids_text(self.steps)}"
        )


class _Entry(NamedTuple):
    """An acknowledgement of a step by a server at this version of this generation."""

    version: int
    step: int
    generation: int

    def is_safe(self, version: int, generation: int) -> bool:
        """Whether a snapshot of this version and generation holds the step."""
        return self.version <= version and self.generation <= generation


class Ledger:
    """Of one server: which steps were acknowledged at which of its versions.

    >>> ledger = Ledger("ps:0")
    >>> for step in range(4):
    ...     ledger.acknowledged(step, version=step + 1, generation=0)
    >>> ledger.restored(generation=1, version=2).steps
    (2, 3)
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.generation = 0
        self._entries: deque[_Entry] = deque(maxlen=_MOST_KEPT)
        self._restored_at: dict[int, int] = {}  # generation -> version it began with

    def acknowledged(self, step: int, version: int, generation: int) -> Loss | None:
        """A push was applied. The loss, where the server has died since."""
        if generation < self.generation:
            return self._late(step, version, generation)
        self._entries.append(_Entry(version, step, generation))
        return None

    def snapshot(self, version: int, generation: int) -> None:
        """What came up to this version is safe."""
        if generation == self.generation:
            while self._entries and self._entries[0].is_safe(version, generation):
                self._entries.popleft()

    def began(self, generation: int, version: int) -> None:
        """The server was seen to begin a generation at this version, or a little above."""
        if generation > self.generation:
            version_before = self._restored_at.get(generation, version)
            self._restored_at[generation] = min(version_before, version)

    def restored(self, generation: int, version: int) -> Loss:
        """The server is back, with what it had at this version, or at a lower one seen before."""
        self.began(generation, version)
        version = self._restored_at[generation]
        self.generation = generation
        # What the server has said since it came back is not lost.
        losses = {e for e in self._entries if e.generation < generation and e.version > version}
        self._entries = deque((e for e in self._entries if e not in losses), maxlen=_MOST_KEPT)
        return Loss(self.server, generation, tuple(sorted({entry.step for entry in losses})))

    def _late(self, step: int, version: int, generation: int) -> Loss | None:
        # An acknowledgement from before a death that is known by now.
        for later in range(generation + 1, self.generation + 1):
            if version > self._restored_at.get(later, version):
                return Loss(self.server, later, (step,))
        return None


def _ids_text(steps: tuple[int, ...]) -> str:
    if not steps:
        return "."
    numbers = ", ".join(map(str, steps[:10]))
    return f" (ids {numbers}{', ...' if len(steps) > 10 else ''})."
