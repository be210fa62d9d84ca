"""A program for ``test_group.py``: trains by SGD, and one rank fails in the way that it is given.

``python grouped.py FOLDER HOW``: the failing rank writes ``failed`` there, with the time; the other
writes ``seen`` with the time, and the error that it has got.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

FOLDER, HOW = (Path(sys.argv[1]), sys.argv[2]) if __name__ == "__main__" else (Path(), "")
FAILS, AT = 1, 60


def batches() -> Iterator[dict[str, np.ndarray]]:
    for number in range(120 if HOW == "nothing" else 10**6):
        if jax.process_index() == FAILS and number == AT:
            fail()
        yield {"x": np.ones([8, 4], "f"), "y": np.ones([8, 2], "f")}


def fail() -> None:
    (FOLDER / "failed").write_text(json.dumps(time.time()))
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "raise":
        raise OSError("a file of rows is damaged")
    if HOW == "exit":
        sys.exit(0)
    if HOW == "gil":  # nothing else in this process runs any Python
        ctypes.PyDLL(None).sleep(1000)


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def main() -> None:
    program = mw.jax_program(loss, {"w": np.zeros([4, 2], "f")}, optax.sgd(0.1))
    trainer = mw.Trainer(program, mw.Placement.of(mw.create_mesh({"batch": -1}), {}))
    try:
        _, logs = trainer.train(trainer.init(), batches())
        print("loss", float(logs["loss"]), jax.process_count(), jax.device_count(), flush=True)
    except mw.ProcessError as error:
        if jax.process_index() != FAILS:
            fields = {"rank": error.rank, "pid": error.pid, "section": error.section}
            seen = {"at": time.time(), **fields, "stack": error.stack, "text": str(error)}
            (FOLDER / "seen").write_text(json.dumps(seen))
        raise


if __name__ == "__main__":
    main()
