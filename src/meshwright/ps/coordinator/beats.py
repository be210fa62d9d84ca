"""When each server was last heard: a frozen one beats no more. Pure: time comes in."""

from __future__ import annotations

from dataclasses import dataclass

_LOST_BEATS = 3  # that say nothing yet


@dataclass(frozen=True)
class Silent:
    """A server's process of which nothing has been heard for so long."""

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
        self._heard: dict[str, tuple[int, float, float]] = {}

    def heard(self, task: str, pid: int, every_s: float, now_s: float) -> None:
        """A server's process has beaten, as it does every so often."""
        self._heard[task] = (pid, every_s, now_s)

    def paused(self, seconds: float) -> None:
        """For this time no beat could be received."""
        kept = self._heard.items()
        self._heard = {task: (pid, every_s, at_s + seconds) for task, (pid, every_s, at_s) in kept}

    def silent(self, now_s: float, limit_s: float) -> list[Silent]:
        """Those that are silent for too long, each reported once until it beats again."""
        found = [
            Silent(task, pid, now_s - at_s)
            for task, (pid, every_s, at_s) in self._heard.items()
            if now_s - at_s > max(limit_s, _LOST_BEATS * every_s)
        ]
        for one in found:
            del self._heard[one.task]
        return found
