"""Which rank holds the others up: a pure rule over what every rank was last seen doing.

One that waits for another is late, too, and is not to blame: only those are that are furthest
behind. While one of them is within the limit of its own section (compiling, say), no alarm is
raised for any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .progress import Progress

WAITING = ("step", "barrier", "save")  # sections in which a rank may wait for another
_FIRST_S = {"join": 600.0, "script": 600.0, "compile": 1800.0, "save": 600.0, "callbacks": 600.0}
_FIRST_OTHER_S = 300.0
_LEARNT = ("input", "step", "batch callbacks")
_FIRST_STEPS = 32  # the host runs ahead of the devices at first, and its steps seem short
_TIMES_LONGEST = 5.0


@dataclass
class Limits:
    """How long a section may take, learnt from those that were seen to end.

    Input, step and batch callbacks may take 300 s during the first 32 steps, and then
    ``shortest_s``. Before a rank joins it is ``join_s``, in the compiler 30 minutes, elsewhere
    10 minutes. Five times the longest that has ended is allowed in any case.

    >>> limits = Limits(shortest_s=10.0)
    >>> limits.of("input")
    300.0
    >>> limits.learn("input", 4.0, steps=100)
    >>> limits.of("input"), limits.of("step")
    (20.0, 10.0)
    """

    shortest_s: float = 10.0
    join_s: float = 60.0
    longest_s: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    def learn(self, section: str, took_s: float, steps: int = 0) -> None:
        """Take note of a section that ended; ``steps`` is how many steps had begun by then."""
        self.longest_s[section] = max(self.longest_s.get(section, 0.0), took_s)
        self.steps = max(self.steps, steps)

    def of(self, section: str) -> float:
        """How long the section may take, in seconds."""
        if section == "launch":
            return self.join_s
        if section in _LEARNT and self.steps > _FIRST_STEPS:
            first_s = self.shortest_s
        else:
            first_s = _FIRST_S.get(section, _FIRST_OTHER_S)
        return max(first_s, _TIMES_LONGEST * self.longest_s.get(section, 0.0))


@dataclass(frozen=True)
class Seen:
    """What a rank was last seen doing, and for how long it has been stopped, if it is."""

    rank: int
    progress: Progress
    stopped_s: float = 0.0

    def age_s(self, now_s: float) -> float:
        """For how long it has been in its section."""
        return now_s - self.progress.since_s


@dataclass(frozen=True)
class Stall:
    """A rank that holds the others up: ``what`` it is, in words, and for how long."""

    rank: int
    what: str
    for_s: float
    limit_s: float


def stalls(ranks: Iterable[Seen], limits: Limits, now_s: float) -> list[Stall]:
    """The ranks to blame; none while all that are late wait for one that may take its time.

    >>> def seen(rank, section, step, since_s):
    ...     return Seen(rank, Progress(section, step, since_s, pid=1))
    >>> limits = Limits(steps=100)
    >>> [s.rank for s in stalls([seen(0, "step", 8, 0), seen(1, "input", 7, 0)], limits, 20.0)]
    [1]
    >>> stalls([seen(0, "step", 8, 0), seen(1, "compile", 7, 0)], limits, 20.0)
    []
    """
    present = list(ranks)
    stopped = [s for s in present if s.stopped_s > limits.shortest_s]
    if stopped:
        return [Stall(s.rank, "is stopped", s.stopped_s, limits.shortest_s) for s in stopped]
    late = [s for s in present if not s.progress.is_over and s.age_s(now_s) > _limit(s, limits)]
    if all(s.progress.section == "script" for s in late):
        return []  # which may take any time while no rank waits for it
    behind = _furthest_behind(present)
    gone = [s for s in behind if s.progress.is_over]
    waiting = [s for s in late if s.progress.section in WAITING]
    if len(waiting) == len(behind) == len(present):  # a long step of all of them, perhaps
        late = [s for s in late if s.age_s(now_s) > max(_FIRST_OTHER_S, _limit(s, limits))]
    if gone and waiting:
        others = ", ".join(str(s.rank) for s in waiting)
        what = f"has ended, and rank {others} waits for it"
        return [Stall(s.rank, what, s.age_s(now_s), 0.0) for s in gone]
    return [
        Stall(s.rank, _what(s, behind), s.age_s(now_s), _limit(s, limits))
        for s in behind
        if s in late
    ]


def _limit(seen: Seen, limits: Limits) -> float:
    return limits.of(seen.progress.section)


def _furthest_behind(ranks: list[Seen]) -> list[Seen]:
    step = min(s.progress.step for s in ranks)
    last = [s for s in ranks if s.progress.step == step]
    return [s for s in last if s.progress.section not in WAITING] or last


def _what(seen: Seen, behind: list[Seen]) -> str:
    section, step = seen.progress.section, seen.progress.step
    if section == "launch":
        return "has not joined (does the program import meshwright, or call mw.join()?)"
    where = f"is stuck in {section!r}" + (f" after step {step}" if step else "")
    if section == "step":
        where = f"is stuck in step {step}"
    if len(behind) > 1 and section in WAITING:
        where += ", as are all that are furthest behind"
    return where
