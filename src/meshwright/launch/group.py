"""``meshwright launch --processes``: a synchronous group on this machine, and its agent.

The agent is the launcher itself: outside the ranks, so it outlives them and can end one that is
frozen. It reads what they write and judges it (:mod:`.watch`), says what has happened to the
others (:mod:`.join`), and starts the group again where it may (:mod:`.ground`, :mod:`.elastic`).
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Self

from .agreement import Meeting
from .coordinator import HOSTED, Coordinator
from .doors import group_keys
from .elastic import failures_text
from .failure import Failure
from .ground import End, Ground, Start
from .group_options import GroupOptions
from .join import (
    AGENT,
    AGREE,
    JOIN,
    MEETING,
    TELL,
    board_path,
    failure_path,
    loaded_path,
    lost_path,
)
from .joining import GENERATION
from .limits import Limits
from .logs import LogPump
from .membership import Membership
from .nodes import Hub, Spoke
from .processes import Command, check_program, program
from .progress import new_board, read_board
from .relay import RELAY, Relay
from .signals import PATIENCE_S, PREEMPTED, Stopping, passing_on
from .supervisor import Supervisor
from .watch import Watch, say, task_of

_LOOK_EVERY_S = 0.05
_GRACE_S = 5.0  # for the others to run their ``finally`` blocks
_OF_FAILED_S = 0.5  # for the one that failed
_AFTER_EXIT_S = 0.5  # a program that is over, and whose process only waits for others
_CHANGED = "The number of processes changes: the group"


def run_group(arguments: Sequence[str], options: GroupOptions) -> int:
    """Run a Python program as every process of a group; the exit code of its first failure.

    Where the options allow it, a group that failed, or for which there are more or fewer places
    now, is started again: the program runs again, and goes on from its newest checkpoint. Raises
    :class:`~meshwright.errors.ClusterError` where there is no such program, and where
    accelerators cannot be shared out evenly.
    """
    check_program(arguments)
    return run_here(arguments, options).code


def run_here(arguments: Sequence[str], options: GroupOptions) -> End:
    """Run this host's part of a group, again as often as it may be; how the last one ended."""
    rule, began_s, failed_s = options.rule(), time.monotonic(), list[float]()
    with passing_on() as stopping, Ground(options, rule) as ground:
        generation, saved = 0, -1
        while True:
            start = ground.start(generation, failures_text(failed_s, time.monotonic() - began_s))
            if start is None or stopping.number:
                return End(PREEMPTED if generation else stopping.exit_code([]))
            with Group(arguments, options, start) as group:
                end = group.wait(stopping, ground)
            if end.failure is not None:
                failed_s.append(time.monotonic() - began_s)
                say(end.failure.text())
            if not end.again:
                if end.why:
                    say(end.why)
                return end
            generation, saved = generation + 1, max(saved, end.saved)  # it may end before it reads
            say(f"{end.why or 'The group'} is started again {_from(saved)}.")


def _from(saved: int) -> str:
    return "from the beginning" if saved < 0 else f"from the checkpoint of step {saved}"


def run_module(name: str, options: GroupOptions) -> int:
    """The same for a module of this package."""
    return run_here(["-m", name], options).code


class Group:
    """The processes of a group on this machine, for as long as it is open."""

    def __init__(self, arguments: Sequence[str], options: GroupOptions, start: Start) -> None:
        self._options, self._share = options, start.share
        self._link: Hub | Spoke | None = None
        self._changing_until_s: float | None = None
        logs = LogPump(show=True, remembered=60, folder=options.log_dir, to_stdout=True)
        self._supervisor = Supervisor(logs, announces=False)
        self._folder = self._supervisor.folder.path
        self._meeting: Meeting | None = None
        self._coordinator: Coordinator | None = None
        self._relay: Relay | None = None
        try:
            total, first = self._share.total, self._share.first
            self._meets_at = self._share.meeting or f"ipc://{self._folder / 'meeting'}"
            if first == 0:
                keys = group_keys(self._meets_at)
                self._meeting = Meeting(self._meets_at, total, options.join_s, keys)
                self._coordinator = Coordinator(self._share.coordinator, total)
            else:
                self._relay = Relay(self._share.coordinator, lost_path(self._folder))
            self._places = {first + i: place for i, place in enumerate(start.places)}
            limits = Limits(options.stall_s, options.join_s, options.script_s)
            self._watch = Watch(self._places, total, self._folder, self._supervisor, logs, limits)
            fixed = {**dict(start.variables), JOIN: "1", AGREE: str(int(options.agree))}
            self._commands = {
                p: program(arguments, {**start.devices[p], **fixed}) for p in start.places
            }
            self._standbys, self._program = start.standbys, arguments[0]
            self._is_again = start.of_generation[GENERATION] != "0"
            for rank, place in self._places.items():
                member = Membership(rank, total, self._share.coordinator, "launch", rank - first)
                self._start(member, place, start.of_generation)
        except BaseException:
            self.close(0.0)
            raise

    def wait(self, stopping: Stopping, ground: Ground) -> End:
        """Wait until all have ended; after a failure, or for another number, end them."""
        self._link, stopping.send = ground.link, self._signal_all
        try:
            while (end := self._ended(stopping, ground)) is None:
                time.sleep(_LOOK_EVERY_S)
            return dataclasses.replace(end, saved=self._watch.saved(), first_rank=self._share.first)
        finally:
            stopping.send = None

    def _ended(self, stopping: Stopping, ground: Ground) -> End | None:
        codes = self._watch.exit_codes()  # before the look, which would miss what ends after it
        is_done = len(codes) == len(self._watch.states)
        failure = None if stopping.number else self._watch.look(self._link)
        if self._link is not None:
            is_leaving = bool(stopping.number)
            failure = self._link.exchange(self._watch.states.values(), is_done, failure, is_leaving)
            is_done = is_done and self._link.all_done()
            if self._link.is_changing and not is_leaving:
                self._change()
        is_changing = self._changing_until_s is not None
        if is_changing and (is_done or failure or time.monotonic() > (self._changing_until_s or 0)):
            return End(PREEMPTED, again=True, why=_CHANGED)
        if failure is not None:
            place = self._places.get(failure.rank)
            why = ground.rule.why_not_again(failure, self._watch.saved(), place)
            if self._link is not None:
                why = self._link.end(failure, why)
            self._end(failure)
            return End(failure.exit_code, failure, again=why is None, why=why or "")
        if is_done or stopping.is_over():
            are_all = len(codes) == len(self._watch.states)
            code = stopping.exit_code(codes.values(), are_all)
            was_left = code == PREEMPTED and not stopping.number and ground.outlives_hosts
            return End(code, again=was_left, why=_CHANGED * was_left)
        if not (is_changing or stopping.number or codes):
            self._prepare()
        if not (is_changing or stopping.number) and ground.has_changed():
            if isinstance(self._link, Hub):
                self._link.change()
            self._change()
        return None

    def _change(self) -> None:
        """Have all processes save and end; those of which none would save are ended at once."""
        if self._changing_until_s is not None:
            return
        saves = any(
            state.progress.saves and state.progress.step for state in self._watch.states.values()
        )
        patience_s = PATIENCE_S[signal.SIGTERM] if saves else 0.0
        self._changing_until_s = time.monotonic() + patience_s
        if patience_s:
            self._signal_all(signal.SIGTERM)

    def close(self, grace_s: float = 0.0) -> None:
        """End every process that is still there."""
        try:
            self._supervisor.close(grace_s)
        finally:
            if self._meeting is not None:
                self._meeting.close()
            if self._coordinator is not None:
                self._coordinator.close()
            if self._relay is not None:
                self._relay.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Starting

    def _start(self, member: Membership, place: int, env: Mapping[str, str]) -> None:
        new_board(board_path(self._folder, member.rank))
        env = {**env, **member.variables(), AGENT: str(self._folder)}
        env |= {HOSTED: "1", MEETING: self._meets_at}
        if self._relay is not None:
            env[RELAY] = self._relay.address
        command, ahead = self._commands[place], None
        if self._standbys is not None:
            ahead = self._standbys.take(place, command, self._program, env)
        command = Command.of(command.argv, {**dict(command.env), **env})
        self._supervisor.start(task_of(member.rank), lambda _: command, None, ahead)

    def _prepare(self) -> None:
        """Start processes for the next start, once these say what they have loaded.

        The first start of all takes its first step undisturbed. Later ones need not: another
        failure may come soon, and what they compile lies ready.
        """
        first = min(self._watch.states, default=None)
        if self._standbys is None or first is None:
            return
        if self._is_again or all(state.progress.step for state in self._watch.states.values()):
            loaded = loaded_path(self._folder, first)
            self._standbys.prepare(self._commands, self._program, loaded)

    # Ending

    def _end(self, failure: Failure) -> None:
        """Tell all ranks, wait while they run their ``finally`` blocks, and end what is left."""
        failure.write(failure_path(self._folder))
        for rank in self._watch.states:
            if rank in self._watch.exit_codes():
                continue
            if not self._watch.pid(rank) or self._watch.states[rank].stopped_s:
                self._signal(rank, signal.SIGKILL)
            else:
                self._signal(rank, TELL)
        told_s, over_s = time.monotonic(), 0.0
        while time.monotonic() < told_s + _GRACE_S and over_s < _AFTER_EXIT_S:
            time.sleep(_LOOK_EVERY_S)
            codes = self._watch.exit_codes()
            is_here = failure.rank in self._watch.states and failure.rank not in codes
            if is_here and time.monotonic() > told_s + _OF_FAILED_S:
                self._signal(failure.rank, signal.SIGKILL)  # others may wait for it, in native code
            remaining = [rank for rank, state in self._watch.states.items() if rank not in codes]
            if not remaining:
                break
            boards = [read_board(board_path(self._folder, rank)) for rank in remaining]
            is_over = all(
                board.is_over or self._watch.states[rank].stopped_s
                for rank, board in zip(remaining, boards, strict=True)
            )
            over_s = over_s + _LOOK_EVERY_S if is_over else 0.0

    def _signal(self, rank: int, number: int) -> None:
        self._supervisor.send_signal(task_of(rank), number)

    def _signal_all(self, number: int) -> None:
        for rank in self._watch.states:
            if rank not in self._watch.exit_codes():
                self._signal(rank, number)
