"""``meshwright launch --processes``: a synchronous group on this machine, and its agent.

The agent is the launcher itself: outside the ranks, so it outlives them and can end one that is
frozen. It reads what they write (:mod:`.progress`), judges it (:mod:`.stalls`), and says what has
happened to the others (:mod:`.join`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import ClusterError
from ..topology import virtual_device_variables
from .agreement import Meeting
from .failure import Failure, main_stack
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
from .logs import LogPump
from .membership import Membership
from .nodes import Hub, Share, Spoke, rendezvous
from .private_folder import PrivateFolder
from .processes import free_port, program
from .progress import Progress, new_board, read_board
from .spec import RANK, Task
from .stalls import Limits, Seen, Stall, stalls
from .supervision import exit_text
from .supervisor import Supervisor

_LOOK_EVERY_S = 0.05
_SETTLE_S = 0.3  # for a death by signal to be seen beside the errors that it causes in others
_GRACE_S = 5.0  # for the others to run their ``finally`` blocks
_AFTER_EXIT_S = 0.5  # a program that is over, and whose process only waits for others
_STACK_S = 1.0
_PREEMPTED = 75
_NOISE = ("[Gloo] Rank ",)


@dataclass(frozen=True)
class GroupOptions:
    """How a group is started and watched.

    Raises :class:`~meshwright.errors.ClusterError`, naming every invalid number.
    """

    processes: int = 1
    devices: int | None = None  # CPU devices to make in each process
    log_dir: Path | None = None
    stall_s: float = 10.0
    join_s: float = 60.0
    agree: bool = True
    nodes: int = 1  # hosts, on each of which so many processes are started
    rendezvous: str = ""  # host:port, where there are several

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be {least} or more; received {value}."
            for name, value, least in (
                ("processes", self.processes, 1),
                ("nodes", self.nodes, 1),
                ("devices", 1 if self.devices is None else self.devices, 1),
            )
            if value < least
        ]
        faults += [
            f"{name} must be above 0 seconds; received {value}."
            for name, value in (("stall_s", self.stall_s), ("join_s", self.join_s))
            if not value > 0
        ]
        if self.nodes > 1 and not self.rendezvous:
            faults.append("several nodes need --rendezvous host:port, the same on each of them.")
        if faults:
            raise ClusterError("\n".join(faults))


def run_group(arguments: Sequence[str], options: GroupOptions) -> int:
    """Run a Python program as every process of a group; the exit code of its first failure.

    Raises :class:`~meshwright.errors.ClusterError` where there is no such program, and where
    accelerators cannot be shared out evenly.
    """
    if not Path(arguments[0]).is_file():
        raise ClusterError(f"there is no program {arguments[0]!r} to launch.")
    with Group(arguments, options) as group:
        return group.wait()


class Group:
    """The processes of a group on this machine, for as long as it is open."""

    def __init__(self, arguments: Sequence[str], options: GroupOptions) -> None:
        self._options = options
        devices = _devices_of(options, os.environ)
        if options.log_dir is not None:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        self._link: Hub | Spoke | None = None
        if options.nodes > 1:
            self._link = rendezvous(options.rendezvous, (free_port(), free_port()))
        self._folder = PrivateFolder()
        self._logs = LogPump(
            show=True, remembered=60, folder=options.log_dir, to_stdout=True, hidden=_NOISE
        )
        self._supervisor = Supervisor(self._logs, announces=False)
        self._limits = Limits(options.stall_s, options.join_s)
        self._meeting: Meeting | None = None
        try:
            self._share = self._meet()
            if self._share.first == 0:
                self._meeting = Meeting(self._share.meeting, self._share.total, options.join_s)
            self._looked_s = time.monotonic()
            first, total = self._share.first, self._share.total
            ranks = range(first, first + options.processes)
            self._seen = {rank: Seen(rank, Progress()) for rank in ranks}
            for rank, env in zip(ranks, devices, strict=True):
                address = self._share.coordinator
                self._start(
                    Membership(rank, total, address, "launch", rank - first), arguments, env
                )
        except BaseException:
            self.close(0.0)
            raise

    def wait(self) -> int:
        """Wait until all have ended; after a failure, end them. The exit code of the first."""
        with _passing_on((signal.SIGTERM, signal.SIGINT), self._signal_all) as stopping:
            while True:
                failure = None if stopping.number else self._look()
                codes = self._exit_codes()
                done = len(codes) == len(self._seen)
                if self._link is not None:
                    failure = self._link.exchange(self._seen.values(), done, failure)
                    done = done and self._link.all_done()
                if failure is not None:
                    self._end(failure)
                    print(f"meshwright launch: {failure.text()}", file=sys.stderr, flush=True)
                    return failure.exit_code
                if done or stopping.is_over():
                    return stopping.exit_code(codes.values())
                time.sleep(_LOOK_EVERY_S)

    def close(self, grace_s: float = 0.0) -> None:
        """End every process that is still there."""
        try:
            self._supervisor.close(grace_s)
        finally:
            if self._meeting is not None:
                self._meeting.close()
            if self._link is not None:
                self._link.close()
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

    def _meet(self) -> Share:
        """The ranks of this host, and where all of them meet."""
        count = self._options.processes
        if self._link is not None:
            return self._link.meet(self._options.nodes, count, self._options.join_s)
        meeting = f"ipc://{self._folder.path / 'meeting'}"
        return Share(0, count, count, f"127.0.0.1:{free_port()}", meeting)

    def _start(self, member: Membership, arguments: Sequence[str], env: dict[str, str]) -> None:
        folder = self._folder.path
        new_board(board_path(folder, member.rank))
        env = {**env, **member.variables(), JOIN: "1", AGENT: str(folder)}
        env |= {MEETING: self._share.meeting, AGREE: str(int(self._options.agree))}
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
        found = stalls([*self._seen.values(), *others], self._limits, now_s)
        if not found:
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
        if not has_ended and _is_stopped(pid):
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
        died = [rank for rank, code in codes.items() if code not in (0, _PREEMPTED)]
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
        what = f"{stall.what} (for {stall.for_s:.1f} s{limit})"
        code = 1
        if progress.is_over:
            code = self._exit_codes().get(stall.rank) or 1
        return self._failure(stall.rank, what, code, stack)

    def _stack_of(self, rank: int) -> str:
        """Where the Python of a rank is; empty if it does not say so soon."""
        if not self._pid(rank):
            return ""
        path = stack_path(self._folder.path, rank)
        self._supervisor.send_signal(_task(rank), DUMP)
        until_s, text = time.monotonic() + _STACK_S, ""
        while not text and time.monotonic() < until_s:
            time.sleep(_LOOK_EVERY_S)
            text = path.read_text(errors="replace") if path.exists() else ""
        return main_stack(text)

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
            if not self._pid(rank):
                self._signal(rank, signal.SIGKILL)
            elif not self._seen[rank].stopped_s:
                self._signal(rank, TELL)
        until_s, over_s = time.monotonic() + _GRACE_S, 0.0
        while time.monotonic() < until_s and over_s < _AFTER_EXIT_S:
            time.sleep(_LOOK_EVERY_S)
            codes = self._exit_codes()
            left = [rank for rank, seen in self._seen.items() if rank not in codes]
            if not left:
                break
            boards = [read_board(board_path(self._folder.path, rank)) for rank in left]
            is_over = all(
                board.section == "exit" or self._seen[rank].stopped_s
                for rank, board in zip(left, boards, strict=True)
            )
            over_s = over_s + _LOOK_EVERY_S if is_over else 0.0

    def _signal(self, rank: int, number: int) -> None:
        self._supervisor.send_signal(_task(rank), number)

    def _signal_all(self, number: int) -> None:
        for rank in self._seen:
            if rank not in self._exit_codes():
                self._signal(rank, number)


class _Stopping:
    """The launcher was asked to stop: how long its processes may still take."""

    def __init__(self) -> None:
        self.number = 0
        self.until_s = float("inf")

    def exit_code(self, codes: Collection[int]) -> int:
        """That of a group whose processes ended with these: 75 if they saved what they had."""
        if _PREEMPTED in codes:
            return _PREEMPTED
        return 128 + self.number if self.number else 0

    def is_over(self) -> bool:
        return time.monotonic() > self.until_s


_PATIENCE_S = {signal.SIGTERM: 60.0, signal.SIGINT: 10.0}  # after Ctrl-C ranks may differ by a step


@contextlib.contextmanager
def _passing_on(
    numbers: Sequence[signal.Signals], send: Callable[[int], None]
) -> Iterator[_Stopping]:
    """Signals go to the processes; a second one ends them at once."""
    stopping = _Stopping()

    def hear(number: int, _frame: object) -> None:
        again = stopping.number
        stopping.number = number
        stopping.until_s = time.monotonic() + (0 if again else _PATIENCE_S[signal.Signals(number)])
        send(number)

    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _task(rank: int) -> Task:
    return Task(RANK, rank)


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal; only Linux says so."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _devices_of(options: GroupOptions, environment: os._Environ[str]) -> list[dict[str, str]]:
    """For each rank the variables that give it its devices: virtual CPU devices, or its GPUs."""
    ranks = range(options.processes)
    if options.devices is not None:
        made = virtual_device_variables(options.devices, environment)
        return [made for _ in ranks]
    gpus = _gpus(environment)
    if not gpus or environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return [{} for _ in ranks]
    share, rest = divmod(len(gpus), options.processes)
    if rest:
        raise ClusterError(
            f"{len(gpus)} GPUs ({', '.join(gpus)}) cannot be shared out evenly among "
            f"{options.processes} processes. Set {_VISIBLE}, or choose another --processes "
            "(--devices N makes CPU devices instead)."
        )
    return [{_VISIBLE: ",".join(gpus[r * share : (r + 1) * share])} for r in ranks]


def _gpus(environment: os._Environ[str]) -> list[str]:
    """The names of the GPUs that this process may use."""
    visible = environment.get(_VISIBLE)
    if visible is not None:
        return [name for name in visible.split(",") if name]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(found, key=int)
