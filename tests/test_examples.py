"""The examples run, and only mesh and layout differ between their runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LAYOUTS = [
    ("all:8", "batch:all"),
    ("rows:4;cols:2", "batch:rows;vocab:cols;d_ff:cols;heads:cols"),
]
SMALL = "d_model:16 d_ff:32 heads:4 d_kv:4 layers:1"


def run(example: str, mesh: str, layout: str, *options: str, env: dict | None = None) -> str:
    command = [sys.executable, str(EXAMPLES / example), "--mesh", mesh, "--layout", layout]
    how = {"capture_output": True, "text": True, "timeout": 900, "env": env}
    result = subprocess.run([*command, *options], **how)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.full
def test_the_language_model_learns_the_same_under_any_layout_and_writes():
    options = ["--size", f"length:16 {SMALL}", "--steps", "8", "--batch", "16", "--every", "2"]
    options += ["--sample", "12", "--beam", "2"]
    printed = [run("transformer_lm.py", *where, *options) for where in LAYOUTS]
    result = list(map(losses, printed))
    assert result[0] == pytest.approx(result[1], abs=2e-3)
    assert result[0][-1] < result[0][0]
    assert printed[0].count("score") == 2
    assert "When an exception" in printed[0]


@pytest.mark.full
def test_the_translator_learns_the_same_under_any_layout_and_answers():
    options = ["--size", SMALL, "--steps", "6", "--batch", "16", "--every", "2", "--ask", "16"]
    printed = [run("translation.py", *where, *options) for where in LAYOUTS]
    result = list(map(losses, printed))
    assert result[0] == pytest.approx(result[1], abs=2e-3)
    assert re.search(r"[\d.]+% of 16 numbers", printed[0])


@pytest.mark.full
def test_the_translator_gets_99_of_100_numbers_right():
    # As users compile it: what is compiled quickly takes three times as long for each of 600 steps.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    printed = run("translation.py", *LAYOUTS[1], env=env)
    (right,) = re.findall(r"([\d.]+)% of 400 numbers", printed)
    assert float(right) >= 99


@pytest.mark.full
def test_the_notebook_runs_and_its_two_meshes_train_alike(tmp_path):
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    code += '\nprint(history.history["loss"][-1], again.history["loss"][-1])'
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    one, other = map(float, result.stdout.splitlines()[-1].split())
    assert one == pytest.approx(other, rel=1e-4)
