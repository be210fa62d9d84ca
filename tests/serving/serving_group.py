"""A program for ``test_served_by_processes.py``: serves on one mesh over all processes there are.

``serving_group.py FOLDER [stages]``: rank 0 writes its answers to ``answers.npz``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import meshwright as mw

ROWS = np.random.default_rng(0).normal(size=[6, 8]).astype("float32")


def build() -> keras.Model:
    x = keras.Input([8])
    h = keras.layers.Dense(16, "relu", name="hidden")(x)
    return keras.Model(x, keras.layers.Dense(4, name="last")(h), name="small")


def serve(run: Path, devices: Any = None, by_stages: bool = False) -> mw.Server:
    if by_stages:
        mesh = mw.create_mesh({"stage": 2, "batch": 2}, devices=devices)
        strategy = mw.Sharded(mesh, pipeline=mw.Pipeline("stage", micro_batches=2))
    else:
        layouts = {"hidden.*kernel": [None, "model"], "last.*kernel": ["model", None]}
        strategy = mw.Sharded(mw.create_mesh({"batch": 2, "model": 2}, devices=devices), layouts)
    server = mw.Server(strategy=strategy, build=build, checkpoint=run, buckets=[4])
    server.load()
    return server


def answers_of(server: mw.Server, run: Path) -> dict[str, Any]:
    """What it answers, before and after another checkpoint comes; a broken one changes nothing."""
    answers = [server.answer({"input": ROWS[:n]}) for n in (1, 3)]
    (run / "broken").rename(run / "step_2")
    with pytest.raises(mw.CheckpointError, match="step_2"):
        server.model("small").reload()
    (run / "step_2").rename(run / "broken")
    answers.append(server.answer({"input": ROWS}))
    (run / "later").rename(run / "step_3")
    assert server.model("small").reload()
    answers.append(server.answer({"input": ROWS}))
    outputs = {str(n): answer.outputs["last"] for n, answer in enumerate(answers)}
    return {"versions": [answer.version for answer in answers], **outputs}


def main(folder: Path, by_stages: bool) -> None:
    server = serve(folder / "run", by_stages=by_stages)
    if jax.process_index():
        server.work()
        return
    np.savez(folder / "answers.npz", **answers_of(server, folder / "run"))
    server.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["stages"])
