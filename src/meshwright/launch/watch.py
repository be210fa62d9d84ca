"""What the ranks of this host do, as their agent sees it, and the failure to name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import outside
from .failure import Failure
from .holdups import Holdups
from .idleness import Unseen
from .join import DUMP, board_path, error_path, stack_path
from .limits import Limits
from .logs import LogPump
from .nodes import Hub, Spoke
from .progress import Progress, read_board
from .signals import PREEMPTED
from .spec import RANK, Task
from .stalls import Seen, Stall, learn, stalls
from .stragglers import STRAGGLER_S, Stragglers
from .supervision import exit_text
from .supervisor import Supervisor

_CAUSES = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)  # no failure of others causes these
_SETTLE_S = 0.3  # for a death by signal to be seen beside the errors that it causes in others


class Watch:
    """Reads what every rank of this host writes, and judges it; ``states`` are what it saw last."""

    def __init__(
        self,
        ranks: Iterable[int],
        total: int,
        folder: Path,
        supervisor: Supervisor,
        logs: LogPump,
        limits: Limits,
    ) -> None:
        self._total, self._folder = total, folder
        self._supervisor, self._logs, self._limits = supervisor, logs, limits
        self._stragglers = Stragglers(STRAGGLER_S)
        self._looked_s = time.monotonic()
        now = Progress(since_s=self._looked_s)
        self.states = {rank: Seen(rank, now) for rank in ranks}
        self._unseen = {
            rank: Unseen(limits, functools.partial(self._stack_of, rank)) for rank in self.states
        }
        self._holdups = Holdups(limits)
        self._uncounted_s = dict.fromkeys(self.states, 0.0)
        self._others: dict[int, Seen] = {}

    def look(self, link: Hub | Spoke | None) -> Failure | None:
        """Read what all ranks do; the failure to end the group for, if there is one."""
        now_s = time.monotonic()
        codes = self.exit_codes()
        for rank, before in self.states.items():
            self.states[rank] = self._see(rank, before, now_s, rank in codes)
        others = [] if link is None else link.others()
        for own in others:
            learn(self._limits, self._others.get(own.rank, own), own, self._looked_s)
        self._others = {seen.rank: seen for seen in others}
        self._looked_s = now_s
        if failing := self._failing(codes):
            if not any(codes.get(rank, 0) in _CAUSES for rank in failing):
                time.sleep(_SETTLE_S)
                codes = self.exit_codes()
            return self._first_failure(codes)
        if isinstance(link, Spoke):
            for rank, what in link.named():
                self._name(rank, what)
            blamed, link.blamed = link.blamed, None
            return None if blamed is None else self._stalled(blamed)
        ranks = [*self.states.values(), *others]
        stalled = stalls(ranks, self._limits, now_s)
        if not stalled:
            self._name_slow(ranks, now_s, link)
            return None
        if stalled[0].rank in self.states or link is None:
            return self._stalled(stalled[0])
        link.blame(stalled[0])  # its own launcher can read its stack
        return None

    def _see(self, rank: int, before: Seen, now_s: float, has_ended: bool) -> Seen:
        progress = read_board(board_path(self._folder, rank))
        learn(self._limits, before, Seen(rank, progress), self._looked_s)
        if has_ended and not progress.is_over:
            progress = Progress("exit", progress.step, now_s, progress.pid)
        pid = self._supervisor.pid(task_of(rank))
        stopped_s = 0.0
        if not has_ended and outside.is_stopped(pid):
            stopped_s = before.stopped_s + now_s - self._looked_s
        if progress.section == "script" and not progress.step:
            self._uncounted_s[rank] += now_s - self._looked_s
        waits_s, idle_s = self._unseen[rank].look(progress, now_s)
        return Seen(rank, progress, stopped_s, waits_s, idle_s)

    def exit_codes(self) -> dict[int, int]:
        """The exit codes of those that have ended, minus the number of a signal."""
        result = {}
        for event in self._supervisor.events:
            if event.what in ("ended", "died"):
                result[event.task.index] = event.exit_code or 0
        return result

    def _failing(self, codes: dict[int, int]) -> list[int]:
        died = [rank for rank, code in codes.items() if code not in (0, PREEMPTED)]
        alone = [r for r in codes if not self.pid(r)] if any(map(self.pid, self.states)) else []
        raised = [
            rank
            for rank in self.states
            if error_path(self._folder, rank).exists() and rank not in died
        ]
        return [*died, *raised, *alone]

    def pid(self, rank: int) -> int:
        """The process of a rank; 0 before it joins."""
        return self.states[rank].progress.pid

    def _first_failure(self, codes: dict[int, int]) -> Failure:
        """Of all that have failed the one to name: killed by a signal, or else the first."""
        failing = self._failing(codes)
        killed = [rank for rank in failing if codes.get(rank, 0) < 0]
        if killed:
            what = f"was killed by {exit_text(codes[killed[0]])} {self._where(killed[0])}"
            return self._failure(killed[0], what, 128 - codes[killed[0]])
        written = {
            rank: error_path(self._folder, rank).stat().st_mtime_ns
            for rank in failing
            if error_path(self._folder, rank).exists()
        }
        if written:
            rank = min(written, key=lambda r: written[r])
            trace = error_path(self._folder, rank).read_text()
            what = f"raised an exception {self._where(rank)}{_ended_well(codes)}"
            failure = self._failure(rank, what, codes.get(rank) or 1, trace)
            return dataclasses.replace(failure, section="failed", lines=())
        rank = failing[0]
        if codes[rank] == 0:
            what = "ended without joining the group (does it import meshwright?)"
            return self._failure(rank, what, 1)
        what = f"ended with {exit_text(codes[rank])} {self._where(rank)}"
        return self._failure(rank, what, codes[rank])

    def _where(self, rank: int) -> str:
        progress = self.states[rank].progress
        return f"after step {progress.step}" if progress.step else "before any step was counted"

    def _stalled(self, stall: Stall) -> Failure:
        progress = self.states[stall.rank].progress
        unreachable = self.states[stall.rank].stopped_s or progress.is_over
        stack = "" if unreachable else self._stack_of(stall.rank)
        what = stall.text(bool(self.states[stall.rank].stopped_s))
        code = 1
        if progress.is_over:
            code = self.exit_codes().get(stall.rank) or 1
        return self._failure(stall.rank, what, code, stack)

    def _name_slow(self, ranks: Sequence[Seen], now_s: float, link: Hub | Spoke | None) -> None:
        """Say which ranks the others wait for; they go on."""
        slow = [self._stragglers.look(ranks, now_s), *self._holdups.look(ranks, now_s)]
        for one in slow:
            if one is not None:
                self._name(one.rank, str(one))
                if link is not None and one.rank not in self.states:
                    link.name(one.rank, str(one))  # its own launcher can read its stack

    def _name(self, rank: int, what: str) -> None:
        if rank not in self.states:
            say(f"rank {rank} of {self._total} (on another host) {what}.")
            return
        stack = "" if self.states[rank].stopped_s else self._stack_of(rank)
        say(dataclasses.replace(self._failure(rank, what, 0, stack), lines=()).text())

    def _stack_of(self, rank: int) -> str:
        """Where the Python of a rank is; empty if it does not say so soon."""
        if not self.pid(rank):
            return ""
        path = stack_path(self._folder, rank)
        return outside.stack_from(path, lambda: self._supervisor.send_signal(task_of(rank), DUMP))

    def _failure(self, rank: int, what: str, code: int, stack: str = "") -> Failure:
        progress = self.states[rank].progress
        name = str(task_of(rank))
        return Failure(
            rank,
            self._total,
            socket.gethostname(),
            self._supervisor.pid(task_of(rank)),
            progress.section,
            progress.step,
            what,
            stack,
            tuple(self._logs.last_lines(name, wait_s=0.2)),
            code,
            self._uncounted_s[rank],
        )

    def saved(self) -> int:
        """The step of the newest checkpoint that one of them has written or begun with."""
        boards = [read_board(board_path(self._folder, rank)) for rank in self.states]
        return max(-1, *(board.saved for board in boards))


def _ended_well(codes: Mapping[int, int]) -> str:
    """Who had ended without an error: an exception elsewhere may come from waiting for them.

    >>> _ended_well({1: 0, 2: 1, 3: 0}), _ended_well({2: 1})
    ('; ranks 1, 3 had ended by then, with exit code 0', '')
    """
    ended = [str(rank) for rank, code in codes.items() if code == 0]
    if not ended:
        return ""
    name = "rank" if len(ended) == 1 else "ranks"
    return f"; {name} {', '.join(ended)} had ended by then, with exit code 0"


def task_of(rank: int) -> Task:
    """A rank as the supervisor knows it."""
    return Task(RANK, rank)


def say(text: str) -> None:
    """Write a line of the launcher's own."""
    with contextlib.suppress(OSError):  # the terminal is gone
        print(f"meshwright launch: {text}", file=sys.stderr, flush=True)
