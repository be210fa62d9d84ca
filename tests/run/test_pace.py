"""When a run with ``save_every="auto"`` is saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import CheckpointError
from meshwright.launch.elastic import FAILURES
from meshwright.run.pace import Pace, best_interval_s


class Run:
    """Steps of 10 ms on a clock of its own, and saves that hold the loop up."""

    def __init__(self, blocked_s: float, written_after: int) -> None:
        self.now_s, self.saves = 100.0, list[int]()
        self._blocked_s, self._written_after = blocked_s, written_after
        self._pace = Pace(0, lambda steps: steps, lambda: self.now_s)

    def take(self, steps: int) -> list[int]:
        for step in range(1, steps + 1):
            self.now_s += 0.01
            is_written = bool(self.saves) and step == self.saves[-1] + self._written_after
            if self._pace.is_due(step):
                self.saves.append(step)
                self.now_s += self._blocked_s
                self._pace.saving(self._blocked_s)
            if is_written:
                self._pace.written()
        return self.saves


def test_the_first_save_is_measured_and_the_next_come_at_the_best_interval():
    first, second, *_ = Run(blocked_s=0.05, written_after=5).take(20_000)
    assert first == 32
    best = best_interval_s(0.05, 24 * 3600) / 0.01
    assert second - first == pytest.approx(best, rel=0.05)


def test_failures_make_it_more_often_and_cost_less_often(monkeypatch):
    def interval(blocked_s: float) -> int:
        first, second, *_ = Run(blocked_s, written_after=5).take(40_000)
        return second - first

    calm, dear = interval(0.05), interval(0.1)
    monkeypatch.setenv(FAILURES, "24 in 3600.0")
    assert interval(0.05) < calm / 4
    assert dear > 1.3 * calm


def test_no_save_begins_before_the_last_one_is_written():
    saves = Run(blocked_s=0.0, written_after=400).take(4_000)
    assert min(np.diff(saves)) >= 400


def test_a_run_asks_for_it_by_name(tmp_path):
    program = mw.jax_program(
        lambda params, batch: ((batch @ params["w"]) ** 2).mean(), {"w": np.ones(2)}, optax.sgd(0.1)
    )
    trainer = mw.Trainer(program, mw.Placement.of(mw.create_mesh({"batch": 8}), {}))
    with mw.Checkpoints(tmp_path, keep=None) as checkpoints:
        trainer.train(
            trainer.init(),
            [np.ones([8, 2], "f")] * 40,
            checkpoints=checkpoints,
            save_every="auto",
        )
        assert [info.step for info in checkpoints.all] == [32, 40]
        often: Any = "often"
        with pytest.raises(CheckpointError, match="at least 1, or 'auto'; received 'often'"):
            trainer.train(trainer.init(), [], checkpoints=checkpoints, save_every=often)
