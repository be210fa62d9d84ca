"""A run that is killed with SIGKILL, at any instant, and started again takes the same steps.

Kills come at seeded random instants: while it starts and restores, between two steps, and while
files are being written. Every loss that any of the processes reports is compared, bit for bit,
with a run that is not disturbed.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import killed_run
import pytest

import meshwright as mw

MESH = "batch=8"
UNDER_WAY = ".orbax-checkpoint-tmp"
LIMIT_S = 240
STEPS = 1440


@functools.cache
def imported() -> multiprocessing.context.ForkServerContext:
    """Starts processes as copies of one that has imported everything and touched no device.

    Importing takes most of the CPU of a process that lives for a second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_run", *killed_run.IMPORTS])
    return context


class Child:
    """One process that trains; ``losses`` are those it has reported, by step."""

    def __init__(self, folder: Path, name: str, directory: str, mesh: str, epochs: int) -> None:
        self.report = folder / f"{name}.txt"
        self.output = folder / f"{name}.log"
        arguments = (str(self.output), directory, str(self.report), mesh, str(epochs))
        self.process = imported().Process(target=killed_run.main, args=arguments)
        self.process.start()

    @property
    def lines(self) -> list[str]:
        """The whole lines of its report."""
        text = self.report.read_text() if self.report.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    @property
    def losses(self) -> dict[int, str]:
        pairs = [line.split() for line in self.lines if line[0].isdigit()]
        return {int(step): loss for step, loss in pairs}

    @property
    def history(self) -> dict[str, list[float]]:
        """What ``fit`` returned, once it has."""
        return json.loads(self.lines[-1].removeprefix("done "))

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Returns when it happened; fails if the process ends before."""
        give_up = time.monotonic() + LIMIT_S
        while not happened():
            assert self.process.exitcode is None, self.output.read_text()[-3000:]
            assert time.monotonic() < give_up, "nothing happens"
            time.sleep(0.0005)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def finish(self) -> Child:
        self.process.join(LIMIT_S)
        self.process.kill()
        assert self.process.exitcode == 0, self.output.read_text()[-3000:]
        return self


def being_written(directory: Path) -> list[Path]:
    return list(directory.glob(f"*{UNDER_WAY}*"))


def kill_sometime(child: Child, directory: Path, dice: random.Random, how: str) -> bool:
    """Kill it at a random instant of a kind; whether a file was being written just then."""
    if how == "starting":
        time.sleep(dice.uniform(0.0, 2.0))
    else:
        steps = dice.randrange(2, 25)
        child.wait_until(lambda: len(child.losses) >= steps)
        if how == "writing":
            child.wait_until(lambda: bool(being_written(directory)))
        time.sleep(dice.uniform(0, 0.03))
    child.kill()
    return bool(being_written(directory))


def killed_chain(folder: Path, kinds: list[str], steps: int, mesh: str = MESH) -> tuple[int, int]:
    """Kills a run once per kind, and lets it end; ``(kills, kills while writing)``."""
    epochs = steps // 12
    whole = Child(folder, "whole", str(folder / "whole"), mesh, epochs).finish()
    expected = whole.losses
    assert sorted(expected) == list(range(steps))
    directory, dice = folder / "killed", random.Random(7)
    writing = 0
    for number, how in enumerate(kinds):
        begins = newest_step(directory)
        child = Child(folder, f"child{number}", str(directory), mesh, epochs)
        writing += kill_sometime(child, directory, dice, how)
        assert child.process.exitcode == -signal.SIGKILL
        check(child, expected, begins)
    begins = newest_step(directory)
    assert begins < steps, "the run was over before the last kill"
    last = Child(folder, "last", str(directory), mesh, epochs).finish()
    check(last, expected, begins)
    assert last.history == whole.history
    assert not being_written(directory)
    return len(kinds), writing


def newest_step(directory: Path) -> int:
    try:
        return mw.read_checkpoint(directory).step
    except mw.CheckpointError:
        return 0


def check(child: Child, expected: dict[int, str], begins: int) -> None:
    """It began where the newest complete checkpoint stood, and took the same steps."""
    losses = child.losses
    assert list(losses) == list(range(begins, begins + len(losses)))
    assert losses == {step: expected[step] for step in losses}


@pytest.mark.full
def test_fifty_kills_change_no_bit_of_the_loss_curve(tmp_path: Path) -> None:
    kinds = ["writing", "anywhere", "anywhere", "writing", "starting"] * 2 + ["writing"] * 10
    kinds += ["anywhere"] * 30
    kills, writing = killed_chain(tmp_path, kinds, STEPS)
    assert kills >= 50
    assert writing >= 10


@pytest.mark.full
def test_kills_change_no_bit_on_a_mesh_with_two_axes(tmp_path: Path) -> None:
    killed_chain(tmp_path, ["writing", "starting", "anywhere"], 96, "batch=4,model=2")
