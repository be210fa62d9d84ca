"""What a coordinator counts, and what it knows of the servers' losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .losses import Ledger, Loss

_MOST_REFUSED = 20  # that are told: a peer makes up names at will


@dataclass(eq=False)
class Counts:
    """Counts since the coordinator was made."""

    scheduled: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    passed_on: int = 0
    duplicates: int = 0  # pushes of a step that a server had applied before
    dropped: int = 0  # gradients that came too late for their round
    workers_lost: int = 0
    result_bytes: int = 0
    staleness: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Refused:
    """A message that could not be taken in."""

    peer: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return (
            f"message {self.kind!r} from {self.peer} was refused: {self.reason} A worker that "
            "sends such a message has to join again, and its steps are run again. Run the same "
            "version of Meshwright in every task, and keep the cluster's keys secret."
        )


@dataclass(frozen=True)
class Saving:
    """A server that can write no snapshots, or (``fault=""``) can again."""

    server: str
    fault: str
    unsaved: int  # updates that are in no snapshot

    def __str__(self) -> str:
        if not self.fault:
            return f"{self.server} writes snapshots again."
        return (
            f"{self.server} cannot write snapshots: {self.fault} {self.unsaved:,} updates would "
            "be lost if it died now, and their number grows until it can write again."
        )


class Records:
    """Counts, and a ledger for each server; ``untold`` is what the user must hear of."""

    def __init__(self, num_servers: int) -> None:
        self.counts = Counts()
        self.servers_can_die = True
        self._losses: dict[tuple[str, int], Loss] = {}
        self.untold: list[object] = []
        self._cannot_save: set[int] = set()
        self._refused: set[tuple[str, str]] = set()
        self._ledgers = [Ledger(f"ps:{index}") for index in range(num_servers)]

    def acknowledged(self, number: int, servers: list[list[Any]]) -> None:
        """A step is done: what each server that it touched said of it."""
        for server, applied, version, staleness, dropped, generation, base in servers:
            if applied:
                self.counts.staleness[staleness] += 1
            self.counts.dropped += dropped
            self.counts.duplicates += not applied and not dropped
            if self.servers_can_die and (applied or not dropped):
                self._enter(self._ledgers[server], number, version, generation, base)

    def _enter(self, ledger: Ledger, number: int, version: int, generation: int, base: int) -> None:
        ledger.began(generation, base)
        late = ledger.acknowledged(number, version, generation)
        if late is not None:
            self._add_loss(late)

    def refused(self, what: Refused) -> None:
        """A message was refused; the user hears of the first ones, of each kind and task once."""
        key = (what.peer.partition("/")[0], what.kind)
        if key not in self._refused and len(self._refused) < _MOST_REFUSED:
            self._refused.add(key)
            self.untold.append(what)

    def answer(self, launcher: Callable[[str, int], bool], task: str, pid: int) -> bool:
        """What the launcher says of a process that a peer named; ``False`` where it cannot say."""
        try:
            return launcher(task, pid)
        except Exception as error:
            self.refused(Refused(task, "alive", f"{type(error).__name__}: {error}"))
            return False

    def saving(self, server: int, fault: str, unsaved: int) -> None:
        """Whether a server can write snapshots; the user hears of each change."""
        if bool(fault) == (server in self._cannot_save):
            return
        self._cannot_save ^= {server}
        self.untold.append(Saving(f"ps:{server}", fault, unsaved))

    def server_state(self, server: int, generation: int, base: int, snapshot: int) -> None:
        """A server's restarts, the version it came back with, and that of its last snapshot."""
        self.restarted(server, generation, base)
        self._ledgers[server].snapshot(snapshot, generation)

    def restarted(self, server: int, generation: int, base: int) -> None:
        """A server was started again, and came back with this version."""
        ledger = self._ledgers[server]
        if self.servers_can_die and generation > ledger.generation:
            self._add_loss(ledger.restored(generation, base))

    @property
    def losses(self) -> tuple[Loss, ...]:
        """One for each death of a server, in their order."""
        return tuple(self._losses.values())

    def _add_loss(self, loss: Loss) -> None:
        key = (loss.server, loss.generation)
        before = self._losses[key].steps if key in self._losses else ()
        steps = tuple(sorted({*before, *loss.steps}))  # some are acknowledged late
        self._losses[key] = Loss(loss.server, loss.generation, steps)
        if loss.steps:
            self.untold.append(loss)  # the user's thread tells: a warning may be an error
