"""A program for ``chaos.py``: a Keras model, one of whose tables counts the visits of each row.

``python fit_rows_once.py FOLDER``, with the number of epochs in ``EPOCHS``. Every process writes
its pid to ``FOLDER/pids``; rank 0 writes ``result.json`` at the end, with the losses of all epochs.
With ``SHARD`` each process reads its own part of the rows; ``SAVE_EVERY`` and ``PEER_COPIES`` are
those of ``fit``; ``FOLDER/plan.json`` says what happens after which step, as in ``rows_once.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from rows_once import act, note_pid

import meshwright as mw

ROWS, BATCH = 192, 24  # which divides over 1, 2, 3 and 4 devices
PER_VISIT = 0.125 / 8  # the learning rate over what the loss is divided by


def count(_: Any, visits: Any) -> Any:
    return -visits * (BATCH / 8)  # its mean over a batch has the gradient 1/8 in each row


class Noted(keras.callbacks.Callback):
    """Notes that the first step of a start was taken, and takes its time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._begun = folder, [0]  # steps of this start; a number would be resumed
        self._plan = json.loads((folder / "plan.json").read_text())
        result = sorted((folder / "saved").glob("step_*"))
        self._from = mw.read_checkpoint(folder / "saved").step if result else -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.01)
        self._begun[0] += 1
        act(self._folder, self._plan.get(f"{os.environ['MESHWRIGHT_GENERATION']}@{self._begun[0]}"))
        if self._begun[0] == 1 and jax.process_index() == 0:
            here = {"at": time.time(), "processes": jax.process_count(), "from": self._from}
            here["step"] = int(self.model.optimizer.iterations)
            with (self._folder / "starts").open("a") as file:
                file.write(json.dumps(here) + "\n")


def main(folder: Path) -> None:
    note_pid(folder)
    epochs = int(os.environ["EPOCHS"])
    keras.utils.set_random_seed(7)
    draw = np.random.default_rng(5)
    ids, x = np.arange(ROWS, dtype="int32")[:, None], draw.normal(size=[ROWS, 8]).astype("f")
    y = draw.normal(size=[ROWS, 4]).astype("f")
    strategy = mw.Sharded(mw.create_mesh({"batch": -1}))
    with strategy.scope():
        id_in, x_in = keras.Input([1], dtype="int32", name="id"), keras.Input([8], name="x")
        table = keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros", name="visits")
        hidden = keras.layers.Dense(16, "tanh")(x_in)
        outputs = [table(id_in), keras.layers.Dense(4)(hidden)]
        model = keras.Model([id_in, x_in], outputs)
        model.compile(keras.optimizers.SGD(0.125), loss=[count, "mse"])
    rows = (ids, x, np.zeros([ROWS, 1, 1], "f"), y)
    data: dict[str, Any] = {"x": [*rows[:2]], "y": [*rows[2:]], "batch_size": BATCH}
    if os.environ.get("SHARD"):
        sharded = mw.shard(rows, batch_size=BATCH, seed=3, to_batch=lambda b: (b[:2], b[2:]))
        data = {"x": sharded}
    history = strategy.fit(
        model,
        **data,
        epochs=epochs,
        verbose=0,
        callbacks=[Noted(folder)],
        checkpoint=folder / "saved",
        save_every=int(os.environ.get("SAVE_EVERY", 5)),
        peer_copies=int(os.environ.get("PEER_COPIES", 0)),
    )
    if jax.process_index() == 0:
        visits = np.asarray(model.get_layer("visits").embeddings).ravel() / PER_VISIT
        weights = [np.asarray(w).ravel().tolist() for w in model.get_weights()[1:]]
        losses = next(v for k, v in history.history.items() if k.startswith("dense"))
        results = {"visits": visits.tolist(), "weights": weights, "losses": losses}
        (folder / "result.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
