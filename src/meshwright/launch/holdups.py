"""Which rank is named because all others wait for it while it runs code of the program's own.

It is only named, once; whether it ends the group is for :mod:`.stalls` to say, much later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .limits import SCRIPT_SETTING, Limits
from .stalls import Held, Seen, held_up

_WORKS_S = 3.0  # one that has done something in so many seconds works
_AGAIN_S = 600.0


@dataclass(frozen=True)
class Holdup:
    """A rank that holds all others up: where, for how long, and what will come of it."""

    rank: int
    section: str
    for_s: float
    waiters: str
    ends_after_s: float | None  # None: it works

    def __str__(self) -> str:
        where = f"has been in {self.section!r} for {self.for_s:.0f} s while {self.waiters} for it"
        if self.ends_after_s is None:
            return f"{where}; it works there, and goes on"
        ends = f"after {self.ends_after_s:.0f} s of that the group ends ({SCRIPT_SETTING})"
        return f"{where}; it does nothing there, and {ends}"


class Holdups:
    """Says once of each rank that it holds the others up, soon after the stall timeout.

    >>> from .progress import Progress
    >>> waits, elsewhere = Progress("barrier", 8, 0.0, 1), Progress("script", 8, 0.0, 2)
    >>> ranks, holdups = [Seen(0, waits), Seen(1, elsewhere)], Holdups(Limits())
    >>> print(*holdups.look(ranks, 11.0), *holdups.look(ranks, 12.5), *holdups.look(ranks, 13.0))
    has been in 'script' for 12 s while rank 0 waits for it; it works there, and goes on
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._named_s: dict[tuple[int, str], float] = {}

    def look(self, ranks: Iterable[Seen], now_s: float) -> list[Holdup]:
        """The ranks that are new since the last ten minutes."""
        held = held_up(ranks, self._limits, now_s)
        if held is None or held.for_s <= self._limits.named_s:
            return []
        news = [s for s in held.holders if self._is_news(s, now_s)]
        return [self._holdup(s, held) for s in news]

    def _is_news(self, state: Seen, now_s: float) -> bool:
        key = state.rank, state.progress.section
        named_s, is_new = self._named_s.get(key), False
        if named_s is None or now_s - named_s > _AGAIN_S:
            self._named_s[key], is_new = now_s, True
        return is_new

    def _holdup(self, state: Seen, held: Held) -> Holdup:
        ends_after_s = self._limits.script_s if state.idle_s > _WORKS_S else None
        section = state.progress.section
        return Holdup(state.rank, section, held.for_s, held.waiters, ends_after_s)
