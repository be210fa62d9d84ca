"""A program for ``test_group.py``: trains by SGD, and one rank fails in the way that it is given.

``python grouped.py FOLDER HOW [RANK]``: the failing rank (1) writes ``failed`` there with the time;
the other writes ``seen`` with the time, and the error that it has got. ``goes on``: it does not
fail. ``asleep``: it sleeps after training, and the other waits for it at a barrier. ``late``: it is
only late, for longer than a step may take, because it compiles, is stopped now and then, and reads
slowly.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

FOLDER, HOW = (Path(sys.argv[1]), sys.argv[2]) if __name__ == "__main__" else (Path(), "")
FAILS, AT = int(sys.argv[3]) if __name__ == "__main__" and sys.argv[3:] else 1, 60
COMPILES_S = [0.0]


def compile_slowly(event: str, _duration_s: float, **_: object) -> None:
    """Hold the compiler up at its end, before Meshwright hears of that."""
    if event.endswith("backend_compile_duration"):
        time.sleep(COMPILES_S[0])


jax.monitoring.register_event_duration_secs_listener(compile_slowly)

import meshwright as mw  # noqa: E402 - the listener must be the first


def batches() -> Iterator[dict[str, np.ndarray]]:
    ends = {"nothing": 120, "late": 130, "asleep": 10}.get(HOW, 10**6)
    for number in range(AT if (HOW, jax.process_index()) == ("uneven", FAILS) else ends):
        if HOW == "late" and jax.process_index() == FAILS and number > AT:
            time.sleep(0.05)
        if number == AT:
            (FOLDER / "training").touch()
            if jax.process_index() == FAILS and HOW != "goes on":
                fail()
        yield {"x": np.ones([8, 4], "f"), "y": np.ones([8, 2], "f")}
    note_failure()


def meet(mesh: mw.Mesh) -> None:
    if jax.process_index() == FAILS:
        note_failure()
        time.sleep(10**6)
    mw.barrier(mesh)


def note_failure() -> None:
    (FOLDER / "failed").write_text(json.dumps(time.time()))


def fail() -> None:
    note_failure()
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "raise":
        raise OSError("a file of rows is damaged")
    if HOW.startswith("exit"):
        sys.exit(int(HOW.removeprefix("exit") or 0))
    if HOW == "late":
        COMPILES_S[0] = 4.0
        jax.jit(lambda x: x * 3 + 1)(np.ones(7, "f"))
        COMPILES_S[0] = 0.0
        pulses = f"for i in 1 2 3; do kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", f"{pulses}; sleep 0.3; done"])
    if HOW == "gil":  # nothing else in this process runs any Python
        ctypes.PyDLL(None).sleep(1000)


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def main() -> None:
    mw.join()  # where something else than the launcher has started this
    program = mw.jax_program(loss, {"w": np.zeros([4, 2], "f")}, optax.sgd(0.1))
    mesh = mw.create_mesh({"batch": -1})
    trainer = mw.Trainer(program, mw.Placement.of(mesh, {}))
    try:
        _, logs = trainer.train(trainer.init(), batches())
        if HOW == "asleep":
            meet(mesh)
        result = f"{float(logs['loss'])} {jax.process_count()} {jax.device_count()}"
        sys.stdout.write(f"loss {result}\n")  # at once: mpirun lets ranks write into one line
        sys.stdout.flush()
    except mw.ProcessError as error:
        if jax.process_index() != FAILS:
            fields = {"rank": error.rank, "pid": error.pid, "section": error.section}
            actual = {"at": time.time(), **fields, "stack": error.stack, "text": str(error)}
            (FOLDER / "seen").write_text(json.dumps(actual))
        raise
    finally:
        (FOLDER / f"left{jax.process_index()}").touch()


if __name__ == "__main__":
    main()
