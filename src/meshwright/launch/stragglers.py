"""Which rank is slow but alive: it is named, and nothing else happens to it.

A rank that reads its rows for longer than the others, or is stopped now and then, keeps all of them
at its pace and exceeds no limit. What tells it from the others is that they wait while it works.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .stalls import WAITING, Seen

STRAGGLER_S = 30.0  # over which waiting is summed to find slow ranks
_OWN = ("input", "batch callbacks")  # sections of a step in which no rank waits for another
_SHARE = 0.5  # of the time, and twice that of any other rank
_AGAIN_S = 600.0


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others waited, for this ``share`` of the time, in this section."""

    rank: int
    share: float
    section: str
    window_s: float

    def __str__(self) -> str:
        return (
            f"is slow: for {self.share:.0%} of the last {self.window_s:.0f} s the others waited "
            f"for it, mostly while it was in {self.section!r}"
        )


class Stragglers:
    """Counts, look by look, who was waited for; a verdict every ``window_s``.

    >>> from .progress import Progress
    >>> ranks = [Seen(0, Progress("step", 90)), Seen(1, Progress("input", 90))]
    >>> watch = Stragglers(window_s=10.0)
    >>> print(*[watch.look(ranks, now_s) for now_s in (0.0, 4.0, 8.0)])
    None None None
    >>> print(watch.look(ranks, 12.0))
    is slow: for 100% of the last 12 s the others waited for it, mostly while it was in 'input'
    """

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._begun_s: float | None = None
        self._looked_s = 0.0
        self._held_s: dict[int, Counter[str]] = defaultdict(Counter)
        self._named_s: dict[tuple[int, str], float] = {}

    def look(self, ranks: Iterable[Seen], now_s: float) -> Straggler | None:
        """Take note of what all ranks do; the straggler of the window that ends, if it has one."""
        if self._begun_s is None:
            self._begun_s = self._looked_s = now_s
        took_s, self._looked_s = now_s - self._looked_s, now_s
        present = list(ranks)
        holding = {s.rank: where for s in present if (where := _holds_in(s))}
        if any(s.waits_s for s in present):
            holding |= {s.rank: "script" for s in present if _is_in_own_code(s)}
        if any(_waits(s) and s.rank not in holding for s in present):
            for rank, section in holding.items():
                self._held_s[rank][section] += took_s  # type: ignore[assignment]
        window_s = now_s - self._begun_s
        if window_s < self._window_s:
            return None
        worst = self._worst(window_s, now_s)
        self._begun_s, self._held_s = now_s, defaultdict(Counter)
        return worst

    def _worst(self, window_s: float, now_s: float) -> Straggler | None:
        totals = {rank: sum(by_section.values()) for rank, by_section in self._held_s.items()}
        if not totals:
            return None
        rank, *others = sorted(totals, key=lambda r: -totals[r])
        section = self._held_s[rank].most_common(1)[0][0]
        known_s = self._named_s.get((rank, section))
        is_news = known_s is None or now_s - known_s > _AGAIN_S
        is_alone = not others or totals[rank] > 2 * totals[others[0]]
        if totals[rank] < _SHARE * window_s or not (is_alone and is_news):
            return None
        self._named_s[rank, section] = now_s
        return Straggler(rank, totals[rank] / window_s, section, window_s)


def _waits(state: Seen) -> bool:
    return state.progress.section in WAITING or state.waits_s > 0


def _is_in_own_code(state: Seen) -> bool:
    return state.progress.section == "script" and not state.waits_s


def _holds_in(state: Seen) -> str:
    """The section in which a rank may keep others waiting; empty where it does not."""
    if state.stopped_s and not state.progress.is_over:
        return "stopped"
    return state.progress.section if state.progress.section in _OWN else ""
