"""An agent beside a rank that something else has started: srun, mpirun, torchrun, Kubernetes.

:func:`~.join.join` starts one for each rank, as a process of its own. It outlives the rank, reads
what the rank writes (:mod:`.progress`), and can end it. The companion of rank 0 is the hub: it
judges all ranks and holds JAX's coordination service, and still does when rank 0 is dead. What to
run again is the starter's business.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import zmq

from ..errors import ClusterError
from . import join, outside
from .addresses import to_listen
from .coordinator import Coordinator
from .doors import Entrance, group_keys
from .failure import Failure
from .holdups import Holdups
from .idleness import Unseen
from .limits import SCRIPT_S, Limits
from .nodes import Hub, Spoke
from .processes import own_module
from .progress import Progress, read_board
from .relay import Relay
from .stalls import Seen, Stall, learn, stalls
from .stragglers import STRAGGLER_S, Stragglers

_LOOK_EVERY_S = 0.1
_SETTLE_S = 0.3  # for the death of another rank to be seen before the error that it causes here
_GRACE_S = 5.0  # for the rank to run its ``finally`` blocks
_AFTER_EXIT_S = 0.5  # a program that is over, and whose process only waits for others
_PAUSE_S = 2.0  # this process itself was stopped: the scheduler has suspended the job, say
_MEET_S = 60.0
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # they are for the rank, which may save


@dataclass(frozen=True)
class Charge:
    """The rank to watch, the folder in which they meet, and the group's ``host:port`` addresses.

    ``listener`` is the number of the socket at which rank 0's meets the others, and ``relay`` of
    that at which another rank reaches the coordinator.
    """

    rank: int
    processes: int
    pid: int
    folder: str
    hub: str
    coordinator: str
    stall_s: float
    script_s: float = SCRIPT_S
    listener: int | None = None
    relay: int | None = None


def start(charge: Charge) -> None:
    """Start the companion of this process; it takes the socket over."""
    command = own_module(["-m", __name__, json.dumps(asdict(charge))], {})
    subprocess.Popen(
        command.argv,
        env={**os.environ, **dict(command.env)},
        stdin=subprocess.DEVNULL,
        stdout=2,  # its messages come beside the rank's own
        start_new_session=True,
        pass_fds=[number for number in (charge.listener, charge.relay) if number is not None],
    )


class Companion:
    """Watches one rank until it has ended, or until some rank of the group has failed."""

    def __init__(self, charge: Charge, link: Hub | Spoke) -> None:
        self._charge, self._link = charge, link
        self._folder = Path(charge.folder)
        self._board = join.board_path(self._folder, charge.rank)
        self._limits = Limits(charge.stall_s, script_s=charge.script_s)
        self._stragglers, self._holdups = Stragglers(STRAGGLER_S), Holdups(self._limits)
        self._others: dict[int, Seen] = {}
        self._own = Seen(charge.rank, Progress(pid=charge.pid))
        self._looked_s = self._resumed_s = time.monotonic()
        self._died_s: float | None = None
        self._raised_s: float | None = None
        self._unseen = Unseen(self._limits, self._stack)

    def watch(self) -> Failure | None:
        """Watch to the end; the failure that ended the group, if there was one."""
        while True:
            failure = self._look()
            is_over = self._own.progress.is_over and not self._is_there()
            failure = self._link.exchange([self._own], is_over, failure, False)
            if failure is not None:
                self._link.end(failure, "")
                self._end(failure)
                return failure
            if is_over and self._link.all_done():
                return None
            time.sleep(_LOOK_EVERY_S)

    def _is_there(self) -> bool:
        return os.getppid() == self._charge.pid

    def _look(self) -> Failure | None:
        is_there, now_s = self._is_there(), time.monotonic()
        if now_s - self._looked_s > _PAUSE_S:  # all of the group was: let the others come back
            time.sleep(_PAUSE_S / 2)
            self._resumed_s = now_s = time.monotonic()
        before, progress = self._own, read_board(self._board)
        learn(self._limits, before, replace(before, progress=progress), self._looked_s)
        others = self._link.others()
        for own in others:
            learn(self._limits, self._others.get(own.rank, own), own, self._looked_s)
        self._others = {own.rank: own for own in others}
        stopped_s = 0.0
        if is_there and outside.is_stopped(self._charge.pid):
            stopped_s = before.stopped_s + now_s - self._looked_s
        progress = replace(progress, since_s=max(progress.since_s, self._resumed_s))
        unseen = self._unseen.look(progress, now_s) if is_there else (0.0, 0.0)
        self._own = Seen(self._charge.rank, progress, stopped_s, *unseen)
        self._looked_s = now_s
        return self._own_failure(is_there) or self._stall(now_s)

    def _own_failure(self, is_there: bool) -> Failure | None:
        path = join.error_path(self._folder, self._charge.rank)
        if path.exists():
            self._raised_s = self._raised_s or time.monotonic()  # of files the clock may differ
        if self._raised_s is not None and time.monotonic() - self._raised_s > _SETTLE_S:
            return self._failure("raised an exception", path.read_text(), "failed")
        if not is_there and not self._own.progress.is_over and self._has_settled():
            return self._failure("was killed, or crashed in native code,")
        return None

    def _has_settled(self) -> bool:
        """Whether the rank has been dead for long enough: JAX ends one that loses rank 0's agent.

        The death of rank 0 itself is reported at once.
        """
        now_s = time.monotonic()
        self._died_s = self._died_s or now_s
        return isinstance(self._link, Hub) or now_s - self._died_s > _SETTLE_S

    def _stall(self, now_s: float) -> Failure | None:
        if isinstance(self._link, Spoke):
            for rank, what in self._link.named():
                self._name(rank, what)
            blamed, self._link.blamed = self._link.blamed, None
            return None if blamed is None else self._stalled(blamed)
        ranks = [self._own, *self._others.values()]
        stalled = stalls(ranks, self._limits, now_s)
        if not stalled:
            self._name_slow(ranks, now_s)
            return None
        if stalled[0].rank == self._charge.rank:
            return self._stalled(stalled[0])
        self._link.blame(stalled[0])
        return None

    def _name_slow(self, ranks: list[Seen], now_s: float) -> None:
        """Say which ranks the others wait for; they go on."""
        slow = [self._stragglers.look(ranks, now_s), *self._holdups.look(ranks, now_s)]
        for one in slow:
            if one is not None:
                self._name(one.rank, str(one))
                if one.rank != self._charge.rank:
                    self._link.name(one.rank, str(one))  # its own agent can read its stack

    def _name(self, rank: int, what: str) -> None:
        text = f"rank {rank} of {self._charge.processes} {what}."
        if rank == self._charge.rank:
            text = replace(self._failure("", self._stack()), what=what).text()
        print(f"meshwright: {text}", file=sys.stderr, flush=True)

    def _stack(self) -> str:
        """Where the Python of the rank is; empty where it cannot say so."""
        if self._own.stopped_s or self._own.progress.is_over:
            return ""
        path = join.stack_path(self._folder, self._charge.rank)
        return outside.stack_from(path, lambda: self._signal(join.DUMP))

    def _stalled(self, stall: Stall) -> Failure:
        what = stall.text(bool(self._own.stopped_s))
        return replace(self._failure("", self._stack()), what=what)

    def _failure(self, what: str, stack: str = "", section: str = "") -> Failure:
        charge, progress = self._charge, self._own.progress
        where = "before any step was counted"
        if progress.step:
            where = f"after step {progress.step}"
        return Failure(
            charge.rank,
            charge.processes,
            socket.gethostname(),
            charge.pid,
            section or progress.section,
            progress.step,
            f"{what} {where}",
            stack,
        )

    def _end(self, failure: Failure) -> None:
        """Tell the rank, wait while it runs its ``finally`` blocks, and kill it if it must be."""
        if isinstance(self._link, Hub) or failure.rank == self._charge.rank:
            print(f"meshwright: {failure.text()}", file=sys.stderr, flush=True)
        failure.write(join.failure_path(self._folder))
        if not self._own.stopped_s:
            self._signal(join.TELL)
        until_s, over_s = time.monotonic() + _GRACE_S, 0.0
        while self._is_there() and time.monotonic() < until_s and over_s < _AFTER_EXIT_S:
            time.sleep(_LOOK_EVERY_S)
            is_over = read_board(self._board).section == "exit" or self._own.stopped_s
            over_s = over_s + _LOOK_EVERY_S if is_over else 0.0
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._is_there():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._charge.pid, number)


def _link(charge: Charge) -> Hub | Spoke:
    if charge.listener is None:
        link: Hub | Spoke = Spoke(charge.hub, False, charge.stall_s, charge.rank)
    else:
        host = charge.hub.rpartition(":")[0]
        entrance = Entrance(group_keys(charge.hub))
        entrance.listen(socket.socket(fileno=charge.listener), to_listen(host) or "*")
        link = Hub(entrance, host, charge.processes, charge.processes, charge.stall_s)
    link.meet(1, _MEET_S)
    return link


def main(text: str) -> None:
    """Watch the rank that the text describes."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    charge = Charge(**json.loads(text))
    serves: Coordinator | Relay | None = None
    try:
        if charge.relay is not None:
            lost_file = join.lost_path(Path(charge.folder))
            serves = Relay(charge.coordinator, lost_file, socket.socket(fileno=charge.relay))
        elif charge.rank == 0:
            serves = Coordinator(charge.coordinator, charge.processes)
        with contextlib.closing(_link(charge)) as link:
            Companion(charge, link).watch()
    except (ClusterError, zmq.ZMQError) as error:
        if os.getppid() == charge.pid:  # a rank that has ended needs no agent
            reason = f"rank {charge.rank} trains without an agent: {error}"
            print(f"meshwright: {reason}", file=sys.stderr, flush=True)
        while serves is not None and os.getppid() == charge.pid:
            time.sleep(_LOOK_EVERY_S)  # without it JAX would end every rank
    finally:
        if serves is not None:
            serves.close()
        shutil.rmtree(charge.folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
