"""One process of a group of two, for ``test_agreement.py``; both are alike but for one thing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

import meshwright as mw
from meshwright.launch import join

IMPORTS = ["keras", "optax", "orbax.checkpoint", "meshwright.frontends.keras", "grain"]
SAME: dict[str, Any] = {
    "activation": "relu",
    "bends": "relu",  # which of Keras' functions an activation of the same name calls
    "seed": 3,
    "data": 0,
    "processes": 2,
    "mesh": {"batch": 4},
    "batch_size": 8,
    "rows": 64,
    "zero": 0,
    "learning_rate": 0.01,
    "width": 16,
    "epochs": 2,
    "devices": 2,
    "checkpoint": None,
    "order": None,  # of the batches that a generator yields; None: arrays
    "evaluates": None,  # with this batch size, after training
    "agree": "1",
}


def main(rank: int, address: str, folder: str, changed: Mapping[str, Any]) -> None:
    """Join, train, and write down what was raised, and when."""
    how, report = {**SAME, **changed}, Path(folder) / f"rank{rank}.json"
    with Path(folder, f"rank{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    error = None
    arrivals_s = [time.time()]
    try:
        os.environ["MESHWRIGHT_AGREE"] = how["agree"]
        mw.virtual_devices(how["devices"])
        versions = how.get("versions", {})
        if versions:
            real = join._version
            join._version = lambda package: versions.get(package) or real(package)
        mw.join(how.get("rank", rank), how["processes"], address, wait_s=how.get("wait_s", 60))
        train(how, arrivals_s)
    except Exception as raised:
        error = raised
    report.write_text(json.dumps([type(error).__name__, str(error), arrivals_s[-1], time.time()]))
    while not all((Path(folder) / f"rank{r}.json").exists() for r in range(how["waits_for"])):
        time.sleep(0.02)  # a process of JAX's that is gone would end the other
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)


def train(how: Mapping[str, Any], arrivals_s: list[float]) -> None:
    keras.utils.set_random_seed(how["seed"])
    strategy = mw.Sharded(mw.create_mesh(how["mesh"]), zero=how["zero"])
    arrivals_s.append(time.time())

    def bent(values: Any) -> Any:
        return getattr(keras.ops, how["bends"])(values)

    with strategy.scope():
        first = keras.layers.Dense(how["width"], how["activation"])
        layers = [first, keras.layers.Activation(bent), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input([8]), *layers])
        optimizer = keras.optimizers.SGD(how["learning_rate"])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    draw = np.random.default_rng(how["data"])
    x, y = draw.random([how["rows"], 8], "float32"), draw.integers(0, 4, how["rows"])
    arrivals_s.append(time.time())
    options = {"checkpoint": how["checkpoint"]} if how["checkpoint"] else {}
    data: dict[str, Any] = {"x": x, "y": y, "batch_size": how["batch_size"]}
    if how["order"]:
        batches = ((x[i : i + 8], y[i : i + 8]) for i in how["order"])
        data = {"x": batches, "steps_per_epoch": 1}
    strategy.fit(model, **data, epochs=how["epochs"], verbose=0, **options)
    if how["evaluates"]:
        arrivals_s.append(time.time())
        strategy.evaluate(model, x, y, batch_size=how["evaluates"], verbose=0)
