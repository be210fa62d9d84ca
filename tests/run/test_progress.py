"""The line that ``fit`` draws: what it says, and that training does not wait for it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.frontends.keras.steps import WorkRates
from meshwright.frontends.keras.work import StepWork
from meshwright.run.progress import Progress


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class UnderWay:
    """A loss that is not there yet, and must not be read."""

    def __init__(self) -> None:
        self.done = False

    def is_ready(self) -> bool:
        return self.done

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        assert self.done, "the loop would wait here"
        return np.asarray(0.25)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def drawn(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.replace("\x1b[K", "").split("\r")


def test_the_line_tells_how_far_how_long_what_and_how_fast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    progress = Progress(3, 100, WorkRates(lambda: StepWork(32, flops=2e9)), clock, live=True)
    progress.begin_epoch(1)
    for step in range(1, 41):
        clock.now += 0.2
        progress.after(step, {"accuracy": np.float32(0.5), "loss": np.float32(1.25)})
    assert drawn(capsys)[-1] == (
        "epoch 2/3  ━━━━━━━━────────────  40/100  12s left  32s to the end  loss 1.25  "
        "accuracy 0.5  160 samples/s  5 steps/s  10 GFLOP/s"
    )
    progress.trained()
    clock.now += 7  # validation
    progress.end_epoch({"loss": 1.0, "val_loss": 2.0})
    assert drawn(capsys)[-1] == (
        "epoch 2/3  ━━━━━━━━━━━━━━━━━━━━  40/40  8s  loss 1  val_loss 2  160 samples/s  "
        "5 steps/s  10 GFLOP/s\n"
    )


def test_it_never_waits_for_a_loss_and_shows_the_newest_that_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    progress = Progress(1, 10, WorkRates(StepWork), clock, live=True)
    progress.begin_epoch(0)
    first, second = UnderWay(), UnderWay()
    clock.now += 1
    progress.after(1, {"loss": first})
    assert "loss" not in drawn(capsys)[-1]
    first.done = True
    clock.now += 1
    progress.after(2, {"loss": second})
    line = drawn(capsys)[-1]
    assert "loss 0.25" in line
    assert "FLOP" not in line


def test_it_draws_ten_times_a_second_at_most_and_counts_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, counts = Clock(), []
    rates = WorkRates(lambda: counts.append(1) or StepWork())
    progress = Progress(1, None, rates, clock, live=True)
    progress.begin_epoch(0)
    for step in range(1000):
        clock.now += 0.001
        progress.after(step, {"loss": 1.0})
    lines = drawn(capsys)
    assert 9 <= len(lines) - 1 <= 11
    assert "/?" in lines[-1]
    assert len(counts) == 1


WORK = StepWork(32, 32 * 128, 2e12, 1e14)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            120,
            "epoch 2/3  ━━━━━━━━────────────  40/100  12s left  loss 1.25  accuracy 0.5  "
            "20.5k tokens/s  5 steps/s  MFU 10.0%",
        ),
        (79, "epoch 2/3  ━━━━──────  40/100  12s left  loss 1.25  20.5k tokens/s  MFU 10.0%"),
        (60, "epoch 2/3  ━━━━──────  40/100  12s left  loss 1.25"),
        (30, "epoch 2/3  40/100  12s left"),
    ],
)
def test_a_narrow_terminal_keeps_whole_words_and_what_matters_most(
    columns: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    clock = Clock()
    progress = Progress(3, 100, WorkRates(lambda: WORK), clock, live=True)
    progress.begin_epoch(1)
    for step in range(1, 41):
        clock.now += 0.2
        progress.after(step, {"accuracy": np.float32(0.5), "loss": np.float32(1.25)})
    line = drawn(capsys)[-1]
    assert line == expected
    assert len(line) < columns


def test_what_is_computed_twice_is_not_called_model_flops() -> None:
    assert WORK.speed_text(5) == "MFU 10.0%"
    assert WORK._replace(is_recomputed=True).speed_text(5) == "HFU 10.0%"


def fitted(capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x, y = np.ones([64, 4], "float32"), np.ones([64, 2], "float32")
    strategy.fit(model, x, y, batch_size=16, epochs=2, **options)
    return capsys.readouterr().out


def test_fit_writes_a_line_per_epoch_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = fitted(capsys, validation_split=0.25).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/2  ━━━━━━━━━━━━━━━━━━━━  3/3  ")
    assert "  loss " in lines[1]
    assert "  val_loss " in lines[1]
    assert "steps/s" in lines[1]
    assert "samples/s" in lines[1]


def test_fit_with_verbose_0_is_silent_and_with_2_keras_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fitted(capsys, verbose=0) == ""
    assert "4/4 - " in fitted(capsys, verbose=2)


def test_the_line_lets_several_steps_be_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.frontends.keras import fitting

    steps: list[int] = []
    monkeypatch.setattr(fitting.Progress, "after", lambda self, done, logs: steps.append(done))
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    strategy.fit(model, np.ones([128, 4]), np.ones([128, 2]), batch_size=16)
    assert steps == [4, 8]
