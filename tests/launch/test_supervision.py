"""The rule for starting a task again, and the cutting of its output into lines."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.launch import Task
from meshwright.launch.gloo_lines import WithoutGloo
from meshwright.launch.logs import Lines, LogPump
from meshwright.launch.supervision import Event, Restarts

GLOO = (
    *("[Gloo] Rank ", "0", " is connected to ", "1", " peer ranks. "),
    *("Expected number of connected peer ranks is : ", "1", "\n"),
)


def test_the_first_restart_is_at_once_and_the_others_wait_longer_and_longer():
    rule = Restarts(at_most=6, first_s=0.1, longest_s=0.5)
    assert [rule.delay_s(n) for n in range(7)] == [0.0, 0.1, 0.2, 0.4, 0.5, 0.5, None]
    assert Restarts(at_most=0).delay_s(0) is None


def test_a_task_that_ran_long_enough_is_counted_anew():
    rule = Restarts(at_most=2, healthy_s=30.0)
    assert rule.count(2, ran_s=29.9) == 2
    assert rule.count(2, ran_s=30.0) == 0


def test_an_event_reads_as_a_sentence():
    assert str(Event(0.25, Task("ps", 1), "started")) == "0.250 s: ps:1 started"
    assert str(Event(1.0, Task("ps", 1), "died", 2)) == "1.000 s: ps:1 died (exit code 2)"


@given(st.binary(max_size=60), st.lists(st.integers(1, 20), max_size=10))
def test_lines_do_not_depend_on_how_they_come_in_pieces(data, sizes):
    lines, told, place = Lines(), [], 0
    for size in sizes:
        told += lines.feed(data[place : place + size])
        place += size
    told += lines.feed(data[place:]) + lines.rest()
    whole = data.split(b"\n")
    expected = whole if whole[-1] else whole[:-1]
    assert [line.removesuffix("\r") for line in told] == [
        line.decode(errors="replace").removesuffix("\r") for line in expected
    ]


def test_a_line_without_an_end_does_not_grow_for_ever():
    lines = Lines()
    output = [line for _ in range(40) for line in lines.feed(b"x" * 50_000)]
    assert sum(map(len, output)) + sum(map(len, lines.rest())) == 2_000_000
    assert max(map(len, output)) < 1_200_000


@pytest.mark.parametrize("show", [True, False])
def test_the_output_of_tasks_comes_in_whole_lines_with_their_names(capfd, show):
    pump = LogPump(show=show)
    ends = {}
    for name in ("worker:0", "ps:0"):
        reading, ends[name] = os.pipe()
        pump.add(name, reading)
    for turn in range(200):
        for name, end in ends.items():  # halves of lines, in turn
            os.write(end, f"{turn} of ".encode())
            os.write(end, f"{name}\n".encode())
    os.write(ends["ps:0"], b"no end of line")
    for end in ends.values():
        os.close(end)
    pump.close(timeout_s=5.0)
    output = capfd.readouterr().err.splitlines()
    expected = [f"[{name}] {turn} of {name}" for turn in range(200) for name in ends]
    assert sorted(output) == (sorted([*expected, "[ps:0] no end of line"]) if show else [])
    assert pump.last_lines("ps:0")[-2:] == ["199 of ps:0", "no end of line"]
    assert pump.last_lines("worker:9") == []


@given(st.permutations([thread for thread in range(3) for _ in GLOO]))
def test_what_gloo_prints_is_left_out_in_whatever_order_its_threads_print(order):
    parts = [iter(GLOO) for _ in range(3)]
    printed = "".join(next(parts[thread]) for thread in order)
    without = WithoutGloo()
    assert without.of(printed.splitlines()) == []
    assert without.of(["12", "", "loss 0.5"]) == ["12", "", "loss 0.5"]


def test_a_pipe_that_somebody_keeps_open_does_not_keep_the_logs_open():
    pump = LogPump(show=False)
    reading, writing = os.pipe()
    pump.add("worker:0", reading)
    pump.close(timeout_s=0.05)
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)
