"""The second phase of a round that is clipped by norms: one worker sums the squares of all.

Every worker asks after its push. The one whose push was the last to reach all servers sees the
round complete on each, and sends them the sums of their squares. If it is killed before that,
another worker runs its step again and sees the same: every worker computes the same sums, and a
server accepts them once. Only norms are sent; pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
    """The round that all servers wait to clip, and the sums of their squares.

    If a worker was killed while it sent the sums, some servers have applied the round already;
    those answer with the squares that they had contributed.

    >>> ready = RoundState(3, True, {"variable w": 9.0})
    >>> next_to_clip([ready, RoundState(4, last={"variable w": 16.0})])
    (3, {'variable w': 25.0})
    >>> next_to_clip([ready, RoundState(3, True)]) is None
    True
    """
    number = min(told.applied for told in servers)
    totals: dict[str, float] = {}
    for told in servers:
        if told.applied == number and told.due is None:
            return None
        own = told.due if told.applied == number else told.last
        if told.applied > number + 1:
            continue  # the others were restarted, and what they lost is known to nobody
        for key, square in (own or {}).items():
            totals[key] = totals.get(key, 0.0) + square
    return number, totals
