"""Processes that are started ahead for the next start of a group: which are used, and for what."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from watching import is_there, within

from meshwright.launch import standby
from meshwright.launch.processes import Child, Command
from meshwright.launch.standby import Standbys

_PROGRAM = """
import os, sys
from meshwright.launch.standby import wait_for_place
wait_for_place()
print(os.environ["RANK"], "meshwright.launch.devices" in sys.modules)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    (tmp_path / "said").write_text('["meshwright.launch.devices", "no.such.module"]')
    return str(path)


@pytest.fixture
def standbys(tmp_path: Path) -> Iterator[Standbys]:
    made = Standbys(tmp_path)
    yield made
    made.close()


def command(program: str) -> Command:
    path = os.pathsep.join(path for path in sys.path if path)
    return Command.of([sys.executable, program], {"PYTHONPATH": path})


def output(child: Child) -> str:
    with os.fdopen(child.output) as pipe:
        text = pipe.read()
    assert child.kill() == 0
    return text


@pytest.mark.alone
def test_processes_that_were_started_ahead_get_the_variables_of_their_rank(
    standbys, program, tmp_path
):
    commands = {place: command(program) for place in range(2)}

    def prepared() -> bool:
        standbys.prepare(commands, program, tmp_path / "said")
        before.append(standbys.ready)
        return standbys.ready == {0: 2, 1: 2}

    before: list[Counter[int]] = []
    assert within(40, prepared)
    assert {0: 1, 1: 1} in before  # one of each place, before any has a second one
    for number in range(2):  # two failures, one right after the other
        for place in commands:
            rank = f"rank {place} of start {number}"
            child = standbys.take(place, commands[place], program, {"RANK": rank})
            assert child is not None
            assert output(child) == f"{rank} True\n"
    assert standbys.take(0, commands[0], program, {}) is None


@pytest.mark.alone
@pytest.mark.parametrize("change", ["program", "command", "ended"])
def test_a_process_that_is_not_what_would_be_started_now_is_not_used(
    standbys, program, tmp_path, change
):
    first = expected = command(program)
    if change == "ended":
        Path(program).write_text("1 / 0")
    others = _children()
    standbys.prepare({0: first}, program, tmp_path / "said")
    (pid,) = _children() - others
    if change == "program":
        os.utime(program, ns=(1, 1))
    if change == "command":
        expected = Command.of([*first.argv, "--epochs", "3"], dict(first.env))
    if change == "ended":
        assert within(20, lambda: not is_there(pid))
    assert standbys.take(0, expected, program, {}) is None


def _children() -> set[int]:
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in pids}


def test_nothing_is_started_before_the_ranks_say_what_to_load(standbys, program, tmp_path):
    standbys.prepare({0: command(program)}, program, tmp_path / "nothing")
    (tmp_path / "said").write_text("null")
    standbys.prepare({0: command(program)}, program, tmp_path / "said")
    assert standbys.take(0, command(program), program, {}) is None


def test_what_may_be_loaded_ahead_follows_the_program(tmp_path, monkeypatch):
    said = tmp_path / "said"
    monkeypatch.setattr(standby, "_joined_with", None)
    standby.note_loaded(said)  # in a process that no launcher has started
    assert not said.exists()
    standby.note_joined()
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # by Keras
    monkeypatch.setattr(standby, "_peak_bytes", 1 << 29)
    standby.note_loaded(said)
    loaded = json.loads(said.read_text())
    assert {"jax", "meshwright.launch.standby"} <= set(loaded)
    assert not {"__main__", "pytest", "watching"} & set(loaded)
    monkeypatch.setenv("KERAS_FLAG_OF_THE_PROGRAM", "1")
    standby.note_loaded(said)
    assert json.loads(said.read_text()) == []
    monkeypatch.setattr(standby, "_peak_bytes", 2 << 30)
    standby.note_loaded(said)
    assert json.loads(said.read_text()) is None
