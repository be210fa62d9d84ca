"""The second phase of a round that is clipped by norms: whoever sees all servers ready goes on.

Every worker asks after its push. The one whose push was the last to reach all servers sees the
round complete on each, and sends them the sums of their squares. Where it is killed before, its
step is run again by another, who sees the same: sums are the same whoever makes them, and a server
takes them once. Norms alone travel; pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Told:
    """What a server says of its rounds.

    ``applied`` counts them, ``due`` are the squares of the next one where it is complete, and
    ``last`` those of the one before. ``waits``: there is something to be clipped.
    """

    applied: int
    waits: bool = False
    due: Mapping[str, float] | None = None
    last: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, head: Mapping[str, Any]) -> Told:
        """As it stands in an answer."""
        return cls(head["applied"], head["waits"], head["due"], head["last"])


def next_to_clip(servers: Sequence[Told]) -> tuple[int, dict[str, float]] | None:
    """The round that all servers wait to clip, and the sums of their squares.

    Servers that have applied it already, as somebody was killed while he told them, say what they
    had given to it.

    >>> next_to_clip([Told(3, True, {"variable w": 9.0}), Told(4, last={"variable w": 16.0})])
    (3, {'variable w': 25.0})
    >>> next_to_clip([Told(3, True, {"variable w": 9.0}), Told(3, True)]) is None
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
