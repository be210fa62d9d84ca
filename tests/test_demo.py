"""The demo and the example: what a newcomer runs, what it prints, draws and reaches."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import meshwright as mw
from meshwright.data.datasets import Digits, shipped_subset
from meshwright.demo import eight_devices, main
from meshwright.demo.jobs import BATCH_SIZE, JOBS, Job, build_convnet, chosen
from meshwright.demo.screen import progress_of
from meshwright.demo.training import Result, live_bytes, run

ROOT = Path(__file__).parent.parent
DATA, MODEL, SPACE = JOBS


def python(*arguments: str, cwd: Path, seconds: int = 500) -> str:
    """What a fresh process prints, where standard output is no terminal."""
    settled_here = ("KERAS_BACKEND", "NPROC", "JAX_PLATFORMS")  # by conftest.py, not by a newcomer
    fresh = {name: value for name, value in os.environ.items() if name not in settled_here}
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, cwd=cwd, timeout=seconds,
        env=fresh | {"COLUMNS": "80"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def few_digits() -> Digits:
    digits = shipped_subset()
    return replace(
        digits,
        x_train=digits.x_train[:512],
        y_train=digits.y_train[:512],
        x_test=digits.x_test[:200],
        y_test=digits.y_test[:200],
    )


@pytest.mark.full
def test_the_quick_demo_ends_with_a_table_and_a_picture(tmp_path: Path) -> None:
    command = ("-m", "meshwright.cli", "demo", "--quick", "--out", "pictures")
    printed = python(*command, cwd=tmp_path)
    number = r"\d+\.\d+"
    row = rf"^ \((\w)\) .*?  ((?:\w+=\d ?)+) +{number}%  +{number}  +{number}  +([\d,]+) *$"
    assert re.findall(row, printed, re.MULTILINE) == [
        ("a", "batch=8 ", "407,080"),
        ("b", "batch=4 model=2 ", "203,560"),
        ("c", "batch=2 rows=2 cols=2 ", "16,296"),
    ]
    assert "\x1b" not in printed
    assert "(c) data, space: loss" in printed
    *_, drawing, serving = printed.rstrip().splitlines()
    assert serving == "Serve it: meshwright serve pictures/mlp.keras --mesh batch=8"
    picture = Path(drawing.removeprefix("Picture of the layouts: "))
    with mw.Server(tmp_path / "pictures" / "mlp.keras", max_rows=1) as server:
        answer = server.answer({"input": np.zeros([1, 28, 28])}).outputs["output"]
    assert answer.sum() == pytest.approx(1, abs=1e-5)
    assert picture == (tmp_path / "pictures" / "layouts.svg").resolve()
    drawn = "".join(ElementTree.parse(picture).getroot().itertext())
    assert all(word in drawn for word in ("(a) data", "(b) data, model", "(c) data, space"))
    assert all(word in drawn for word in ("images", "hidden/kernel", "strokes/kernel"))


@pytest.fixture(scope="module")
def two_runs(few_digits: Digits) -> tuple[Result, Result, str]:
    """Runs (a) and (b), and what a terminal showed meanwhile."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with progress_of(console, [DATA, MODEL], 2, steps_per_epoch=4) as bars:
        data, model = (
            run(job, few_digits, 2, eight_devices(), [bars[job.name]]) for job in (DATA, MODEL)
        )
    return data, model, screen.getvalue()


@pytest.mark.full
def test_data_and_model_parallel_runs_agree_and_share_the_bytes(two_runs) -> None:
    data, model, _ = two_runs
    assert model.accuracy == pytest.approx(data.accuracy, abs=0.02)
    assert model.loss == pytest.approx(data.loss, rel=1e-3)
    split, whole, itemsize = 784 * 128 + 128 + 128 * 10, 10, 4
    assert data.parameter_bytes_per_device == (split + whole) * itemsize
    assert model.parameter_bytes_per_device == (split // 2 + whole) * itemsize


@pytest.mark.full
def test_the_bars_of_a_terminal_move_to_their_end(two_runs) -> None:
    *_, screen = two_runs
    plain = re.sub(r"\x1b\[[?\d;]*\w", "", screen)
    assert plain.index("0/8") < plain.index("8/8")
    finished = re.compile(r"8/8 \d:\d\d:\d\d loss \d\.\d{3} after epoch 2 of 2")
    assert [bool(finished.search(line)) for line in plain.rstrip().splitlines()[-2:]] == [True] * 2


def test_the_picture_shows_every_tensor_but_whole_biases(two_runs) -> None:
    _, result, _ = two_runs
    visible = {tensor.name: str(tensor.layout.unbound()) for tensor in result.picture.tensors}
    assert visible == {
        "images": "[batch, unsharded, unsharded]",
        "hidden/kernel": "[unsharded, model]",
        "hidden/bias": "[model]",
        "output/kernel": "[model, unsharded]",
    }


def test_live_bytes_count_every_device() -> None:
    strategy = mw.Sharded(mw.create_mesh(MODEL.axes), MODEL.layouts)
    with strategy.scope():
        model = MODEL.build()
    before = live_bytes(model)
    assert set(before) == set(jax.devices()[:8])
    assert set(before.values()) == {203_560}


def test_the_spatial_run_exchanges_borders_and_gathers_no_image() -> None:
    strategy = mw.Sharded(mw.create_mesh(SPACE.axes), inputs=SPACE.inputs)
    with strategy.scope():
        model = build_convnet()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    batch = (np.zeros((BATCH_SIZE, 28, 28), "float32"), np.zeros(BATCH_SIZE, "int32"))
    step = jax.jit(strategy.train_step(model, batch))
    compiled = step.lower(strategy.state(model), strategy.put(batch)).compile().as_text() or ""
    assert "collective-permute" in compiled
    assert "all-to-all" not in compiled
    # New weights lie as the old ones: of the dense layer behind the images, whose rows XLA has
    # split meanwhile, something as large as its input is gathered.
    gathered = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", compiled)
    assert all(np.prod([int(n) for n in dims.split(",")]) <= 64 * 64 for dims in gathered)


def test_runs_are_chosen_by_name() -> None:
    assert [job.name for job in chosen("c, a")] == ["a", "c"]
    assert [job.name for job in chosen(["b"])] == ["b"]
    with pytest.raises(
        mw.MeshwrightError, match=r"unknown run 'd'\. The demo's runs are a \(data\), b "
    ):
        chosen("a,d")
    with pytest.raises(mw.MeshwrightError, match="no run was chosen"):
        chosen([])


def test_wrong_arguments_are_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(mw.MeshwrightError, match="epochs must be at least 1; received 0"):
        main(epochs=0, out=tmp_path)
    with pytest.raises(mw.DataError, match="There is no file"):
        main(data=tmp_path / "nowhere.npz", out=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(mw.MeshwrightError, match="is not a folder"):
        main(out=tmp_path / "file", quick=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("job", "least"), [(DATA, 0.955), (MODEL, 0.955), (SPACE, 0.97)], ids=["a", "b", "c"]
)
def test_three_epochs_on_the_subset_read_nearly_all_digits(job: Job, least: float) -> None:
    result = run(job, shipped_subset(), 3, eight_devices())
    assert result.accuracy >= least


@pytest.mark.full
def test_the_example_runs_from_top_to_bottom(tmp_path: Path, few_digits: Digits) -> None:
    path = tmp_path / "few.npz"
    arrays = {
        name: getattr(few_digits, name) for name in ("x_train", "y_train", "x_test", "y_test")
    }
    np.savez(path, **arrays)
    printed = python(str(ROOT / "examples" / "mnist_any_mesh.py"), str(path), cwd=tmp_path)
    assert len(re.findall(r"\d\d\.\d\d% of 200 test digits are read right", printed)) == 3
    assert "layout 'hidden.*kernel'" in printed
