"""Elements: each goes to one step, in whatever order steps end, move and fail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ClusterError
from meshwright.ps.coordinator.data import ElementSource, check_sharding
from meshwright.ps.worker.iterators import Elements, LocalElements, PassedOn

WORKERS = ["worker:0", "worker:1", "worker:2"]


def run_to_the_end(source: ElementSource, length: int, choices, deaths) -> list[int]:
    """Steps of one to three elements each, on workers by lot; the elements that were used."""
    used: list[int] = []
    dry: set[str] = set()
    for step, (worker, expected) in enumerate(choices):
        if step in deaths:  # a worker takes some, and dies
            source.ahead(step, worker)
            source.more(step, worker)
            source.freed(step)
        for name in [worker, *WORKERS]:
            taken = take(source, step, name, expected, length)
            if taken or not source.passes_on:
                break
            source.freed(step)
            dry.add(name)
        source.ended(step, len(taken))
        used.extend(taken)
    return used


def take(source: ElementSource, step: int, worker: str, expected: int, length: int) -> list[int]:
    result = source.ahead(step, worker)
    missing = None
    record: list[int] = []
    while len(record) < expected:
        if not result:
            result = source.more(step, worker, missing)
            missing = None
            if not result:
                break
        index = result[0]
        result = result[1:]
        if source.sharding != "shared" and index >= length:
            missing = index
            result = [one for one in result if one < index]
            continue
        record.append(index)
    return record


CHOICES = st.lists(st.tuples(st.sampled_from(WORKERS), st.integers(0, 3)), max_size=30)


@pytest.mark.parametrize("sharding", ["shared", "dynamic", "static"])
@given(length=st.integers(0, 25), choices=CHOICES, deaths=st.sets(st.integers(0, 29)))
@settings(max_examples=40, deadline=None)
def test_no_element_is_lost_or_given_twice(sharding, length, choices, deaths):
    choices = [*choices, *[(name, 1) for name in WORKERS * length]]  # enough to use all up
    draw = iter(range(length)) if sharding == "shared" else None
    used = run_to_the_end(ElementSource(sharding, draw, num_workers=3), length, choices, deaths)
    assert sorted(used) == list(range(length))
    if sharding != "static" and not deaths:
        assert used == sorted(used)


def test_a_copy_gives_everything_to_each_worker():
    source = ElementSource("copy")
    assert [source.more(step, "worker:0") for step in range(2)] == [[0], [1]]
    assert source.more(2, "worker:1") == [0]


def test_a_retry_gets_the_same_elements():
    source = ElementSource("shared", iter("abc"))
    assert source.more(5, "worker:0") == ["a"]
    source.freed(5)
    assert source.more(6, "worker:1") == ["b"]
    assert source.ahead(5, "worker:1") == ["a"]


def test_as_many_as_the_last_step_took_are_sent_along():
    source = ElementSource("dynamic")
    source.more(0, "worker:0")
    source.more(0, "worker:0")
    source.ended(0, 2)
    assert source.ahead(1, "worker:1") == [2, 3]
    source.ended(1, 1)  # 3 was not used
    assert source.ahead(2, "worker:0") == [3]


def test_the_share_of_a_worker_that_is_gone_goes_to_the_others():
    source = ElementSource("static", num_workers=2)
    source.leave("worker:1")
    assert source.more(0, "worker:0") == [0]
    assert source.more(1, "worker:0") == [2]
    assert source.more(2, "worker:0") == [4]
    assert source.more(2, "worker:0", ended_at=4) == [1]


def test_an_unknown_sharding_is_named():
    with pytest.raises(ClusterError, match="'dynamic'"):
        check_sharding("random")


class Lane:
    """A worker with steps in hand, which have elements sent ahead: as a runner uses them."""

    def __init__(self, source: ElementSource, name: str) -> None:
        self.source, self.name = source, name
        self.steps: dict[int, tuple[int, list[int]]] = {}  # number -> attempt, elements
        self.ran: dict[int, list[int]] = {}  # what steps took that are not reported yet
        self.told: set[int] = set()  # those of them that were told of with a question
        self.left_some = False

    def send(self, step: int, attempt: int) -> None:
        self.steps[step] = (attempt, self.source.ahead(step, self.name))

    @property
    def next(self) -> int | None:
        return next((step for step in self.steps if step not in self.ran), None)

    def run(self, step: int, expected: int) -> list[int]:
        attempt, ahead = self.steps[step]
        ahead, taken = ([] if self.left_some else list(ahead)), []
        while len(taken) < expected:
            ahead = ahead or self.ask(step, attempt, len(taken))
            taken.append(ahead.pop(0))
        self.left_some = self.left_some or bool(ahead)
        self.ran[step] = taken
        return taken

    def ask(self, step: int, attempt: int, used: int) -> list[int]:
        for number in self.ran.keys() - self.told:
            self.source.took(number, len(self.ran[number]))
            self.source.expect(len(self.ran[number]))
        self.told, self.left_some = set(self.ran), False
        if attempt > 1:
            left = self.source.remaining(step, used, None)
            return left or self.source.more(step, self.name)
        numbers = list(self.steps)
        behind = numbers[numbers.index(step) + 1 :]
        later = [number for number in behind if self.steps[number][0] == 1]
        elements, again = self.source.in_order(step, self.name, used, later, None)
        self.steps.update((number, (1, given)) for number, given in again)
        return elements

    def report(self) -> dict[int, list[int]]:
        ran, self.ran, self.told = self.ran, {}, set()
        for step, taken in ran.items():
            del self.steps[step]
            self.source.ended(step, len(taken))
        return ran


@pytest.mark.parametrize("sharding", ["shared", "dynamic"])
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    turns=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("sssrrrpd")), max_size=60),
    num_workers=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_steps_take_the_same_elements_again_and_one_worker_in_order(
    sharding, counts, turns, num_workers
):
    source = ElementSource(sharding, iter(range(1000)) if sharding == "shared" else None)
    lanes = [Lane(source, name) for name in WORKERS[:num_workers]]
    waiting = [(step, 1) for step in range(len(counts))]
    first: dict[int, list[int]] = {}  # what a step took when it first ran, reported or not
    done: dict[int, list[int]] = {}

    def turn(at: int, what: str) -> None:
        lane = lanes[at % num_workers]
        if what == "s" and waiting and len(lane.steps) < 5:
            lane.send(*waiting.pop(0))
        elif what == "r" and (step := lane.next) is not None:
            taken = lane.run(step, counts[step])
            assert first.setdefault(step, taken) == taken
        elif what == "p":
            done.update(lane.report())
        elif what == "d":  # none of what it ran since the last report was heard of
            waiting[:0] = [(number, attempt + 1) for number, (attempt, _) in lane.steps.items()]
            for number in lane.steps:
                source.freed(number)
            lanes[at % num_workers] = Lane(source, lane.name)

    for at, what in turns:
        turn(at, what)
    while waiting or any(lane.steps for lane in lanes):
        for at in range(num_workers):
            for what in "srp":
                turn(at, what)
    used = [element for step in sorted(done) for element in done[step]]
    assert len(used) == len(set(used)) == sum(counts)
    if num_workers == 1 and all(what != "d" for _, what in turns):
        assert used == list(range(sum(counts)))


# On the worker


@pytest.mark.parametrize("make", [lambda: list("abcd"), lambda: iter("abcd")])
def test_local_elements_are_found_in_any_order(make):
    requests = iter([[2], [0], [3]])
    elements = LocalElements("k", lambda key, missing: next(requests), make, passes_on=False)
    assert [next(elements) for _ in range(3)] == ["c", "a", "d"]


def test_the_end_is_told_with_its_index():
    notices = []

    def more(key, missing):
        notices.append(missing)
        return [4] if missing is None else []

    elements = LocalElements("k", more, lambda: "abcd", passes_on=False)
    with pytest.raises(StopIteration):
        next(elements)
    assert notices == [None, 4]
    assert elements.ran_dry


def test_a_step_without_an_element_is_passed_on_but_a_loop_ends():
    given_out = iter([[0], [], []])
    elements = LocalElements("k", lambda key, missing: next(given_out), lambda: "ab", True)
    assert list(elements) == ["a"]
    elements.begin([])
    with pytest.raises(PassedOn):
        next(elements)


def test_elements_that_came_along_are_used_first():
    elements = Elements("k", lambda key, missing: [])
    elements.begin([1, 2])
    assert list(elements) == [1, 2]
    assert elements.used == 2
