"""A program for ``test_elastic.py`` and ``chaos.py``: its parameters count the visits of each row.

``python rows_once.py FOLDER``: ``FOLDER/plan.json`` maps ``"generation@batch"`` to what rank 1 (or,
for ``places``, rank 0) does when it reads that batch; rank 0 writes ``result.json`` at the end, and
the time of every generation's first step. ``PEER_COPIES`` and ``SAVE_EVERY`` are as in ``fit``;
with ``SPLIT`` the counts are split over the devices.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

JOINED_WITH = set(sys.modules)
from meshwright.checkpoint import files  # noqa: E402

ROWS, BATCH = 96, 24
EPOCHS = int(os.environ.get("EPOCHS", "60"))
STEPS = ROWS // BATCH * EPOCHS
_GENERATION = os.environ.get("MESHWRIGHT_GENERATION", "0")
COMPILED = [0]  # programs that no other process had compiled before
PEER_COPIES, SAVE_EVERY = (
    int(os.environ.get(n, d)) for n, d in [("PEER_COPIES", "0"), ("SAVE_EVERY", "7")]
)
_INPUT_S = float(os.environ.get("INPUT_S", "0.01"))


class Batches:
    """Epochs of rows, each in an order of its own; its place is one number."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder, self._plan, self._next = folder, plan, 0
        draw = np.random.default_rng(5)
        self.x = draw.normal(size=[ROWS, 4]).astype("f")
        self.y = draw.normal(size=[ROWS, 2]).astype("f")

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._next == STEPS:
            raise StopIteration
        act(self._folder, self._plan.get(f"{_GENERATION}@{self._next}"))
        time.sleep(_INPUT_S)
        epoch, at = divmod(self._next, ROWS // BATCH)
        ids = np.random.default_rng(epoch).permutation(ROWS)[at * BATCH : (at + 1) * BATCH]
        self._next += 1
        return {"id": ids.astype("int32"), "x": self.x[ids], "y": self.y[ids]}

    def get_state(self) -> dict[str, int]:
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def act(folder: Path, action: dict[str, Any] | None) -> None:
    if not action:
        return
    if jax.process_index() == action.get("rank", 1):
        while started_ahead() < action.get("ahead", 0):
            time.sleep(0.01)
        (folder / "failed_at").write_text(repr(time.time()))
        if "signal" in action:
            os.kill(os.getpid(), action["signal"])
        if "places" in action:
            (folder / "places").write_text(str(action["places"]))
        if "launcher" in action:
            os.kill(int(os.environ["LAUNCHER"]), action["launcher"])
            time.sleep(2)  # until it passes the signal on


def started_ahead() -> int:
    """How many processes the launcher has started for the next start."""
    theirs = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in theirs]
    return sum(b"MESHWRIGHT_STANDBY=" in environment for environment in environments)


def imported() -> int:
    """How many of the library's modules this process has imported since it has joined."""
    return sum(name.startswith("meshwright.") for name in set(sys.modules) - JOINED_WITH)


def die_while_saving(folder: Path, plan: dict[str, Any]) -> None:
    """In the start that the plan names, rank 1 is killed while its third checkpoint is written."""
    if plan.get("dies_saving_in") != _GENERATION or jax.process_index() != 1:
        return
    real, calls = files.write, itertools.count(1)

    def write(*arguments: Any) -> None:
        if next(calls) == 3:
            act(folder, {"signal": 9})
        real(*arguments)

    files.write = write


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    # By plain SGD of 1/4 each visit adds 1/256, exactly.
    visits = -jnp.sum(params["visits"][batch["id"]]) / 64
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + visits


def count_compiled(event: str, **_: object) -> None:
    COMPILED[0] += event.endswith("compilation_cache/cache_misses")


def note_pid(folder: Path) -> None:
    """Write down which process this rank is now."""
    pids = folder / "pids"
    pids.mkdir(exist_ok=True)
    (pids / str(jax.process_index())).write_text(str(os.getpid()))


def main(folder: Path) -> None:
    note_pid(folder)
    jax.monitoring.register_event_listener(count_compiled)
    plan = json.loads((folder / "plan.json").read_text())
    die_while_saving(folder, plan)
    program = mw.jax_program(
        loss, {"w": np.zeros([4, 2], "f"), "visits": np.zeros([ROWS], "f")}, optax.sgd(0.25)
    )
    rules = {"visits": ["batch"]} if os.environ.get("SPLIT") else {}
    trainer = mw.Trainer(program, mw.Placement.of(mw.create_mesh({"batch": -1}), rules))
    with mw.Checkpoints(folder / "saved") as checkpoints:
        started = {"generation": int(_GENERATION), "processes": jax.process_count()}
        state, _ = trainer.train(
            trainer.init(),
            Noted(folder, started, plan),
            checkpoints=checkpoints,
            save_every=SAVE_EVERY,
            peer_copies=PEER_COPIES,
        )
    if jax.process_index() == 0:
        visits = (np.asarray(state.params["visits"]) * 256).tolist()
        weights = np.asarray(state.params["w"])
        source = Batches(folder, {})
        losses = [float(np.mean((source.x @ weights - source.y) ** 2))]
        results = {"visits": visits, "weights": [weights.ravel().tolist()], "losses": losses}
        (folder / "result.json").write_text(json.dumps(results))


class Noted(Batches):
    """The same, which notes when its second batch is asked for: the first step was begun then."""

    def __init__(self, folder: Path, started: dict[str, int], plan: dict[str, Any]) -> None:
        super().__init__(folder, plan)
        self._started, self._read = started, 0

    def set_state(self, state: dict[str, int]) -> None:
        super().set_state(state)
        self._started["from"] = self._next

    def __next__(self) -> dict[str, np.ndarray]:
        self._read += 1
        if self._read == 2 and jax.process_index() == 0:
            here = {"from": -1, **self._started, "at": time.time(), "compiled": COMPILED[0]}
            here["imported"] = imported()
            line = json.dumps(here)
            with (self._folder / "starts").open("a") as file:
                file.write(line + "\n")
        return super().__next__()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
