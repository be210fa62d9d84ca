"""The lines of the guide for the terminal run, with the model of the guide."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import meshwright as mw
from meshwright.cli import main
from meshwright.commands.serve import options_of
from meshwright.commands.serving import ServeOptions, server_for

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "serve.md").read_text()
LINES = [
    shlex.split(line)
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
PLANNED = [words for words in LINES if words[1] in ("dry-run", "plan")]
SERVED = [words for words in LINES if "serve" in words]


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guide's model, its files, and folders of runs."""
    mw.create_mesh({"all": 8})  # starts JAX with as many devices as the lines name
    folder = tmp_path_factory.mktemp("guide")
    (build,) = re.findall(r"^def build\(\):\n.*?^$", PAGE, re.DOTALL | re.MULTILINE)[:1]
    (folder / "train.py").write_text(f"import keras\n\n\n{build}")
    (config,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "serve.toml").write_text(config)
    for run in ("sums", "candidate", "large", "mnist"):
        (folder / "runs" / run).mkdir(parents=True)
    return folder


def test_every_line_is_run_here() -> None:
    assert len(PLANNED) >= 3
    assert len(SERVED) >= 5
    assert [words for words in LINES if words not in (*PLANNED, *SERVED)] == []


@pytest.mark.filterwarnings("ignore:no parameter and no input of model 'sums' lies along axis")
@pytest.mark.parametrize("words", PLANNED, ids=" ".join)
def test_a_line_reports_what_serving_takes(words, guide, monkeypatch) -> None:
    monkeypatch.chdir(guide)
    words = [*words[1:], "--no-compile"] if words[1] == "dry-run" else words[1:]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "rows/s" in result.output or "plan for serving" in result.output


@pytest.mark.filterwarnings("ignore:no parameter and no input of model 'sums' lies along axis")
@pytest.mark.parametrize("words", SERVED, ids=" ".join)
def test_a_line_makes_its_server(words, guide, monkeypatch) -> None:
    monkeypatch.chdir(guide)
    if "--plan" in words and not Path("serve.json").exists():
        result = CliRunner().invoke(main, next(w[1:] for w in PLANNED if w[1] == "plan"))
        assert result.exit_code == 0, result.output
    server = server_for(ServeOptions(**options_of(words[words.index("serve") + 1 :])))
    assert server.names()[0] == Path(words[words.index("serve") + 1]).name


PROGRAM = """
import jax, jax.numpy as jnp, meshwright as mw, optax
def forward(params, x):
    return x @ params["w"]
def build():
    loss = lambda params, batch: jnp.mean((forward(params, batch[0]) - batch[1]) ** 2)
    params = {"w": jax.ShapeDtypeStruct((16, 4), "float32")}
    program = mw.jax_program(loss, params, optax.sgd(0.1), forward=forward, name="line")
    batch = tuple(jax.ShapeDtypeStruct((8, size), "float32") for size in (16, 4))
    return program, batch, {"w": [None, "model"]}
def alone():
    return build()[0]
"""


def test_a_program_is_planned_and_served_by_the_inputs_of_its_batch(guide, monkeypatch) -> None:
    monkeypatch.chdir(guide)
    Path("line.py").write_text(PROGRAM)
    words = ["dry-run", "line.py:build", "--target", "h100:4", "--mesh", "model=4", "--serve"]
    result = CliRunner().invoke(main, [*words, "--no-compile"])
    assert "batch of 8" in result.output, (result.output, result.exception)
    words = ["plan", "line.py:build", "--target", "h100:4", "--objective", "latency"]
    assert "plan for serving" in CliRunner().invoke(main, words).output
    refused = CliRunner().invoke(main, ["plan", "line.py:alone", *words[2:]])
    assert "the inputs of program 'line' are not known: let build() return" in refused.output
    with mw.Checkpoints("runs/line") as checkpoints:
        checkpoints.save(3, mw.TrainState({"w": np.eye(16, 4, dtype="float32")}, {}, {}, {}))
    options = ["runs/line", "--model", "line.py:build", "--mesh", "model=4", "--buckets", "2"]
    with server_for(ServeOptions(**options_of(options))) as server:
        answer = server.answer({"input": np.ones([2, 16])})
    assert (answer.version, answer.outputs["output"].tolist()) == ("3", [[1.0] * 4] * 2)
    with pytest.raises(mw.ModelError, match=r"returns \(program, batch\): of a batch \(x, y\)"):
        server_for(ServeOptions(**options_of([*options[:2], "line.py:alone"])))
