"""The steps of a coordinator: queued, with a worker, ended. Pure: no clock, no threads, no wire.

Every step ends once: done, failed, or cancelled because another failed. A step whose worker is
lost waits until that worker is fenced, and only then goes to another one, so that no update of
the first attempt can come in late. The rule for errors is that of TensorFlow's
``ClusterCoordinator``: the first error is raised at once, what has not begun is cancelled, and what
runs goes on to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..shared.consistency import Async, Backup, Consistency, Stale, Sync

_LOOK_AHEAD = 64  # how far a worker looks past steps that it cannot take


@dataclass(eq=False)
class Step:
    """One scheduled call: ``number`` is its id, unique over the servers' lives."""

    number: int
    call: Any
    attempt: int = 0  # how often it was handed out
    worker: str | None = None  # who has it
    round: int | None = None  # synchronous training: its round, and how many gradients make one
    of: int = 0
    only_here: bool = False  # another step has failed: this one ends with its worker, or unbegun


@dataclass(eq=False)
class Member:
    """A worker as the queue sees it; ``clock`` counts the steps that it has done."""

    name: str
    window: int = 1  # most steps that it may have at once
    clock: int = 0
    steps: dict[int, Step] = field(default_factory=dict)
    lost: bool = False

    @property
    def free(self) -> bool:
        return not self.lost and len(self.steps) < self.window


Fits = Callable[[Step, str], bool]


def _anything(step: Step, worker: str) -> bool:
    return True


class StepQueue:
    """Who does what next.

    >>> queue = StepQueue()
    >>> queue.enter("worker:0")
    >>> step = queue.add("add 1")
    >>> [(one.number, one.worker) for one in queue.assign()]
    [(0, 'worker:0')]
    >>> queue.finish("worker:0", 0, 1) is step, queue.idle, queue.done_below
    (True, True, 1)
    """

    def __init__(
        self, first: int = 0, consistency: Consistency | None = None, round_size: int = 1
    ) -> None:
        self.consistency = consistency or Async()
        # Steps of a round: as many as workers are expected, so that a death changes no result.
        self.round_size = round_size
        self.members: dict[str, Member] = {}
        self.error: BaseException | None = None
        self.done_below = first  # every step below has ended
        self.cancelled: list[Step] = []  # for the coordinator to tell; it empties the list
        self._next = first
        self._queued: deque[Step] = deque()
        self._ended: set[int] = set()
        self._ready: deque[Step] = deque()  # steps of a round that no worker has
        self._round = -1
        self._missing = 0  # gradients that the open round waits for
        self._num_given = 0  # those that it has
        self._is_broken = False
        # Rounds that an error broke off, and how many gradients each has: for the servers.
        self.broken_rounds: list[tuple[int, int]] = []

    # What the user's side asks.

    def add(self, call: Any) -> Step:
        """Queue a call; its number is the next one."""
        step = Step(self._next, call)
        self._next += 1
        self._queued.append(step)
        return step

    def begin_steps(self, first: int) -> None:
        """Continue after steps that the servers have applied: ``first`` is one above them all.

        Ids go by the clock, and the one of this host may be behind that of an earlier coordinator.

        >>> queue = StepQueue(first=5)
        >>> queue.begin_steps(3)
        >>> queue.begin_steps(9)
        >>> queue.next_number, queue.done_below
        (9, 9)
        """
        if first > self._next:
            self._next = self.done_below = first

    def begin_rounds(self, first: int) -> None:
        """Continue after rounds that the servers have applied: ``first`` is the next one."""
        self._round = first - 1

    @property
    def next_number(self) -> int:
        """The id that the next call gets."""
        return self._next

    @property
    def num_queued(self) -> int:
        return len(self._queued) + len(self._ready)

    @property
    def num_running(self) -> int:
        """Steps that some worker has, a lost one included until it is fenced."""
        return sum(len(member.steps) for member in self.members.values())

    @property
    def idle(self) -> bool:
        return not self.num_queued and not self.num_running

    def take_error(self) -> BaseException | None:
        """The first error, once; steps that run may still do so."""
        error, self.error = self.error, None
        return error

    # What becomes of workers.

    def enter(self, worker: str, window: int = 1) -> None:
        """A worker comes: it starts with the clock of the slowest."""
        clocks = [member.clock for member in self.live()]
        self.members[worker] = Member(worker, window, min(clocks, default=0))

    def lose(self, worker: str) -> None:
        """A worker is gone; its steps stay with it until :meth:`release`."""
        self.members[worker].lost = True

    def release(self, worker: str) -> list[Step]:
        """A lost worker can do no more harm: others may have its steps."""
        steps = list(self.members.pop(worker).steps.values())
        self._back(steps)
        return steps

    def live(self) -> list[Member]:
        return [member for member in self.members.values() if not member.lost]

    # What becomes of steps.

    def assign(self, flush: bool = False, fits: Fits = _anything) -> list[Step]:
        """Hand out all steps that may start now; each knows its worker and attempt.

        ``flush`` says that a caller waits, so that a round is made of the queued steps alone.
        ``fits`` says whether a worker can do a step.
        """
        if self.error is not None:
            return []
        in_rounds = isinstance(self.consistency, Sync | Backup)
        if in_rounds:
            self._open_round(flush)
        source = self._ready if in_rounds else self._queued
        assigned: list[Step] = []
        while source:
            one = self._give_one(source, fits)
            if one is None:
                break
            assigned.append(one)
        return assigned

    def finish(self, worker: str, number: int, attempt: int) -> Step | None:
        """A step is done; ``None`` where this worker does not have it (any more)."""
        step = self._taken_from(worker, number, attempt)
        if step is not None:
            self.members[worker].clock += 1
            self._end(step)
            self._num_given += step.round is not None and step.round == self._round
            if step.round == self._round and self._missing:
                self._missing -= 1
                if not self._missing:
                    self._close_round()
            self._end_broken_round()
        return step

    def fail(self, worker: str, number: int, attempt: int, error: BaseException) -> Step | None:
        """A step raised: the first such error is kept, and what is queued is cancelled."""
        step = self._taken_from(worker, number, attempt)
        if step is not None:
            self._end(step)
            self.abort(error)
        return step

    def abort(self, error: BaseException) -> None:
        """Keep this error, if it is the first, and cancel what no worker has begun."""
        self.error = self.error or error
        for step in self._steps_of_members():
            step.only_here = True
        self._is_broken = self._is_broken or self._missing > 0
        self._missing = 0
        waiting = [*self._ready, *self._queued]
        self._ready.clear()
        self._queued.clear()
        self._cancel(waiting)
        self._end_broken_round()

    def give_back(self, worker: str, numbers: Iterable[int]) -> list[Step]:
        """A worker hands back steps that it has not begun."""
        member = self.members.get(worker)
        if member is None or member.lost:
            return []
        steps = [member.steps.pop(number) for number in numbers if number in member.steps]
        self._back(steps)
        return steps

    def next_step(self) -> Step | None:
        """The step that would be handed out next."""
        waiting = self._ready or self._queued
        return waiting[0] if waiting else None

    def drop_waiting(self) -> int:
        """Cancel steps not yet begun, except those of a round under way; returns how many."""
        begun = deque(step for step in self._queued if step.attempt)
        waiting = [step for step in self._queued if not step.attempt]
        self._queued = begun
        self._cancel(waiting)
        return len(waiting)

    def drop(self, step: Step) -> None:
        """End a step that no worker has, and that none can do."""
        (self._queued if step in self._queued else self._ready).remove(step)
        self._end(step)

    def running(self) -> list[Step]:
        """What live workers have."""
        return [step for member in self.live() for step in member.steps.values()]

    def under_way(self) -> list[Step]:
        """All steps that have not ended."""
        return [*self._queued, *self._ready, *self._steps_of_members()]

    @property
    def rounds_done(self) -> int:
        """How many rounds are over."""
        return self._round if self._missing else self._round + 1

    def to_cancel(self) -> list[Step]:
        """Steps that live workers have since before an error: those not begun are not wanted."""
        return [step for step in self.running() if step.only_here]

    def behind(self) -> list[Step]:
        """Steps that wait behind another one on their worker, while a worker has nothing to do."""
        live = self.live()
        if self.num_queued or all(member.steps for member in live):
            return []
        return [step for member in live for step in list(member.steps.values())[1:]]

    # How it is done.

    def _give_one(self, source: deque[Step], fits: Fits) -> Step | None:
        able = [(member, at) for member in self.live() if (at := _first(source, member, fits)) >= 0]
        # One that has nothing, and can take nothing, is not waited for.
        counted = [m for m in self.live() if m.steps or any(m is other for other, _ in able)]
        slowest = min((member.clock for member in counted), default=0)
        free = [
            (member, at) for member, at in able if member.free and self._in_bound(member, slowest)
        ]
        if not free:
            return None
        member, at = min(free, key=lambda pair: (len(pair[0].steps), pair[0].clock))
        step = source[at]
        del source[at]
        step.worker, step.attempt = member.name, step.attempt + 1
        member.steps[step.number] = step
        return step

    def _in_bound(self, member: Member, slowest: int) -> bool:
        if not isinstance(self.consistency, Stale):
            return True
        return member.clock + len(member.steps) - slowest <= self.consistency.bound

    def _open_round(self, flush: bool) -> None:
        if self._missing or self._ready or not self._queued or self._is_broken:
            return
        num_live = len(self.live())
        size = max(self.round_size, num_live)
        if not num_live or (len(self._queued) < size and not flush):
            return
        size = min(size, len(self._queued))
        spare = self.consistency.spare if isinstance(self.consistency, Backup) else 0
        self._round += 1
        self._missing, self._num_given = max(1, size - spare), 0
        for _ in range(size):
            step = self._queued.popleft()
            step.round, step.of = self._round, self._missing
            self._ready.append(step)

    def _end_broken_round(self) -> None:
        """A round that an error broke off has all its gradients when none of its steps runs."""
        if self._is_broken and all(step.round != self._round for step in self._steps_of_members()):
            self._is_broken = False
            self.broken_rounds.append((self._round, self._num_given))

    def _steps_of_members(self) -> list[Step]:
        return [step for member in self.members.values() for step in member.steps.values()]

    def _close_round(self) -> None:
        # A step that no worker has seen is of no round; one that was handed out keeps its own, in
        # which a server may have counted it already.
        unseen = [step for step in self._ready if not step.attempt]
        self._ready = deque(step for step in self._ready if step.attempt)
        for step in reversed(unseen):
            step.round, step.of = None, 0
            self._queued.appendleft(step)

    def _taken_from(self, worker: str, number: int, attempt: int) -> Step | None:
        member = self.members.get(worker)
        if member is None or member.lost or number not in member.steps:
            return None
        if member.steps[number].attempt != attempt:
            return None
        return member.steps.pop(number)

    def _back(self, steps: list[Step]) -> None:
        self._cancel([step for step in steps if step.only_here])
        for step in sorted(steps, key=lambda one: -one.number):
            if not step.only_here:
                step.worker = None
                (self._queued if step.round is None else self._ready).appendleft(step)
        self._end_broken_round()

    def _cancel(self, steps: list[Step]) -> None:
        for step in steps:
            self._end(step)
        self.cancelled.extend(steps)

    def _end(self, step: Step) -> None:
        step.worker = None
        self._ended.add(step.number)
        while self.done_below in self._ended:
            self._ended.remove(self.done_below)
            self.done_below += 1


def _first(source: deque[Step], member: Member, fits: Fits) -> int:
    """Where the first step lies that this worker can do, or -1."""
    for at in range(min(len(source), _LOOK_AHEAD)):
        if fits(source[at], member.name):
            return at
    return -1
