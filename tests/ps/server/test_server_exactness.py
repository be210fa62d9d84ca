"""Each step once, whatever comes twice, late, or from the dead."""

from __future__ import annotations

import numpy as np
import pytest
from asking import Asking
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.ps.server.applied import AppliedSteps


@given(
    steps=st.lists(st.integers(0, 15), min_size=1, max_size=60),
    peers=st.integers(1, 3),
    by_rows=st.booleans(),
)
def test_adds_that_come_twice_and_in_any_order_count_once(steps, peers, by_rows) -> None:
    server = Asking()
    server.value("total", np.zeros(4, np.int64))
    for turn, step in enumerate(steps):
        add = np.full(4, 1 << step)
        update = ("total", "add", [add])
        if by_rows:
            update = ("total", "rows_add", [np.arange(4)[::-1], add])
        head = {"attempt": turn, "peer": f"worker:{turn % peers}"}
        reply = server.push(update, step=step, **head)
        assert reply["applied"] == (step not in steps[:turn])
    assert server.read("total")[0].tolist() == [sum(1 << step for step in set(steps))] * 4
    stats = server.ask("stats").head
    assert stats["pushes"] == len(set(steps))
    assert stats["duplicates"] == len(steps) - len(set(steps))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=50))
def test_the_watermark_forgets_ids_but_not_that_they_were_applied(told) -> None:
    steps, model, below = AppliedSteps(), set(), 0
    for version, (adds, step) in enumerate(told):
        if adds and step not in steps:
            steps.add(step, version)
            model.add(step)
        elif not adds:
            steps.forget_below(step)
            below = max(below, step)
        for other in range(25):
            assert (other in steps) == (other < below or other in model)
        assert len(steps) == len([step for step in model if step >= below])
        assert steps.below == below


def test_a_step_below_the_watermark_is_not_applied_again() -> None:
    server = Asking()
    server.value("w", np.zeros(1))
    add = ("w", "add", [np.ones(1)])
    for step in range(5):
        server.push(add, step=step)
    server.push(add, step=5, done_below=5)
    assert server.ask("stats").head["kept_steps"] == 1
    late = server.push(add, step=2)
    assert (late["applied"], late["duplicate"]) == (False, True)
    assert server.read("w")[0] == 6


def test_a_duplicate_is_told_when_it_was_applied() -> None:
    server = Asking()
    server.value("w", np.zeros(1))
    add = ("w", "add", [np.ones(1)])
    first = server.push(add, step=10)
    server.push(add, step=11)
    assert server.push(add, step=10)["applied_at"] == first["applied_at"] == 1


def test_pushes_without_an_id_are_always_applied() -> None:
    server = Asking()
    server.value("w", np.zeros(1))
    for _ in range(3):
        assert server.push(("w", "add", [np.ones(1)]))["applied"]
    assert server.read("w")[0] == 3


def test_the_fenced_are_refused() -> None:
    server = Asking()
    server.value("w", np.zeros(1))
    add = ("w", "add", [np.ones(1)])
    server.push(add, step=0, incarnation="old")
    assert server.ask("fence", incarnation="old").head["new"]
    assert not server.ask("fence", incarnation="old").head["new"]
    message = "ps:0 takes nothing from incarnation 'old': it was declared dead"
    with pytest.raises(mw.ProtocolError, match=message):
        server.push(add, step=1, incarnation="old")
    with pytest.raises(mw.ProtocolError, match="Join again, as a new incarnation"):
        server.ask("hello", task="worker:0", incarnation="old")
    assert server.push(add, step=1, incarnation="new")["applied"]
    assert server.push(add, step=2, incarnation="")["applied"]
    assert server.read("w")[0] == 3
