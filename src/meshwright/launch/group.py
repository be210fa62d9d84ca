"""``meshwright launch --processes``: a synchronous group on this machine, and its agent.

The agent is the launcher itself: outside the ranks, so it outlives them and can end one that is
frozen. It reads what they write (:mod:`.progress`), judges it (:mod:`.stalls`), says what has
happened to the others (:mod:`.join`), and starts the group again where it may (:mod:`.elastic`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import ClusterError
from . import outside
from .agreement import Meeting
from .devices import device_variables
from .discovery import Discovery
from .doors import group_keys
from .elastic import FAILURES, MOST, Elastic, failures_text
from .failure import Failure
from .join import (
    AGENT,
    AGREE,
    DUMP,
    JOIN,
    MEETING,
    TELL,
    board_path,
    error_path,
    failure_path,
    stack_path,
)
from .joining import GENERATION
from .logs import LogPump
from .membership import Membership
from .nodes import Hub, Share, Spoke, rendezvous
from .private_folder import PrivateFolder
from .processes import free_port, program
from .progress import Progress, new_board, read_board
from .signals import PATIENCE_S, PREEMPTED, Stopping, passing_on
from .spec import RANK, Task
from .stalls import Limits, Seen, Stall, stalls
from .stragglers import Stragglers
from .supervision import exit_text
from .supervisor import Supervisor

_LOOK_EVERY_S = 0.05
_SETTLE_S = 0.3  # for a death by signal to be seen beside the errors that it causes in others
_GRACE_S = 5.0  # for the others to run their ``finally`` blocks
_OF_FAILED_S = 0.5  # for the one that failed
_AFTER_EXIT_S = 0.5  # a program that is over, and whose process only waits for others
_STRAGGLER_S = 30.0  # over which waiting is summed to find slow ranks
_RESTARTS = 10  # without a newer checkpoint, where the number of processes may change
_NOISE = ("[Gloo] Rank ",)
_CHANGED = "The number of processes changes: the group"


@dataclass(frozen=True)
class GroupOptions:
    """How a group is started, watched and started again.

    ``processes`` is how many run on each host, or the most of them where ``least_processes`` is
    given; ``nodes`` and ``least_nodes`` say the same of hosts. Raises
    :class:`~meshwright.errors.ClusterError`, naming every invalid number.
    """

    processes: int = 1
    devices: int | None = None  # CPU devices to make in each process
    log_dir: Path | None = None
    stall_s: float = 10.0
    join_s: float = 60.0
    agree: bool = True
    nodes: int = 1  # hosts, on each of which so many processes are started
    rendezvous: str = ""  # host:port, where there are several
    least_processes: int | None = None
    least_nodes: int | None = None
    max_restarts: int | None = None  # 10 where the number of processes or hosts may change, else 0
    discovery: Path | None = None  # a script that lists hosts

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be {least} or more; received {value}."
            for name, value, least in (
                ("processes", self.processes, 1),
                ("nodes", self.nodes, 1),
                ("devices", 1 if self.devices is None else self.devices, 1),
                ("max_restarts", self.max_restarts or 0, 0),
            )
            if value < least
        ]
        faults += [
            f"{name} must be from 1 to {most}; received {least}."
            for name, least, most in (
                ("the least number of processes", self.least_processes, self.processes),
                ("the least number of nodes", self.least_nodes, self.nodes),
            )
            if least is not None and not 1 <= least <= most
        ]
        faults += [
            f"{name} must be above 0 seconds; received {value}."
            for name, value in (("stall_s", self.stall_s), ("join_s", self.join_s))
            if not value > 0
        ]
        if self.nodes > 1 and not self.rendezvous:
            faults.append("several nodes need --rendezvous host:port, the same on each of them.")
        if self.nodes > 1 and (self.least_processes is not None or self.discovery):
            faults.append(
                "with several nodes the number of nodes may change (--nodes MIN:MAX), and not that "
                "of the processes on each."
            )
        if self.discovery is not None and self.least_processes is None:
            faults.append("--host-discovery-script needs --processes MIN:MAX.")
        if faults:
            raise ClusterError("\n".join(faults))

    @property
    def is_elastic(self) -> bool:
        """Whether the number of processes may change."""
        return self.least_processes is not None or self.least_nodes is not None

    @property
    def restarts(self) -> int:
        """How often the group may be started again without a newer checkpoint."""
        if self.max_restarts is not None:
            return self.max_restarts
        return _RESTARTS if self.is_elastic else 0

    def rule(self) -> Elastic:
        """The rule by which the group is started again."""
        least = self.processes if self.least_processes is None else self.least_processes
        return Elastic(least, self.processes, self.restarts)


def run_group(arguments: Sequence[str], options: GroupOptions) -> int:
    """Run a Python program as every process of a group; the exit code of its first failure.

    Where the options allow it, a group that failed, or for which there are more or fewer places
    now, is started again: the program runs again, and goes on from its newest checkpoint. Raises
    :class:`~meshwright.errors.ClusterError` where there is no such program, and where
    accelerators cannot be shared out evenly.
    """
    if not Path(arguments[0]).is_file():
        raise ClusterError(f"there is no program {arguments[0]!r} to launch.")
    return run_here(arguments, options).code


def run_here(arguments: Sequence[str], options: GroupOptions) -> End:
    """Run this host's part of a group, again as often as it may be; how the last one ended."""
    rule, began_s, failed_s = options.rule(), time.monotonic(), list[float]()
    with passing_on() as stopping, _Ground(options, rule) as ground:
        generation = 0
        while True:
            start = ground.start(generation, failures_text(failed_s, time.monotonic() - began_s))
            if start is None or stopping.number:
                return End(PREEMPTED if generation else stopping.exit_code([]))
            with Group(arguments, options, start) as group:
                end = group.wait(stopping, ground)
            if end.failure is not None:
                failed_s.append(time.monotonic() - began_s)
                _say(end.failure.text())
            if not end.again:
                if end.why:
                    _say(end.why)
                return end
            generation += 1
            _say(f"{end.why or 'The group'} is started again {_from(end.saved)}.")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(f"meshwright launch: {text}", file=sys.stderr, flush=True)


def _from(saved: int) -> str:
    return "from the beginning" if saved < 0 else f"from the checkpoint of step {saved}"


@dataclass(frozen=True)
class Start:
    """What a group is started with: its share of the ranks, their places, and what they read."""

    share: Share
    places: tuple[int, ...]
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class End:
    """How a group has ended; ``again``: it is to be started again, and else ``why`` not."""

    code: int  # the exit code
    failure: Failure | None = None
    again: bool = False
    why: str = ""
    saved: int = -1  # the step of the newest checkpoint; -1: there is none
    first_rank: int = 0  # of this host


class _Ground:
    """What lasts while groups are started again: link to other hosts, places, compiled programs."""

    def __init__(self, options: GroupOptions, rule: Elastic) -> None:
        self._options, self.rule = options, rule
        if options.log_dir is not None:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        device_variables(options.processes, options.devices, os.environ)  # raises
        self.folder = PrivateFolder()
        self._discovery: Discovery | None = None
        self.link: Hub | Spoke | None = None
        try:
            if options.discovery is not None:
                self._discovery = Discovery(options.discovery)
            if options.nodes > 1:
                least = options.least_nodes or options.nodes
                goes_on = rule.max_restarts > 0
                self.link = rendezvous(
                    options.rendezvous, least, options.nodes, goes_on, options.stall_s
                )
        except BaseException:
            self.close()
            raise
        self._places: list[int] = []

    def start(self, generation: int, failures: str) -> Start | None:
        """The next start; ``None`` where the other hosts have come to their end."""
        self._places = self._wait_for_places()
        count, wait_s = len(self._places), self._options.join_s
        if self.link is None:
            share = Share(0, count, count, f"127.0.0.1:{free_port()}", "")
        else:
            met = self.link.meet(count, wait_s)
            if met is None:
                return None
            share = met
        variables = {GENERATION: str(generation), FAILURES: failures}
        if self._options.is_elastic:
            variables[MOST] = str(self._options.nodes * self._options.processes)
        if self.rule.max_restarts > 0:
            variables |= _compiled_in(self.folder.path)
        return Start(share, tuple(self._places), tuple(variables.items()))

    def has_changed(self) -> bool:
        """Whether a group on other places, or other hosts, is to take the place of this one."""
        if self.link is not None:
            return isinstance(self.link, Hub) and self.link.has_changed()
        return self._present() != self._places

    @property
    def outlives_hosts(self) -> bool:
        """Whether the group goes on where another host leaves."""
        return self._options.least_nodes is not None

    def close(self) -> None:
        """Leave the other hosts, and what was compiled."""
        if self._discovery is not None:
            self._discovery.close()
        if self.link is not None:
            self.link.close()
        self.folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _present(self) -> list[int]:
        return self.rule.places(None if self._discovery is None else self._discovery.places)

    def _wait_for_places(self) -> list[int]:
        until_s = time.monotonic() + self._options.join_s
        while len(found := self._present()) < self.rule.least:
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"there are {len(found)} places for processes after "
                    f"{self._options.join_s:g} s, and {self.rule.least} are needed."
                )
            time.sleep(_LOOK_EVERY_S)
        return found


def _compiled_in(folder: Path) -> dict[str, str]:
    """Variables by which a process finds what those of former starts have compiled."""
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {} if "JAX_COMPILATION_CACHE_DIR" in os.environ else wanted


def run_module(name: str, options: GroupOptions) -> int:
    """The same for a module of this package."""
    return run_here(["-m", name], options).code


class Group:
    """The processes of a group on this machine, for as long as it is open."""

    def __init__(self, arguments: Sequence[str], options: GroupOptions, start: Start) -> None:
        self._options, self._share = options, start.share
        self._link: Hub | Spoke | None = None
        self._changing_until_s: float | None = None
        self._folder = PrivateFolder()
        self._logs = LogPump(
            show=True, remembered=60, folder=options.log_dir, to_stdout=True, hidden=_NOISE
        )
        self._supervisor = Supervisor(self._logs, announces=False)
        self._limits = Limits(options.stall_s, options.join_s)
        self._stragglers = Stragglers(_STRAGGLER_S)
        self._meeting: Meeting | None = None
        try:
            total, first = self._share.total, self._share.first
            self._meets_at = self._share.meeting or f"ipc://{self._folder.path / 'meeting'}"
            if first == 0:
                keys = group_keys(self._meets_at)
                self._meeting = Meeting(self._meets_at, total, options.join_s, keys)
            self._looked_s = time.monotonic()
            self._places = {first + i: place for i, place in enumerate(start.places)}
            now = Progress(since_s=self._looked_s)
            self._seen = {rank: Seen(rank, now) for rank in self._places}
            devices = device_variables(options.processes, options.devices, os.environ)
            for rank, place in self._places.items():
                member = Membership(rank, total, self._share.coordinator, "launch", rank - first)
                self._start(member, arguments, {**devices[place], **dict(start.variables)})
        except BaseException:
            self.close(0.0)
            raise

    def wait(self, stopping: Stopping, ground: _Ground) -> End:
        """Wait until all have ended; after a failure, or for another number, end them."""
        self._link, stopping.send = ground.link, self._signal_all
        try:
            while (end := self._ended(stopping, ground)) is None:
                time.sleep(_LOOK_EVERY_S)
            return dataclasses.replace(end, saved=self._saved(), first_rank=self._share.first)
        finally:
            stopping.send = None

    def _ended(self, stopping: Stopping, ground: _Ground) -> End | None:
        codes = self._exit_codes()  # before the look, which would miss what ends after it
        done = len(codes) == len(self._seen)
        failure = None if stopping.number else self._look()
        if self._link is not None:
            is_leaving = bool(stopping.number)
            failure = self._link.exchange(self._seen.values(), done, failure, is_leaving)
            done = done and self._link.all_done()
            if self._link.is_changing and not is_leaving:
                self._change()
        is_changing = self._changing_until_s is not None
        if is_changing and (done or failure or time.monotonic() > (self._changing_until_s or 0)):
            return End(PREEMPTED, again=True, why=_CHANGED)
        if failure is not None:
            place = self._places.get(failure.rank)
            why = ground.rule.why_not_again(failure, self._saved(), place)
            if self._link is not None:
                why = self._link.end(failure, why)
            self._end(failure)
            return End(failure.exit_code, failure, again=why is None, why=why or "")
        if done or stopping.is_over():
            code = stopping.exit_code(codes.values())
            was_left = code == PREEMPTED and not stopping.number and ground.outlives_hosts
            return End(code, again=was_left, why=_CHANGED * was_left)
        if not (is_changing or stopping.number) and ground.has_changed():
            if isinstance(self._link, Hub):
                self._link.change()
            self._change()
        return None

    def _change(self) -> None:
        """Have all processes save and end; those of which none would save are ended at once."""
        if self._changing_until_s is not None:
            return
        saves = any(seen.progress.saves and seen.progress.step for seen in self._seen.values())
        patience_s = PATIENCE_S[signal.SIGTERM] if saves else 0.0
        self._changing_until_s = time.monotonic() + patience_s
        if patience_s:
            self._signal_all(signal.SIGTERM)

    def _saved(self) -> int:
        """The step of the newest checkpoint that one of them has written or begun with."""
        boards = [read_board(board_path(self._folder.path, rank)) for rank in self._seen]
        return max(-1, *(board.saved for board in boards))

    def close(self, grace_s: float = 0.0) -> None:
        """End every process that is still there."""
        try:
            self._supervisor.close(grace_s)
        finally:
            if self._meeting is not None:
                self._meeting.close()
            self._logs.close(timeout_s=2.0)
            self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Starting

    def _start(self, member: Membership, arguments: Sequence[str], env: dict[str, str]) -> None:
        folder = self._folder.path
        new_board(board_path(folder, member.rank))
        env = {**env, **member.variables(), JOIN: "1", AGENT: str(folder)}
        env |= {MEETING: self._meets_at, AGREE: str(int(self._options.agree))}
        command = program(arguments, env)
        self._supervisor.start(_task(member.rank), lambda _: command, None)

    # Watching

    def _look(self) -> Failure | None:
        """Read what all ranks do; the failure to end the group for, if there is one."""
        now_s = time.monotonic()
        codes = self._exit_codes()
        for rank, before in self._seen.items():
            self._seen[rank] = self._see(rank, before, now_s, rank in codes)
        self._looked_s = now_s
        if self._failing(codes):
            time.sleep(_SETTLE_S)
            codes = self._exit_codes()
            return self._first_failure(codes)
        if isinstance(self._link, Spoke):
            blamed, self._link.blamed = self._link.blamed, None
            return None if blamed is None else self._stalled(blamed)
        others = [] if self._link is None else self._link.others()
        ranks = [*self._seen.values(), *others]
        found = stalls(ranks, self._limits, now_s)
        if not found:
            self._name_straggler(ranks, now_s)
            return None
        if found[0].rank in self._seen or self._link is None:
            return self._stalled(found[0])
        self._link.blame(found[0])  # its own launcher can read its stack
        return None

    def _see(self, rank: int, before: Seen, now_s: float, has_ended: bool) -> Seen:
        progress = read_board(board_path(self._folder.path, rank))
        if progress.since_s != before.progress.since_s:
            section, steps = before.progress.section, progress.step
            self._limits.learn(section, self._looked_s - before.progress.since_s, steps)
        if has_ended and not progress.is_over:
            progress = Progress("exit", progress.step, now_s, progress.pid)
        pid = self._supervisor.pid(_task(rank))
        stopped_s = 0.0
        if not has_ended and outside.is_stopped(pid):
            stopped_s = before.stopped_s + now_s - self._looked_s
        return Seen(rank, progress, stopped_s)

    def _exit_codes(self) -> dict[int, int]:
        """The exit codes of those that have ended, minus the number of a signal."""
        found = {}
        for event in self._supervisor.events:
            if event.what in ("ended", "died"):
                found[event.task.index] = event.exit_code or 0
        return found

    def _failing(self, codes: dict[int, int]) -> list[int]:
        died = [rank for rank, code in codes.items() if code not in (0, PREEMPTED)]
        alone = [r for r in codes if not self._pid(r)] if any(map(self._pid, self._seen)) else []
        raised = [
            rank
            for rank in self._seen
            if error_path(self._folder.path, rank).exists() and rank not in died
        ]
        return [*died, *raised, *alone]

    def _pid(self, rank: int) -> int:
        return self._seen[rank].progress.pid

    def _first_failure(self, codes: dict[int, int]) -> Failure:
        """Of all that have failed the one to name: killed by a signal, or else the first."""
        failing = self._failing(codes)
        killed = [rank for rank in failing if codes.get(rank, 0) < 0]
        if killed:
            what = f"was killed by {exit_text(codes[killed[0]])} {self._where(killed[0])}"
            return self._failure(killed[0], what, 128 - codes[killed[0]])
        written = {
            rank: error_path(self._folder.path, rank).stat().st_mtime_ns
            for rank in failing
            if error_path(self._folder.path, rank).exists()
        }
        if written:
            rank = min(written, key=lambda r: written[r])
            trace = error_path(self._folder.path, rank).read_text()
            what = f"raised an exception {self._where(rank)}"
            failure = self._failure(rank, what, codes.get(rank) or 1, trace)
            return dataclasses.replace(failure, section="failed", lines=())
        rank = failing[0]
        if codes[rank] == 0:
            what = "ended without joining the group (does it import meshwright?)"
            return self._failure(rank, what, 1)
        what = f"ended with {exit_text(codes[rank])} {self._where(rank)}"
        return self._failure(rank, what, codes[rank])

    def _where(self, rank: int) -> str:
        progress = self._seen[rank].progress
        return f"after step {progress.step}" if progress.step else "before its first step"

    def _stalled(self, stall: Stall) -> Failure:
        progress = self._seen[stall.rank].progress
        unreachable = self._seen[stall.rank].stopped_s or progress.is_over
        stack = "" if unreachable else self._stack_of(stall.rank)
        limit = f", and the limit is {stall.limit_s:.0f} s" if stall.limit_s else ""
        cause = "is stopped" if self._seen[stall.rank].stopped_s else stall.what
        what = f"{cause} (for {stall.for_s:.1f} s{limit})"
        code = 1
        if progress.is_over:
            code = self._exit_codes().get(stall.rank) or 1
        return self._failure(stall.rank, what, code, stack)

    def _name_straggler(self, ranks: Sequence[Seen], now_s: float) -> None:
        """Say which rank is slow but alive; it goes on."""
        found = self._stragglers.look(ranks, now_s)
        if found is None:
            return
        rank, total = found.rank, self._share.total
        if rank not in self._seen:
            _say(f"rank {rank} of {total} (on another host) {found}.")
            return
        stack = "" if self._seen[rank].stopped_s else self._stack_of(rank)
        _say(dataclasses.replace(self._failure(rank, str(found), 0, stack), lines=()).text())

    def _stack_of(self, rank: int) -> str:
        """Where the Python of a rank is; empty if it does not say so soon."""
        if not self._pid(rank):
            return ""
        path = stack_path(self._folder.path, rank)
        return outside.stack_from(path, lambda: self._signal(rank, DUMP))

    def _failure(self, rank: int, what: str, code: int, stack: str = "") -> Failure:
        progress = self._seen[rank].progress
        name = str(_task(rank))
        return Failure(
            rank,
            self._share.total,
            socket.gethostname(),
            self._supervisor.pid(_task(rank)),
            progress.section,
            progress.step,
            what,
            stack,
            tuple(self._logs.last_lines(name, wait_s=0.2)),
            code,
        )

    # Ending

    def _end(self, failure: Failure) -> None:
        """Tell all ranks, wait while they run their ``finally`` blocks, and end what is left."""
        failure.write(failure_path(self._folder.path))
        for rank in self._seen:
            if rank in self._exit_codes():
                continue
            if not self._pid(rank) or self._seen[rank].stopped_s:
                self._signal(rank, signal.SIGKILL)
            else:
                self._signal(rank, TELL)
        told_s, over_s = time.monotonic(), 0.0
        while time.monotonic() < told_s + _GRACE_S and over_s < _AFTER_EXIT_S:
            time.sleep(_LOOK_EVERY_S)
            codes = self._exit_codes()
            is_here = failure.rank in self._seen and failure.rank not in codes
            if is_here and time.monotonic() > told_s + _OF_FAILED_S:
                self._signal(failure.rank, signal.SIGKILL)  # others may wait for it, in native code
            left = [rank for rank, seen in self._seen.items() if rank not in codes]
            if not left:
                break
            boards = [read_board(board_path(self._folder.path, rank)) for rank in left]
            is_over = all(
                board.is_over or self._seen[rank].stopped_s
                for rank, board in zip(left, boards, strict=True)
            )
            over_s = over_s + _LOOK_EVERY_S if is_over else 0.0

    def _signal(self, rank: int, number: int) -> None:
        self._supervisor.send_signal(_task(rank), number)

    def _signal_all(self, number: int) -> None:
        for rank in self._seen:
            if rank not in self._exit_codes():
                self._signal(rank, number)


def _task(rank: int) -> Task:
    return Task(RANK, rank)
