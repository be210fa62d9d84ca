"""A program for ``test_served_by_processes.py``: serves on one mesh over all processes there are.

``serving_group.py FOLDER HOW``: rank 0 writes its answers to ``answers.npz``. With ``stop``, rank 1
stops after the first answer, and rank 0 writes what clients get then to ``fault``.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import meshwright as mw

ROWS = np.random.default_rng(0).normal(size=[6, 8]).astype("float32")


def build() -> keras.Model:
    x = keras.Input([8])
    h = keras.layers.Dense(16, "relu", name="hidden")(x)
    return keras.Model(x, keras.layers.Dense(4, name="last")(h), name="small")


def serve(run: Path, devices: Any = None) -> mw.Server:
    layouts = {"hidden.*kernel": [None, "model"], "last.*kernel": ["model", None]}
    strategy = mw.Sharded(mw.create_mesh({"batch": 2, "model": 2}, devices=devices), layouts)
    server = mw.Server(strategy=strategy, build=build, checkpoint=run, buckets=[4])
    server.load()
    return server


def answers_of(server: mw.Server, run: Path) -> dict[str, Any]:
    """What it answers, before and after another checkpoint comes."""
    answers = [server.answer({"input": ROWS[:n]}) for n in (1, 3, 6)]
    (run / "later").rename(run / "step_2")
    assert server.model("small").reload()
    answers.append(server.answer({"input": ROWS}))
    outputs = {str(n): each.outputs["last"] for n, each in enumerate(answers)}
    return {"versions": [each.version for each in answers], **outputs}


def main(folder: Path, how: str) -> None:
    server = serve(folder / "run")
    model = server.model("small")
    if jax.process_index():
        if how == "stop":
            follow, count = model.follow, itertools.count(1)

            def stops(word: Any, arrays: Any) -> None:
                if next(count) == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
                follow(word, arrays)

            model.follow = stops
        server.work()
        return
    if how == "stop":
        server.answer({"input": ROWS[:1]})
        begin_s = time.monotonic()
        try:
            server.answer({"input": ROWS[:1]}, timeout_s=20)
        except mw.NotReadyError as error:
            (folder / "fault").write_text(f"{time.monotonic() - begin_s}\n{error}")
        assert not server.ready
        os._exit(3)
    np.savez(folder / "answers.npz", **answers_of(server, folder / "run"))
    server.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
