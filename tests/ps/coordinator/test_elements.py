"""Elements: each goes to one step, in whatever order steps end, move and fail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ClusterError
from meshwright.ps.coordinator.data import Source, check_sharding
from meshwright.ps.worker.iterators import Elements, LocalElements, PassedOn

WORKERS = ["worker:0", "worker:1", "worker:2"]


def run_to_the_end(source: Source, length: int, choices, deaths) -> list[int]:
    """Steps of one to three elements each, on workers by lot; the elements that were used."""
    used: list[int] = []
    dry: set[str] = set()
    for step, (worker, wanted) in enumerate(choices):
        if step in deaths:  # a worker takes some, and dies
            source.ahead(step, worker)
            source.more(step, worker)
            source.freed(step)
        for name in [worker, *WORKERS]:
            taken = take(source, step, name, wanted, length)
            if taken or not source.passes_on:
                break
            source.freed(step)
            dry.add(name)
        source.ended(step, len(taken))
        used.extend(taken)
    return used


def take(source: Source, step: int, worker: str, wanted: int, length: int) -> list[int]:
    found = source.ahead(step, worker)
    missing = None
    taken: list[int] = []
    while len(taken) < wanted:
        if not found:
            found = source.more(step, worker, missing)
            missing = None
            if not found:
                break
        index = found[0]
        found = found[1:]
        if source.sharding != "shared" and index >= length:
            missing = index
            found = [one for one in found if one < index]
            continue
        taken.append(index)
    return taken


CHOICES = st.lists(st.tuples(st.sampled_from(WORKERS), st.integers(0, 3)), max_size=30)


@pytest.mark.parametrize("sharding", ["shared", "dynamic", "static"])
@given(length=st.integers(0, 25), choices=CHOICES, deaths=st.sets(st.integers(0, 29)))
@settings(max_examples=40, deadline=None)
def test_no_element_is_lost_or_given_twice(sharding, length, choices, deaths):
    choices = [*choices, *[(name, 1) for name in WORKERS * length]]  # enough to use all up
    draw = iter(range(length)) if sharding == "shared" else None
    used = run_to_the_end(Source(sharding, draw, num_workers=3), length, choices, deaths)
    assert sorted(used) == list(range(length))
    if sharding != "static" and not deaths:
        assert used == sorted(used)


def test_a_copy_gives_everything_to_each_worker():
    source = Source("copy")
    assert [source.more(step, "worker:0") for step in range(2)] == [[0], [1]]
    assert source.more(2, "worker:1") == [0]


def test_a_retry_gets_the_same_elements():
    source = Source("shared", iter("abc"))
    assert source.more(5, "worker:0") == ["a"]
    source.freed(5)
    assert source.more(6, "worker:1") == ["b"]
    assert source.ahead(5, "worker:1") == ["a"]


def test_as_many_as_the_last_step_took_are_sent_along():
    source = Source("dynamic")
    source.more(0, "worker:0")
    source.more(0, "worker:0")
    source.ended(0, 2)
    assert source.ahead(1, "worker:1") == [2, 3]
    source.ended(1, 1)  # 3 was not used
    assert source.ahead(2, "worker:0") == [3]


def test_the_share_of_a_worker_that_is_gone_goes_to_the_others():
    source = Source("static", num_workers=2)
    source.leave("worker:1")
    assert source.more(0, "worker:0") == [0]
    assert source.more(1, "worker:0") == [2]
    assert source.more(2, "worker:0") == [4]
    assert source.more(2, "worker:0", ended_at=4) == [1]


def test_an_unknown_sharding_is_named():
    with pytest.raises(ClusterError, match="'dynamic'"):
        check_sharding("random")


# On the worker


@pytest.mark.parametrize("make", [lambda: list("abcd"), lambda: iter("abcd")])
def test_local_elements_are_found_in_any_order(make):
    asked = iter([[2], [0], [3]])
    elements = LocalElements("k", lambda key, missing: next(asked), make, passes_on=False)
    assert [next(elements) for _ in range(3)] == ["c", "a", "d"]


def test_the_end_is_told_with_its_index():
    told = []

    def more(key, missing):
        told.append(missing)
        return [4] if missing is None else []

    elements = LocalElements("k", more, lambda: "abcd", passes_on=False)
    with pytest.raises(StopIteration):
        next(elements)
    assert told == [None, 4]
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
