"""Synchronous rounds: once, together, in the order of the steps; the late are dropped."""

from __future__ import annotations

import numpy as np
import pytest
from asking import Asking
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw


def server_of(optimizer: str = "Adam") -> Asking:
    server = Asking()
    server.value("w", np.linspace(-1, 1, 12, dtype="f").reshape(6, 2))
    server.optimizer(optimizer, ["w"], learning_rate=0.1)
    return server


def gradient_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(6, 2)).astype("f")


@given(order=st.permutations(range(4)), again=st.lists(st.integers(0, 3), max_size=4))
def test_a_round_is_one_step_of_the_mean_in_any_order(order, again) -> None:
    alone, server = server_of(), server_of()
    total = gradient_of(0)
    for step in range(1, 4):
        total = total + gradient_of(step)
    alone.push(("w", "gradient", [total / 4]))
    arrived = list(order[:3]) + [step for step in again if step in order[:3]] + [order[3]]
    before = server.read("w")[0]
    for step in arrived[:-1]:
        server.push(("w", "gradient", [gradient_of(step)]), step=step, round=0, of=4)
        assert np.array_equal(server.read("w")[0], before)
    assert server.push(("w", "gradient", [gradient_of(order[3])]), step=order[3], round=0, of=4)[
        "applied"
    ]
    assert np.array_equal(server.read("w")[0], alone.read("w")[0])
    assert server.ask("stats").head["rounds"] == 1


def test_late_gradients_are_dropped_but_not_other_changes() -> None:
    server = server_of()
    server.value("count", np.zeros((), np.int64))
    count = ("count", "add", [np.ones((), np.int64)])
    for step in range(2):
        reply = server.push(("w", "gradient", [gradient_of(step)]), count, step=step, round=0, of=2)
        assert not reply["dropped"]
    after = server.read("w")[0]
    late = server.push(("w", "gradient", [gradient_of(2)]), step=2, round=0, of=2)
    assert (late["applied"], late["dropped"]) == (False, True)
    late = server.push(("w", "gradient", [gradient_of(3)]), count, step=3, round=0, of=2)
    assert (late["applied"], late["dropped"]) == (True, True)
    assert server.push(step=3, round=0, of=2)["duplicate"]
    assert np.array_equal(server.read("w")[0], after)
    assert server.read("count")[0] == 3
    assert server.ask("stats").head["dropped"] == 2


def test_rows_of_a_round_are_summed_up() -> None:
    server, alone = server_of("SGD"), server_of("SGD")
    rows = [np.array([1, 4]), np.array([4, 4])]
    values = [np.ones((2, 2), "f"), np.full((2, 2), 2, "f")]
    for step in range(2):
        update = ("w", "rows_gradient", [rows[step], values[step]])
        server.push(update, step=step, round=0, of=2)
    alone.push(("w", "rows_gradient", [np.concatenate(rows), np.concatenate(values) / 2]))
    np.testing.assert_allclose(server.read("w")[0], alone.read("w")[0], rtol=1e-6)
    untouched = [0, 2, 3, 5]
    assert np.array_equal(server.read("w")[0][untouched], server_of().read("w")[0][untouched])


def test_whole_gradients_and_rows_make_one_step() -> None:
    server, alone = server_of(), server_of()
    rows = ("w", "rows_gradient", [np.array([2, 2]), np.ones((2, 2), "f")])
    server.push(rows, step=1, round=0, of=2)
    server.push(("w", "gradient", [gradient_of(0)]), step=0, round=0, of=2)
    total = gradient_of(0)
    total[2] += 2
    alone.push(("w", "gradient", [total / 2]))
    np.testing.assert_allclose(server.read("w")[0], alone.read("w")[0], rtol=1e-6)


def test_reads_wait_for_their_round() -> None:
    server = server_of()
    assert server.ask_later("read", names=["w"], round=1, id=9) is None
    server.push(step=0, round=0, of=2)
    assert server.core.ready() == []
    server.push(step=1, round=0, of=2)
    assert [number for _, number, _ in server.core.ready()] == [9]
    assert len(server.read("w", round=1)) == 1


def test_rounds_come_one_after_the_other() -> None:
    server = server_of("SGD")
    start = server.read("w")[0]
    server.push(("w", "gradient", [gradient_of(5)]), step=5, round=1, of=1)
    assert np.array_equal(server.read("w")[0], start)
    server.push(("w", "gradient", [gradient_of(0)]), step=0, round=0, of=1)
    assert server.ask("stats").head["rounds"] == 2
    expected = start - np.float32(0.1) * gradient_of(0) - np.float32(0.1) * gradient_of(5)
    np.testing.assert_allclose(server.read("w")[0], expected, rtol=1e-5)


def test_a_round_may_become_smaller() -> None:
    server, alone = server_of(), server_of()
    server.push(("w", "gradient", [gradient_of(0)]), step=0, round=0, of=4)
    assert server.ask("round", round=0, of=1).head["rounds"] == 1
    alone.push(("w", "gradient", [gradient_of(0)]))
    assert np.array_equal(server.read("w")[0], alone.read("w")[0])
    assert server.ask("round", round=1, of=0).head["rounds"] == 2, "a round that was lost"
    for step in (1, 2):
        server.push(("w", "gradient", [gradient_of(step)]), step=step, round=2, of=4)
    server.ask("round", round=2, of=1)
    alone.push(("w", "gradient", [(gradient_of(1) + gradient_of(2)) / 2]))
    assert np.array_equal(server.read("w")[0], alone.read("w")[0]), "what was accepted counts"


def test_what_is_held_is_nobody_elses_memory() -> None:
    server, alone = server_of(), server_of()
    sent = gradient_of(0).copy()
    server.push(("w", "gradient", [sent]), step=0, round=0, of=2)
    sent[:] = 99
    server.push(("w", "gradient", [gradient_of(1)]), step=1, round=0, of=2)
    alone.push(("w", "gradient", [(gradient_of(0) + gradient_of(1)) / 2]))
    assert np.array_equal(server.read("w")[0], alone.read("w")[0])


def test_a_round_needs_step_ids() -> None:
    with pytest.raises(mw.ProtocolError, match="a push to round 0 has no step id"):
        server_of().push(("w", "gradient", [gradient_of(0)]), round=0, of=2)
