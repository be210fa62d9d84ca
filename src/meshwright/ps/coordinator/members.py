"""The workers of a coordinator: when each was last heard, and what it does. Pure: time comes in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_MOST_FUNCTIONS = 256  # that a worker keeps
_AHEAD_S = 0.01  # a worker is given as many steps ahead as take about that time
_WINDOW = (2, 32)  # least and most of them
_LEARNING = 0.2  # how fast the measured time per step follows
_LOST_BEATS = 3  # that say nothing yet


@dataclass(eq=False)
class Worker:
    """One incarnation of a worker; ``name`` is that of its channel."""

    name: str
    task: str
    incarnation: str
    pid: int
    host: str
    heard_s: float
    what: str = "waits for work"
    step: int | None = None
    since_s: float = 0.0
    step_s: float | None = None  # measured time per step
    num_done: int = 0
    functions: OrderedDict[str, None] = field(default_factory=OrderedDict)
    iterators: set[str] = field(default_factory=set)
    broken_rounds: int = 0  # how many of them it was told

    def heard(self, now_s: float, head: dict[str, Any] | None = None) -> None:
        """A message came from it; ``head`` describes what it does."""
        self.heard_s = now_s
        if head is not None:
            self.what, self.step = head["what"], head["step"]
            self.since_s = now_s - head["for_s"]

    def paused(self, seconds: float, now_s: float) -> None:
        """Nothing could be received for this long, so silence counts from a later time.

        >>> worker = Worker("worker:0/a", "worker:0", "a", 71, "host", heard_s=1.0)
        >>> worker.paused(30.0, now_s=40.0)
        >>> worker.heard_s
        31.0
        >>> worker.paused(30.0, now_s=40.0)  # never later than now
        >>> worker.heard_s
        40.0
        """
        self.heard_s = min(self.heard_s + seconds, now_s)

    def measured(self, seconds: float) -> None:
        """Note how long a step took."""
        self.num_done += 1
        if self.step_s is None:
            self.step_s = seconds
        self.step_s += _LEARNING * (seconds - self.step_s)

    @property
    def window(self) -> int:
        """How many steps it may have at once, so that it never waits for the next one.

        >>> worker = Worker("worker:0/a", "worker:0", "a", 1, "host", 0.0, step_s=0.001)
        >>> worker.window
        10
        """
        least, most = _WINDOW
        if self.step_s is None:
            return least
        return max(least, min(most, round(_AHEAD_S / max(self.step_s, 1e-6))))

    def teach(self, function: str) -> tuple[bool, list[str]]:
        """A function will be called: whether it must be sent, and which ones are dropped for it."""
        if function in self.functions:
            self.functions.move_to_end(function)
            return False, []
        self.functions[function] = None
        extra = len(self.functions) - _MOST_FUNCTIONS
        return True, [self.functions.popitem(last=False)[0] for _ in range(extra)]

    def forget(self, functions: Collection[str]) -> list[str]:
        """Functions that will not be called any more; those that it has."""
        taught = [key for key in functions if key in self.functions]
        for key in taught:
            del self.functions[key]
        return taught

    def report(self, now_s: float) -> str:
        """One line for a report."""
        doing = self.what if self.step is None else f"{self.what}: step {self.step}"
        return (
            f"{self.task} (pid {self.pid} on {self.host}) {doing}, for {now_s - self.since_s:.1f} s"
            f"; last heard {now_s - self.heard_s:.1f} s ago"
        )


def silent(workers: list[Worker], now_s: float, dead_after_s: float) -> list[Worker]:
    """The workers that have been silent for too long."""
    return [worker for worker in workers if now_s - worker.heard_s > dead_after_s]


class LostNames:
    """The names of workers that were lost last; a few thousand, the oldest are forgotten.

    >>> names = LostNames(most=2)
    >>> for name in ("worker:0/a", "worker:0/b", "worker:0/c"):
    ...     names.add(name)
    >>> "worker:0/a" in names, "worker:0/c" in names
    (False, True)
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._names: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Remember one more."""
        self._names[name] = None
        if len(self._names) > self._most:
            del self._names[next(iter(self._names))]


@dataclass(frozen=True)
class Silent:
    """A server's process that has been silent for too long."""

    task: str
    pid: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.task} (pid {self.pid}) was silent for {self.seconds:.1f} s, as if it were "
            "frozen: it was killed, and is started again from its last snapshot."
        )


class Beats:
    """The last beat of every server; one that never beat is not waited for.

    A server beats from a thread of its own, so that long work does not delay a beat. Some beats
    may be lost on their way.

    >>> beats = Beats()
    >>> beats.heard("ps:0", 71, every_s=1.0, now_s=1.0)
    >>> beats.silent(now_s=5.0, limit_s=10.0), beats.silent(now_s=12.0, limit_s=10.0)
    ([], [Silent(task='ps:0', pid=71, seconds=11.0)])
    """

    def __init__(self) -> None:
        self._last_beats: dict[str, tuple[int, float, float]] = {}

    def heard(self, task: str, pid: int, every_s: float, now_s: float) -> None:
        """A server's process has beaten, as it does every so often."""
        self._last_beats[task] = (pid, every_s, now_s)

    def paused(self, seconds: float, now_s: float) -> None:
        """No beat could be received for this long, so silence counts from a later time."""
        self._last_beats = {
            task: (pid, every_s, min(at_s + seconds, now_s))
            for task, (pid, every_s, at_s) in self._last_beats.items()
        }

    def silent(self, now_s: float, limit_s: float) -> list[Silent]:
        """Those that are silent for too long, each reported once until it beats again."""
        servers = [
            Silent(task, pid, now_s - at_s)
            for task, (pid, every_s, at_s) in self._last_beats.items()
            if now_s - at_s > max(limit_s, _LOST_BEATS * every_s)
        ]
        for one in servers:
            del self._last_beats[one.task]
        return servers
