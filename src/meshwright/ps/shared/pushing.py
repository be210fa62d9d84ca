"""A push as values: whose it is, what goes to each server, and what they say to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..wire.message import Message
from ..worker.updates import Update
from .placing import VariableSpec


@dataclass(frozen=True)
class Stamp:
    """Whose push it is: what lets a server apply each step once.

    ``step`` is ``None`` for what is applied every time. ``done_below``: every step below has
    ended. ``round`` and ``of`` are those of synchronous training.
    """

    step: int | None = None
    attempt: int = 0
    incarnation: str = ""
    done_below: int = 0
    round: int | None = None
    of: int = 0


@dataclass(frozen=True)
class Applied:
    """What one server says to a push; ``version`` is the one at which it was applied.

    ``generation`` counts the restarts of the server that said so, and ``base`` is the version
    with which it came back from the last one.
    """

    server: int
    applied: bool
    version: int
    staleness: int
    dropped: bool = False
    generation: int = 0
    base: int = 0


@dataclass(frozen=True)
class Acknowledged:
    """What the servers say to a push, and the variables that were to be read after it."""

    servers: tuple[Applied, ...]
    values: tuple[np.ndarray, ...] = ()


@dataclass(eq=False)
class Pending:
    """A push that is on its way; :meth:`Servers.settle` waits for it."""

    sent: list[tuple[int, int, Message]] = field(default_factory=list)  # server, number, message
    then_read: tuple[VariableSpec, ...] = ()


class Push:
    """What one server gets of a push."""

    def __init__(self) -> None:
        self.updates: list[list[Any]] = []
        self.arrays: list[np.ndarray] = []
        self.then_read: list[str] = []

    def add(self, update: Update, name: str, arrays: tuple[np.ndarray, ...]) -> None:
        self.updates.append([name, update.op, len(arrays), dict(update.options)])
        self.arrays.extend(arrays)

    def message(self, stamp: Stamp, version: int | None) -> Message:
        head: dict[str, Any] = {
            "step": stamp.step,
            "attempt": stamp.attempt,
            "incarnation": stamp.incarnation,
            "done_below": stamp.done_below,
            "updates": self.updates,
            "seen": version,
            "round": stamp.round,
            "of": stamp.of,
        }
        if self.then_read:
            head["then_read"] = self.then_read
        return Message("push", head, tuple(self.arrays))


def applied_of(server: int, answer: Message) -> Applied:
    head = answer.head
    return Applied(
        server,
        head["applied"],
        head["applied_at"],
        head["staleness"],
        head.get("dropped", False),
        head.get("generation", 0),
        head.get("base", 0),
    )


@dataclass(frozen=True)
class RoundState:
    """What a server says of its rounds.

    ``applied`` counts them, ``due`` are the squares of the next one where it is complete, and
    ``last`` those of the one before. ``waits``: there is something to be clipped.
    """

    applied: int
    waits: bool = False
    due: Mapping[str, float] | None = None
    last: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, head: Mapping[str, Any]) -> RoundState:
        """As it stands in an answer."""
        return cls(head["applied"], head["waits"], head["due"], head["last"])


def next_to_clip(servers: Sequence[RoundState]) -> tuple[int, dict[str, float]] | None:
    """The round that all servers wait to clip by norms, and the sums of their squares.

    Every worker asks after its push, and the one whose push was the last to reach all servers sends
    them the sums. If it is killed before that, another runs its step again and computes the same
    sums; a server accepts them once. Servers that have applied the round already answer with the
    squares that they had contributed.

    >>> ready = RoundState(3, True, {"variable w": 9.0})
    >>> next_to_clip([ready, RoundState(4, last={"variable w": 16.0})])
    (3, {'variable w': 25.0})
    >>> next_to_clip([ready, RoundState(3, True)]) is None
    True
    """
    number = min(state.applied for state in servers)
    totals: dict[str, float] = {}
    for state in servers:
        if state.applied == number and state.due is None:
            return None
        own = state.due if state.applied == number else state.last
        if state.applied > number + 1:
            continue  # the others were restarted, and what they lost is unknown
        for key, square in (own or {}).items():
            totals[key] = totals.get(key, 0.0) + square
    return number, totals
