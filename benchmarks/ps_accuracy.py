"""Asynchronous training against synchronous training: accuracy on digits after equal samples.

    python benchmarks/ps_accuracy.py [path/to/mnist.npz] [--epochs 5]

One device, then two workers in step (one update from two batches), then two and four workers
asynchronously, with the same model, optimizer and batches. What is asked: asynchronous training
reaches at least 0.99 x the accuracy of synchronous training. Writes
``benchmarks/results/ps_accuracy.json``, but not with ``--dry``.
"""

from __future__ import annotations

import argparse
from typing import Any

import report

import meshwright as mw  # before Keras, whose backend it settles
from meshwright.data.datasets import mnist
from meshwright.launch.local import LocalCluster
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.strategy import ParameterServer

# isort: split
import keras
import numpy as np

BATCH = 128
ASKED = 0.99


def build() -> keras.Model:
    """The MLP 784-128-10."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([784]),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
    return model


def reached(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """The accuracy of a model."""
    return float(model.evaluate(x, y, batch_size=500, verbose=0, return_dict=True)["accuracy"])


def main() -> None:
    """Train each way, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="write no results")
    asked = parser.parse_args()
    digits = mnist(*[asked.path] if asked.path else [])
    x, x_test = (
        (part.reshape(-1, 784) / 255).astype("float32") for part in (digits.x_train, digits.x_test)
    )
    y, y_test = (part.astype("int32") for part in (digits.y_train, digits.y_test))
    print(f"Meshwright {mw.__version__}; {digits.origin}; {asked.epochs} epochs of {len(x):,}")

    alone = build()
    alone.fit(x, y, batch_size=BATCH, epochs=asked.epochs, verbose=0)
    rows = [row("one device", reached(alone, x_test, y_test))]
    for consistency, workers in (("sync", 2), ("async", 2), ("async", 4)):
        model = build()
        cluster = LocalCluster(workers=workers, ps=2, logs=False)
        with cluster, ParameterServer(cluster, consistency=consistency) as strategy:
            strategy.fit(model, x, y, batch_size=BATCH, epochs=asked.epochs, verbose=0)
            stale = ClusterCoordinator(strategy).stats()["staleness"]
        mean = sum(by * count for by, count in stale.items()) / max(1, sum(stale.values()))
        name = f"{consistency}, {workers} workers"
        rows.append(row(name, reached(model, x_test, y_test), mean))
    best = max(each["accuracy"] for each in rows if not each["says"].startswith("async"))
    for each in rows:
        each |= {
            "rows": len(x),
            "epochs": asked.epochs,
            "over_synchronous": each["accuracy"] / best,
        }
    print(report.accuracy_table(rows))
    if not asked.dry:
        report.save("ps_accuracy", rows)
        report.write_page()


def row(says: str, accuracy: float, staleness: float | None = None) -> dict[str, Any]:
    """What is kept of one way of training; ``staleness`` is the mean of its updates."""
    asynchronous = says.startswith("async")
    return {
        "says": says,
        "accuracy": accuracy,
        "staleness": staleness,
        "at_least": ASKED if asynchronous else None,
        "machine": report.machine(),
    }


if __name__ == "__main__":
    main()
