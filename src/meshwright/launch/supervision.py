"""When a task that ended is started again: a pure rule, with times as arguments."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import Task


@dataclass(frozen=True)
class Event:
    """What happened to a task, ``time_s`` after its cluster was started.

    ``what`` is "started", "ended" (by itself, exit code 0), "died", "restarted", "given up" or
    "stopped" (with its cluster, or removed). ``exit_code`` is minus the number of a signal.

    >>> print(Event(2.5, Task("worker", 1), "died", -9))
    2.500 s: worker:1 died (signal 9)
    """

    time_s: float
    task: Task
    what: str
    exit_code: int | None = None

    def __str__(self) -> str:
        text = f"{self.time_s:.3f} s: {self.task} {self.what}"
        return text if self.exit_code is None else f"{text} ({exit_text(self.exit_code)})"


@dataclass(frozen=True)
class Restarts:
    """How often a task may be restarted: ``at_most`` times, with growing delays between.

    The first restart is immediate; the next waits ``first_s``, then twice that, and so on up to
    ``longest_s``. After ``healthy_s`` of running the count starts from zero again.
    """

    at_most: int = 10
    first_s: float = 0.1
    longest_s: float = 5.0
    healthy_s: float = 30.0

    def count(self, restarts: int, ran_s: float) -> int:
        """The restarts that count against a task that has now run for ``ran_s``."""
        return 0 if ran_s >= self.healthy_s else restarts

    def delay_s(self, restarts: int) -> float | None:
        """How long to wait after this many restarts; ``None``: it is given up.

        >>> [Restarts(at_most=3).delay_s(n) for n in range(4)]
        [0.0, 0.1, 0.2, None]
        """
        if restarts >= self.at_most:
            return None
        return min(self.first_s * 2 ** (restarts - 1), self.longest_s) if restarts else 0.0


def exit_text(exit_code: int) -> str:
    """An exit code in words.

    >>> exit_text(-9), exit_text(1)
    ('signal 9', 'exit code 1')
    """
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
