"""All that a server knows; a snapshot is this, written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .applied import AppliedSteps, Fences
from .delays import Backups
from .groups import Groups
from .rounds import Due, Gradient, Rounds, Squares, clipped, due_of
from .stepping import Stepper
from .store import Store

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
        counts = {name: value for name, value in vars(self).items() if name != "staleness"}
        return {**counts, "staleness": dict(sorted(self.staleness.items()))}


@dataclass(frozen=True)
class SnapshotInfo:
    """The last complete snapshot: its number, and the version of the server that it holds.

    A push that was answered with this version or a lower one is in it.
    """

    number: int = 0
    version: int = 0


class State:
    """What a server holds and knows.

    ``version`` counts the pushes that were applied. ``reshaped``: variables or optimizers were
    made since the last snapshot; ``fenced``: so were fences since they were last written.
    ``base`` is the version with which this generation of the server began.
    ``save_fault`` says why the last snapshot, or the fences, could not be written.
    """

    def __init__(self, task: str, generation: int = 0, memory_bytes: int | None = None) -> None:
        self.task = task
        self.generation = generation
        self.store = Store(task, memory_bytes)
        self.groups = Groups()
        self.applied = AppliedSteps()
        self.fences = Fences()
        self.rounds = Rounds()
        self.version = self.base = 0
        self.counts = Counts()
        self.backups = Backups()
        self.snapshot = SnapshotInfo()
        self.reshaped = False
        self.fenced = False
        self.save_fault = ""
        self._stepper = Stepper()
        self._due: Due | None = None

    def apply_gradient(self, gradient: Gradient, peer: str | None = None) -> None:
        """Run the optimizer of a variable; ``peer`` is who took the gradient."""
        group = self.groups.of(gradient.name)
        assert group is not None  # checked when the push came
        shard = self.store.one(gradient.name)
        rows, values, scale = gradient.rows, gradient.values, gradient.scale
        late_peer = peer if gradient.compensation else None
        how = gradient.compensation, gradient.adaptive
        if late_peer is not None:
            self.backups.keep_all([gradient.name])
        if rows is None:
            delay = None if late_peer is None else self.backups.delay(late_peer, shard, *how)
            self._stepper.dense(group, shard, values, scale, delay)
            return
        if late_peer is not None:
            values = self.backups.corrected_rows(late_peer, shard, rows, values, *how)
        self._stepper.rows(group, shard, rows, values, scale)

    def apply_rounds(self) -> None:
        """Apply every round that is complete, up to one that is to be clipped by norms."""
        while (due := self._due_round()) is not None and not due.squares:
            self._apply_round(due.means, {})

    def clip_round(self, number: int, totals: Squares) -> None:
        """Apply a round that waits for the squares of all servers; the second time does nothing."""
        due = self._due_round()
        if due is not None and number == self.rounds.applied:
            self._apply_round(clipped(self.groups, due.means, totals), due.squares)
            self.apply_rounds()

    def clipping_head(self) -> dict[str, Any]:
        """The fields of :class:`~meshwright.ps.shared.pushing.RoundState`, for an answer."""
        due = self._due_round()
        waits = self.rounds.is_open and any(group.clips for group in self.groups)
        return {
            "applied": self.rounds.applied,
            "waits": waits,
            "due": None if due is None else due.squares,
            "last": self.rounds.last,
        }

    def _due_round(self) -> Due | None:
        means = self.rounds.complete()
        if means is None:
            self._due = None
        elif self._due is None or self._due.means is not means:
            self._due = due_of(self.groups, means)
        return self._due

    def _apply_round(self, means: Iterable[Gradient], squares: Squares) -> None:
        for gradient in means:
            self.apply_gradient(gradient)
        self.rounds.end(squares)
        self.version += 1

    def snapshot_head(self) -> dict[str, int]:
        """The last complete snapshot, for an answer."""
        return {"id": self.snapshot.number, "version": self.snapshot.version}
