"""Several models and versions by ``meshwright serve``, and what page and figures say of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from http_calls import Call

import meshwright as mw
from meshwright.commands.beside import models_beside
from meshwright.commands.serve import options_of
from meshwright.commands.serving import ServeOptions, server_for

ROW = {"x": np.ones([1, 2], "float32")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in {"sums": 1.0, "newer": 1.25, "other": 2.0}.items():
        x = keras.Input([2], name="x")
        dense = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.Constant(value), name="y"
        )
        keras.Model(x, dense(x), name=name).save(tmp_path / f"{name}.keras")
    return tmp_path


def asked(*words: str) -> ServeOptions:
    return ServeOptions(**options_of(words))


def test_a_file_names_versions_and_models_with_their_parts_of_the_traffic(folder: Path) -> None:
    (folder / "serve.toml").write_text(
        """
        [serve]
        buckets = "1,4"
        model-version = "1"
        [[serve.beside]]
        run = "newer.keras"
        version = "2"
        share = 0.25
        compare = 1
        buckets = [2]
        [[serve.beside]]
        run = "other.keras"
        """
    )
    with server_for(asked("sums.keras", "--config", "serve.toml")) as server:
        assert server.names() == ("sums", "other")
        assert server.versions("sums") == ("1", "2")
        answers = [server.answer(ROW, name="sums") for _ in range(8)]
        assert Counter(answer.version for answer in answers) == {"1": 6, "2": 2}
        assert server.answer(ROW, name="other").outputs["y"].item() == 4.0
        result: Any = server.model("sums", "2")
        assert result.options.buckets == (2,)
        app = mw.serving_app(server)

        def got(path: str) -> str:
            return asyncio.run(Call("GET", path).to(app)).body.decode()

        name = 'meshwright_largest_difference{model="sums",output="y",version="2"}'
        assert f"{name} 0.5" in got("/metrics")
        assert "Answers of versions, compared" in got("/")


def test_an_entry_takes_what_it_does_not_say_from_the_command(folder: Path) -> None:
    words = ["sums.keras", "--finite", "--buckets", "1,8", "--reload", "5"]
    entry = "run=newer.keras,version=2,share=0.1,mesh=batch=2,precision=bfloat16"
    (beside,) = models_beside(asked(*words, "--beside", entry))
    own = beside.options
    assert (own.source, own.name, own.version) == (Path("newer.keras"), "sums", "2")
    assert (own.finite, own.buckets, own.reload, own.precision) == (True, (1, 8), 5.0, "bfloat16")
    assert own.mesh is not None
    assert (dict(own.mesh.axes), beside.share, beside.compare) == ({"batch": 2}, 0.1, 0.0)
    assert models_beside(own) == ()
    entry = 'mesh="batch=2,model=2",buckets="1,4",version=3'
    (beside,) = models_beside(asked(*words, "--beside", entry))
    assert beside.options.mesh is not None
    assert beside.options.mesh.axes == (("batch", 2), ("model", 2))
    assert beside.options.buckets == (1, 4)


def test_a_keras_file_beside_a_run_has_its_own_model(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "mine.py").write_text("def build():\n    raise NotImplementedError\n")
    words = ["run", "--model", "mine.py:build", "--beside"]
    (beside,) = models_beside(asked(*words, "run=newer.keras,version=cand"))
    assert beside.options.build is None
    (beside,) = models_beside(asked(*words, "version=cand"))
    assert beside.options.build == "mine.py:build"
    with pytest.raises(mw.ServingError, match=r"leave --model out"):
        server_for(asked("newer.keras", "--model", "mine.py:build"))


def test_the_faults_of_a_command_are_said_at_once(folder: Path) -> None:
    np.savez(folder / "rows.npz", x=ROW["x"])
    (folder / "run").mkdir()
    words = ["run", "--sample", "rows.npz", "--pipeline", "stage", "--mesh", "model=2"]
    with pytest.raises(mw.ServingError) as caught:
        server_for(asked(*words, "--beside", "run=newer.keras,model=mine.py:build,version=2"))
    said = ["name the function", "--precision: name one", "--pipeline stage: the mesh is"]
    assert [text for text in said if str(caught.value).count(text) != 1] == []


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("runs=a", "unknown key runs"),
        ("run=none.keras", "does not exist"),
        ("share=much", "must be a number from 0 to 1"),
        ("buckets=x", "--beside buckets=x"),
        ("=1", "expected key=value"),
        ("mesh=batch=2,model=2", r'in quotes: mesh="batch=2,model=2"'),
        ("buckets=1,8", r'unknown key 8.* in quotes: buckets="1,8"'),
        ('mesh="batch=2', "a quote has no end"),
    ],
)
def test_an_entry_that_is_wrong_is_named(entry: str, says: str, folder: Path) -> None:
    with pytest.raises(Exception, match=says):
        models_beside(asked("sums.keras", "--beside", entry))


def test_a_sample_says_what_the_precision_changes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez(folder / "rows.npz", x=np.full([3, 2], 1.01, "float32"))
    words = ["sums.keras", "--buckets", "1,4", "--sample", "rows.npz"]
    with pytest.raises(mw.ServingError, match="name one"):
        server_for(asked(*words))
    caplog.set_level("INFO", "meshwright.serving")
    caplog.handler.setLevel("INFO")
    with server_for(asked(*words, "--precision", "bfloat16")) as server:
        (line,) = server.model("sums").status().events
        assert line.startswith("bfloat16: ")
        assert "y" in line
    (folder / "rows.npz").write_text("no arrays")
    with pytest.raises(mw.ServingError, match=r"rows\.npz is not a file of arrays"):
        server_for(asked(*words, "--precision", "bfloat16"))
