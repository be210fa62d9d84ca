"""All that a server knows; a snapshot is this, written down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .applied import AppliedSteps, Fences
from .counts import Counts
from .groups import Groups
from .rounds import Gradient, Rounds
from .shards import Shard
from .stepping import Stepper
from .store import Store
from .updates import apply_gradient

MOST_PEERS = 64  # of which is kept what they read, so that those who are gone are forgotten


@dataclass(frozen=True)
class SnapshotInfo:
    """The last complete snapshot: its number, and the version of the server that it holds.

    A push that was answered with this version or a lower one is in it.
    """

    number: int = 0
    version: int = 0


class Backups:
    """What each peer last read of some variables: where its next gradient is taken (DC-ASGD)."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._kept: dict[str, dict[str, np.ndarray]] = {}  # by peer, the one heard last at the end

    def keep_all(self, names: Iterable[str]) -> None:
        """From now on, keep what is read of these variables."""
        self.names.update(names)

    def keep(self, peer: str, shard: Shard) -> None:
        """A peer reads a variable."""
        if shard.name not in self.names:
            return
        own = self._kept.pop(peer, {})
        self._kept[peer] = own
        if len(self._kept) > MOST_PEERS:
            del self._kept[next(iter(self._kept))]
        if shard.name in own and own[shard.name].shape == shard.shape:
            np.copyto(own[shard.name], shard.values)
        else:
            own[shard.name] = shard.values.copy()

    def get(self, peer: str, name: str) -> np.ndarray | None:
        """What the peer read, if that was kept."""
        return self._kept.get(peer, {}).get(name)


class State:
    """What a server holds and knows.

    ``version`` counts the pushes that were applied. ``reshaped``: variables or optimizers were
    made since the last snapshot; ``fenced``: so were fences since they were last written.
    """

    def __init__(self, task: str, generation: int = 0, memory_bytes: int | None = None) -> None:
        self.task = task
        self.generation = generation
        self.store = Store(task, memory_bytes)
        self.groups = Groups()
        self.applied = AppliedSteps()
        self.fences = Fences()
        self.rounds = Rounds()
        self.version = 0
        self.counts = Counts()
        self.backups = Backups()
        self.snapshot = SnapshotInfo()
        self.reshaped = False
        self.fenced = False
        self._stepper = Stepper()

    def apply_gradient(self, gradient: Gradient, peer: str | None = None) -> None:
        """Run the optimizer of a variable; ``peer`` is who took the gradient."""
        group = self.groups.of(gradient.name)
        assert group is not None  # checked when the push came
        (shard,) = self.store.get([gradient.name])
        backup = None
        if gradient.compensation and peer is not None:
            self.backups.keep_all([gradient.name])
            backup = self.backups.get(peer, gradient.name)
        apply_gradient(self._stepper, group, shard, gradient, backup)

    def apply_rounds(self) -> None:
        """Apply every round that is complete."""
        while (gradients := self.rounds.due()) is not None:
            for gradient in gradients:
                self.apply_gradient(gradient)
            self.version += 1

    def snapshot_head(self) -> dict[str, int]:
        """The last complete snapshot, for an answer."""
        return {"id": self.snapshot.number, "version": self.snapshot.version}
