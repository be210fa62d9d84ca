"""Nothing is lost, nothing is done twice, the first error surfaces, and nothing begins then."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshwright.ps.coordinator.queue import StepQueue
from meshwright.ps.shared.consistency import Async, Backup, Stale, Sync


class QueueMachine(RuleBasedStateMachine):
    """Any order of scheduling, work, errors and deaths."""

    consistency = Async()
    window = 3

    def __init__(self):
        super().__init__()
        self.queue = StepQueue(first=1000, consistency=self.consistency)
        self.scheduled = []  # steps, in order
        self.ended = Counter()  # number -> how often it ended
        self.first_error = None
        self.names = 0
        self.fenced_attempts = set()
        self.of_the_past = set()  # ran when an error was taken

    def running(self):
        return [
            (member.name, step)
            for member in self.queue.members.values()
            if not member.lost
            for step in member.steps.values()
        ]

    def collect(self):
        for step in self.queue.cancelled:
            self.ended[step.number] += 1
        self.queue.cancelled.clear()

    @precondition(lambda self: self.queue.error is None)
    @rule(count=st.integers(1, 4))
    def schedule(self, count):
        for _ in range(count):
            self.scheduled.append(self.queue.add("call"))

    @rule()
    def enter(self):
        if len(self.queue.live()) < 4:
            self.names += 1
            self.queue.enter(f"worker:{self.names}", self.window)

    @rule(flush=st.booleans())
    def assign(self, flush):
        for step in self.queue.assign(flush):
            assert (step.number, step.attempt) not in self.fenced_attempts
            assert not self.ended[step.number]
            assert step.number not in self.of_the_past

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data):
        name, step = data.draw(st.sampled_from(self.running()))
        assert self.queue.finish(name, step.number, step.attempt) is step
        self.ended[step.number] += 1
        assert self.queue.finish(name, step.number, step.attempt) is None  # told twice

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def fail(self, data):
        name, step = data.draw(st.sampled_from(self.running()))
        error = ValueError(step.number)
        self.queue.fail(name, step.number, step.attempt, error)
        self.ended[step.number] += 1
        self.first_error = self.first_error or error
        self.collect()

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def give_back(self, data):
        name, step = data.draw(st.sampled_from(self.running()))
        assert self.queue.give_back(name, [step.number]) == [step]
        self.collect()

    @precondition(lambda self: self.queue.live())
    @rule(data=st.data())
    def lose(self, data):
        member = data.draw(st.sampled_from(self.queue.live()))
        steps = list(member.steps.values())
        self.queue.lose(member.name)
        for step in steps:  # what a dead worker still says does not count
            assert self.queue.finish(member.name, step.number, step.attempt) is None

    @precondition(lambda self: any(m.lost for m in self.queue.members.values()))
    @rule(data=st.data())
    def release(self, data):
        lost = [m for m in self.queue.members.values() if m.lost]
        member = data.draw(st.sampled_from(lost))
        self.fenced_attempts |= {(s.number, s.attempt) for s in member.steps.values()}
        self.queue.release(member.name)
        self.collect()

    @rule()
    def take_error(self):
        error = self.queue.take_error()
        if error is not None:
            assert error is self.first_error
            assert self.queue.num_queued == 0
            self.first_error = None
            self.of_the_past = {step.number for _, step in self.running()}

    @invariant()
    def no_step_ends_twice(self):
        assert all(count <= 1 for count in self.ended.values())

    @invariant()
    def every_step_is_somewhere(self):
        assert len(self.scheduled) == (
            sum(self.ended.values()) + self.queue.num_queued + self.queue.num_running
        )

    @invariant()
    def the_watermark_is_the_first_open_step(self):
        is_open = [step.number for step in self.scheduled if not self.ended[step.number]]
        assert self.queue.done_below == min(is_open, default=self.queue.next_number)

    @invariant()
    def windows_and_bounds_are_kept(self):
        for member in self.queue.live():
            assert len(member.steps) <= self.window

    @invariant()
    def an_error_stops_everything_else(self):
        if self.queue.error is not None:
            assert self.queue.num_queued == 0
            assert self.queue.assign(True) == []

    def teardown(self):
        """With one worker that lives, all that is left gets done."""
        for member in [m for m in self.queue.members.values() if m.lost]:
            self.queue.release(member.name)
        self.collect()
        self.queue.enter("worker:last", self.window)
        for _ in range(10 * len(self.scheduled) + 10):
            self.queue.assign(True)
            for name, step in self.running():
                self.queue.finish(name, step.number, step.attempt)
                self.ended[step.number] += 1
            self.collect()
            if self.queue.error is not None:
                assert self.queue.take_error() is self.first_error
                self.first_error = None
        assert self.queue.idle
        assert all(self.ended[step.number] == 1 for step in self.scheduled)


class StaleMachine(QueueMachine):
    consistency = Stale(1)

    @rule(flush=st.booleans())
    def assign(self, flush):
        for step in self.queue.assign(flush):
            member = self.queue.members[step.worker]
            clocks = [m.clock for m in self.queue.live() if m.steps]
            # When it starts this step, it has done all that were handed to it before.
            assert member.clock + len(member.steps) - 1 - min(clocks) <= 1


class SyncMachine(QueueMachine):
    consistency = Sync()
    window = 1

    @rule(flush=st.booleans())
    def assign(self, flush):
        for step in self.queue.assign(flush):
            before = [s for s in self.scheduled if s.round is not None and s.round < step.round]
            assert all(self.ended[s.number] for s in before)  # a barrier between rounds
            assert not {s.number for s in before} & {s.number for _, s in self.running()}
            mates = [s for s in self.scheduled if s.round == step.round]
            assert {s.of for s in mates} == {len(mates)}


class BackupMachine(QueueMachine):
    consistency = Backup(1)
    window = 1


def _case(machine):
    case = machine.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    return case


TestAsync = _case(QueueMachine)
TestStale = _case(StaleMachine)
TestSync = _case(SyncMachine)
TestBackup = _case(BackupMachine)


def test_steps_are_spread_before_one_worker_gets_two():
    queue = StepQueue()
    for name in ("a", "b", "c"):
        queue.enter(name, window=2)
    for _ in range(4):
        queue.add("call")
    assert [step.worker for step in queue.assign()] == ["a", "b", "c", "a"]


def test_a_step_of_a_dead_worker_waits_for_the_fence():
    queue = StepQueue()
    queue.enter("a")
    queue.enter("b")
    queue.add("call")
    (step,) = queue.assign()
    queue.lose("a")
    assert queue.assign() == []
    assert not queue.idle
    queue.release("a")
    assert queue.assign() == [step]
    assert (step.worker, step.attempt) == ("b", 2)


def test_what_waits_behind_a_long_step_may_go_to_an_idle_worker():
    queue = StepQueue()
    queue.enter("a", window=2)
    first, second = queue.add("long"), queue.add("short")
    queue.assign()
    queue.enter("b", window=2)
    assert queue.behind() == [second]
    queue.give_back("a", [second.number])
    assert queue.assign() == [second]
    assert (first.worker, second.worker) == ("a", "b")


def test_a_step_goes_only_where_it_fits():
    queue = StepQueue()
    queue.enter("a", window=9)
    queue.enter("b", window=9)
    steps = [queue.add(index) for index in range(4)]
    queue.assign(fits=lambda step, name: name == ("a" if step.call < 3 else "b"))
    assert [step.worker for step in steps] == ["a", "a", "a", "b"]


def test_a_round_is_as_large_as_expected_also_when_a_worker_is_missing():
    queue = StepQueue(consistency=Sync(), round_size=2)
    queue.enter("a")
    queue.add("call")
    assert queue.assign() == []
    queue.add("call")
    (first,) = queue.assign()
    queue.finish("a", first.number, 1)
    (second,) = queue.assign()
    assert (first.round, first.of) == (second.round, second.of) == (0, 2)


def test_backup_drops_the_last_of_a_round_and_goes_on():
    queue = StepQueue(consistency=Backup(1))
    for name in ("a", "b", "c"):
        queue.enter(name)
    for _ in range(6):
        queue.add("call")
    first = queue.assign()
    assert {(step.round, step.of) for step in first} == {(0, 2)}
    for step in first[:2]:
        queue.finish(step.worker, step.number, step.attempt)
    second = queue.assign()  # the straggler is not waited for
    assert {step.round for step in second} == {1}
    assert len(second) == 2
    assert queue.finish("c", first[2].number, 1) is first[2]


def test_a_round_that_an_error_broke_off_ends_before_the_next_begins():
    queue = StepQueue(consistency=Sync())
    for name in ("a", "b", "c"):
        queue.enter(name)
    for _ in range(3):
        queue.add("call")
    failing, slow, quick = queue.assign()
    queue.finish("c", quick.number, 1)
    queue.fail("a", failing.number, 1, ValueError("bad"))
    assert str(queue.take_error()) == "bad"
    queue.add("later")
    assert queue.assign(True) == []
    assert queue.broken_rounds == []
    queue.finish("b", slow.number, 1)
    assert queue.broken_rounds == [(0, 2)]  # the servers apply it with the two that came
    (later,) = queue.assign(True)
    assert later.round == 1


@pytest.mark.parametrize("bound", [0, 2])
def test_the_fastest_worker_waits_for_the_slowest(bound):
    queue = StepQueue(consistency=Stale(bound))
    queue.enter("fast", window=1)
    queue.enter("slow", window=1)
    for _ in range(20):
        queue.add("call")
    queue.assign()
    done = 0
    while (steps := queue.members["fast"].steps) and done < 20:
        (step,) = steps.values()
        queue.finish("fast", step.number, step.attempt)
        done += 1
        queue.assign()
    assert done == bound + 1  # clocks 0 to bound, while the slow one is at 0
