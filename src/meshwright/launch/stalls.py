"""Which rank holds the others up: a pure rule over what every rank was last seen doing.

One that waits for another is late, too, and is not to blame: only those are that are furthest
behind. While one of them is within the limit of its own section (compiling, say), no alarm is
raised for any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .limits import OWN, SCRIPT_SETTING, Limits
from .progress import Progress

WAITING = ("step", "barrier", "save")  # sections in which a rank may wait for another
_SAME_S = 0.2  # times of another host's ranks are known so well


@dataclass(frozen=True)
class Seen:
    """What a rank was last seen doing, and for how long it has been stopped, if it is.

    ``waits_s``: for how long it has waited in native code, in a section where it need not wait.
    ``idle_s``: for how long it has done next to nothing, in code of the program's own.
    """

    rank: int
    progress: Progress
    stopped_s: float = 0.0
    waits_s: float = 0.0
    idle_s: float = 0.0

    def age_s(self, now_s: float) -> float:
        """For how long it has been in its section."""
        return now_s - self.progress.since_s


def learn(limits: Limits, before: Seen, now: Seen, looked_s: float) -> None:
    """Take note of the section that a rank has left since it was looked at, at ``looked_s``.

    >>> limits = Limits(steps=100)
    >>> reads, steps = Progress("input", 7, since_s=0.0), Progress("step", 8, since_s=12.0)
    >>> learn(limits, Seen(1, reads), Seen(1, steps), looked_s=11.9)
    >>> round(limits.of("input", now_s=12.0), 1)
    23.8
    """
    then, new = before.progress, now.progress
    is_same = (then.section, then.step) == (new.section, new.step)
    if not is_same or new.since_s - then.since_s > _SAME_S:
        limits.learn(then.section, max(0.0, looked_s - then.since_s), new.step, looked_s)


@dataclass(frozen=True)
class Stall:
    """A rank that holds the others up: ``what`` it is, in words, and for how long."""

    rank: int
    what: str
    for_s: float
    limit_s: float
    setting: str = ""  # by which the limit is changed

    def text(self, is_stopped: bool) -> str:
        """The same in words.

        >>> Stall(1, "is stuck in 'input'", 10.52, 10.0).text(is_stopped=False)
        "is stuck in 'input' (for 10.5 s, and the limit is 10 s)"
        """
        cause = "is stopped" if is_stopped else self.what
        setting = f": {self.setting}" if self.setting else ""
        limit = f", and the limit is {self.limit_s:.0f} s{setting}" if self.limit_s else ""
        return f"{cause} (for {self.for_s:.1f} s{limit})"


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
    if of_own_code := _idle(present, limits, now_s) or _of_own_loops(present, limits, now_s):
        return of_own_code
    behind = _furthest_behind(present)
    waits = [s for s in present if _waits(s, behind[0].progress.step, limits, now_s)]
    # A long step of all of them, perhaps, or all read: none holds another up.
    is_shared = not waits or len(waits) == len(behind) == len(present)
    limit_s = limits.together if is_shared else limits.of
    allowed_s = {s.rank: limit_s(s.progress.section, now_s) for s in present}
    late = [s for s in present if not s.progress.is_over and s.age_s(now_s) > allowed_s[s.rank]]
    if all(s.progress.section == "script" for s in late):
        return []  # which may take any time while no rank waits for it
    over = [s for s in behind if s.progress.is_over]
    waiting = [s for s in late if s in waits]
    if over and waiting:
        others = ", ".join(str(s.rank) for s in waiting)
        what = f"has ended, and rank {others} waits for it"
        return [Stall(s.rank, what, s.age_s(now_s), 0.0) for s in over]
    return [
        Stall(s.rank, _what(s, behind), s.age_s(now_s), allowed_s[s.rank])
        for s in behind
        if s in late
    ]


@dataclass(frozen=True)
class Held:
    """Ranks that are in code of the program's own, while all others wait for them."""

    holders: tuple[Seen, ...]
    waiting: tuple[Seen, ...]
    for_s: float

    @property
    def waiters(self) -> str:
        """Who waits, in words: ``rank 0, 2 waits``."""
        return f"rank {', '.join(str(s.rank) for s in self.waiting)} waits"


def held_up(ranks: Iterable[Seen], limits: Limits, now_s: float) -> Held | None:
    """The ranks that hold all others up, for as long as they are there and a rank waits.

    A rank that has ended waits, too: JAX lets none go before the last one comes.

    >>> waits, elsewhere = Progress("barrier", 8, 10.0, 1), Progress("script", 8, 0.0, 2)
    >>> held = held_up([Seen(0, waits), Seen(1, elsewhere)], Limits(), now_s=25.0)
    >>> [s.rank for s in held.holders], held.waiters, held.for_s
    ([1], 'rank 0 waits', 15.0)
    """
    present = list(ranks)
    holders = [s for s in present if s.progress.section in OWN and not s.waits_s]
    if not holders:
        return None
    least = min(s.progress.step for s in holders)
    waits_s = {s: _waits_for_s(s, least, limits, now_s) for s in present if s not in holders}
    if not waits_s or not all(waits_s.values()):
        return None
    for_s = min(max(waits_s.values()), min(s.age_s(now_s) for s in holders))
    return Held(tuple(holders), tuple(waits_s), for_s)


def _waits_for_s(state: Seen, least: int, limits: Limits, now_s: float) -> float:
    """For how long a rank has waited for those that are in code of their own; 0: it need not."""
    at = state.progress
    if at.section == "step" and at.step <= least:
        return 0.0  # it has begun this step after all others, or with them
    if at.is_over or _waits(state, least, limits, now_s):
        return state.age_s(now_s)
    return state.waits_s


def _idle(present: list[Seen], limits: Limits, now_s: float) -> list[Stall]:
    """Those that do nothing in code of the program's own, while all others wait for them.

    While one of them works, it is only slow, and the rest may wait for it.
    """
    held = held_up(present, limits, now_s)
    if held is None:
        return []
    for_s, limit_s = min(held.for_s, *(s.idle_s for s in held.holders)), limits.script_s
    if for_s <= limit_s:
        return []
    return [
        Stall(s.rank, _nothing_done(s, held.waiters), for_s, limit_s, SCRIPT_SETTING)
        for s in held.holders
    ]


def _nothing_done(state: Seen, waiters: str) -> str:
    return f"does nothing in {state.progress.section!r}, and {waiters} for it"


def _of_own_loops(present: list[Seen], limits: Limits, now_s: float) -> list[Stall]:
    """Those for which loops wait that enter no section: all that have ended, or are elsewhere.

    What a program does of its own, in one rank alone, has the limit of ``script``.
    """
    own = [s for s in present if s.waits_s and s.progress.section == "script"]
    waiting = [s for s in own if s.waits_s > limits.unseen_wait_s]
    if not waiting:
        return []
    rest = [s for s in present if s not in own]
    over = [s for s in rest if s.progress.is_over]
    waits_s, others = max(s.waits_s for s in waiting), ", ".join(str(s.rank) for s in waiting)
    if len(over) == len(rest):
        what = f"has ended, and rank {others} waits for it"
        return [Stall(s.rank, what, s.age_s(now_s), 0.0) for s in over]
    limit_s = limits.of("script", now_s)
    if waits_s <= limit_s or any(s.progress.section != "script" for s in rest if s not in over):
        return []
    what = f"is in 'script', and rank {others} waits for it"
    return [Stall(s.rank, what, waits_s, limit_s) for s in rest if s not in over]


def _furthest_behind(ranks: list[Seen]) -> list[Seen]:
    step = min(s.progress.step for s in ranks)
    last = [s for s in ranks if s.progress.step == step]
    return [s for s in last if s.progress.section not in WAITING and not s.waits_s] or last


def _waits(state: Seen, least: int, limits: Limits, now_s: float) -> bool:
    """Whether it may wait for another: a callback reads the results of a step that others take."""
    at = state.progress
    if at.section != "batch callbacks":
        return at.section in WAITING
    return at.step > least and state.age_s(now_s) > limits.of(at.section, now_s)


def _what(state: Seen, behind: list[Seen]) -> str:
    section, step = state.progress.section, state.progress.step
    if section == "launch":
        return "has not joined (does the program import meshwright, or call mw.join()?)"
    where = f"is stuck in {section!r}" + (f" after step {step}" if step else "")
    if section == "step":
        where = f"is stuck in step {step}"
    if len(behind) > 1 and section in WAITING:
        where += ", as are all that are furthest behind"
    return where
