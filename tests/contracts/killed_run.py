"""One training run that is killed and started again, and again, by ``test_checkpoint_kills.py``.

It appends ``STEP LOSS`` per step to its report, which is on the disk before the next step begins,
and ``done HISTORY`` at the end.
"""

from __future__ import annotations

import json
import os
from typing import Any

import meshwright as mw

IMPORTS = ("keras", "orbax.checkpoint", "meshwright.frontends.keras.fitting")  # of every run
BATCHES = 12  # per epoch, and the last is smaller
SAVE_EVERY = 5


def build(strategy: Any) -> Any:
    import keras

    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([8]),
                keras.layers.Dense(16, activation="relu", name="hidden"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(4, name="output"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 50, 0.9)
        model.compile(keras.optimizers.Adam(schedule), loss, metrics=["accuracy"])
    return model


def strategy_on(mesh: str) -> mw.Sharded:
    axes = {axis: int(size) for axis, size in (pair.split("=") for pair in mesh.split(","))}
    layouts = {"hidden.*kernel": [None, "model"], "output.*kernel": ["model", None]}
    return mw.Sharded(mw.create_mesh(axes), layouts if "model" in axes else {})


def train(directory: str | None, report: Any, mesh: str, epochs: int) -> Any:
    import keras
    import numpy as np

    class Report(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            report(f"{self.epoch * BATCHES + batch} {float(logs['loss']).hex()}")

    strategy = strategy_on(mesh)
    model = build(strategy)
    rows = np.random.default_rng(0)
    x = rows.random([BATCHES * 16 - 8, 8], "float32")
    y = rows.integers(0, 4, len(x))
    options = {} if directory is None else {"checkpoint": directory, "save_every": SAVE_EVERY}
    return strategy.fit(
        model,
        x,
        y,
        batch_size=16,
        epochs=epochs,
        verbose=0,
        validation_data=(x[:32], y[:32]),
        callbacks=[Report()],
        **options,
    )


def main(output: str, directory: str, path: str, mesh: str, epochs: str) -> None:
    with open(output, "w") as log:  # noqa: PTH123
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    mw.virtual_devices(8)
    with open(path, "a") as file:  # noqa: PTH123

        def report(line: str) -> None:
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())

        report("begin")
        history = train(directory if directory != "-" else None, report, mesh, int(epochs))
        report(f"done {json.dumps(history.history)}")
