"""A program for ``test_served_deltas.py``: serves a folder of exports by all processes there are.

``serving_deltas_group.py FOLDER``: rank 0 writes its answers to ``answers.npz`` there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from test_served_deltas import X, build

import meshwright as mw


def main(folder: Path) -> None:
    strategy = mw.Sharded(mw.create_mesh({"batch": 2}))
    server = mw.Server(
        strategy=strategy, build=build, checkpoint=folder / "exports", buckets=[8], follow_s=0.05
    )
    server.load()
    if jax.process_index():
        server.work()
        return
    with server:
        answers = [server.answer(X)]
        (folder / "later").rename(folder / "exports" / "delta_00000003_of_00000001")
        limit_s = time.monotonic() + 60
        while server.model("shop").version != "3" and time.monotonic() < limit_s:
            time.sleep(0.02)
        answers.append(server.answer(X))
    outputs: dict[str, Any] = {str(n): answer.outputs["out"] for n, answer in enumerate(answers)}
    outputs["versions"] = [answer.version for answer in answers]
    np.savez(folder / "answers.npz", **outputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
