"""A run by one of several processes, for ``test_checkpoint_processes.py``.

``python checkpoint_processes.py ADDRESS INDEX COUNT DIRECTORY EPOCHS STRATEGY [STOP]``: trains on
eight devices in all, four per process if there are two. Prints the history as JSON. With STOP, this
process sends itself SIGTERM after so many batches.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import meshwright as mw


def strategy_of(name: str) -> mw.Sharded:
    split = {"hidden.*kernel": [None, "model"], "output.*kernel": ["model", None]}
    if name == "model":
        return mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), split)
    return mw.Sharded(mw.create_mesh({"batch": 8}), zero=3 if name == "zero3" else 0)


def train(strategy: mw.Sharded, directory: str, epochs: int, stop: int) -> dict[str, list[float]]:
    import keras
    import numpy as np

    keras.utils.set_random_seed(4)
    with strategy.scope():
        hidden = keras.layers.Dense(512, activation="relu", name="hidden")
        layers = [keras.Input([64]), hidden, keras.layers.Dropout(0.2)]
        model = keras.Sequential([*layers, keras.layers.Dense(4, name="output")])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    class Stop(keras.callbacks.Callback):
        left = stop

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    draw = np.random.default_rng(0)
    x, y = draw.random([64, 64], "float32"), draw.integers(0, 4, 64)
    return strategy.fit(
        model,
        x,
        y,
        batch_size=16,
        epochs=epochs,
        verbose=0,
        callbacks=[Stop()],
        checkpoint=directory,
        save_every=3,
        keep=2,
    ).history


def main(address: str, index: str, count: str, directory: str, epochs: str, *rest: str) -> None:
    mw.virtual_devices(8 // int(count))
    import jax

    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, num_processes=int(count), process_id=int(index))
    assert jax.device_count() == 8
    name, *stop = rest
    history = train(strategy_of(name), directory, int(epochs), int(stop[0]) if stop else 0)
    print(json.dumps(history), flush=True)
    if int(count) > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
