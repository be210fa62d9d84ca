"""A model over two processes answers as over one, bit for bit, and names one that is missing."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from serving_group import answers_of, serve

import meshwright as mw
from meshwright.launch.group import run_group
from meshwright.launch.group_options import GroupOptions

PROGRAM = str(Path(__file__).parent / "serving_group.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    dims = {"hidden/kernel": [8, 16], "hidden/bias": [16], "last/kernel": [16, 4], "last/bias": [4]}
    for step in (1, 2):
        params = {name: rng.normal(size=size).astype("float32") for name, size in dims.items()}
        with mw.Checkpoints(tmp_path / "run", keep=None) as checkpoints:
            checkpoints.save(step, mw.TrainState(params, {}, {}, {}))
    (tmp_path / "run" / "step_2").rename(tmp_path / "run" / "later")
    return tmp_path


@pytest.mark.alone
@pytest.mark.full
def test_two_processes_answer_as_one(folder: Path) -> None:
    run = folder / "run"
    with serve(run, jax.devices()[:4]) as server:
        one = answers_of(server, run)
    (run / "step_2").rename(run / "later")
    assert run_group([PROGRAM, str(folder), "answer"], GroupOptions(2, 2)) == 0
    two = dict(np.load(folder / "answers.npz"))
    assert one.pop("versions") == list(two.pop("versions")) == ["1", "1", "1", "2"]
    for name, values in one.items():
        np.testing.assert_array_equal(two[name], values)
    assert not np.array_equal(one["2"], one["3"])


@pytest.mark.alone
@pytest.mark.full
def test_clients_learn_within_seconds_which_process_is_missing(folder: Path) -> None:
    assert run_group([PROGRAM, str(folder), "stop"], GroupOptions(2, 2, stall_s=60.0)) != 0
    seconds, text = (folder / "fault").read_text().split("\n", 1)
    assert float(seconds) < 5
    assert "rank 1 (host " in text
