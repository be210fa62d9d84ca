"""Asynchronous training against synchronous training: accuracy on digits after equal samples.

    python benchmarks/ps_accuracy.py [path/to/mnist.npz] [--epochs 5]

One device, then two workers in step (one update from two batches), then two and four workers
asynchronously, with the same model, optimizer and batches. What is asked: asynchronous training
reaches at least 0.99 x the accuracy of synchronous training.
"""

from __future__ import annotations

import argparse

import meshwright as mw  # before Keras, whose backend it settles
from meshwright.datasets import mnist
from meshwright.launch.local import LocalCluster
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training import fit

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
    asked = parser.parse_args()
    digits = mnist(*[asked.path] if asked.path else [])
    x, x_test = (
        (part.reshape(-1, 784) / 255).astype("float32") for part in (digits.x_train, digits.x_test)
    )
    y, y_test = (part.astype("int32") for part in (digits.y_train, digits.y_test))
    print(f"Meshwright {mw.__version__}; {digits.origin}; {asked.epochs} epochs of {len(x):,}")

    alone = build()
    alone.fit(x, y, batch_size=BATCH, epochs=asked.epochs, verbose=0)
    found = {"one device": reached(alone, x_test, y_test)}
    for consistency, workers in (("sync", 2), ("async", 2), ("async", 4)):
        model = build()
        cluster = LocalCluster(workers=workers, ps=2, logs=False)
        with cluster, ParameterServer(cluster, consistency=consistency) as strategy:
            fit(strategy, model, x, y, batch_size=BATCH, epochs=asked.epochs, verbose=0)
            stale = ClusterCoordinator(strategy).stats()["staleness"]
        name = f"{consistency}, {workers} workers"
        found[name] = reached(model, x_test, y_test)
        mean = sum(by * count for by, count in stale.items()) / max(1, sum(stale.values()))
        against = " ".join(
            f"{found[name] / found[base]:.4f} x {base};"
            for base in ("one device", "sync, 2 workers")
            if base in found and base != name
        )
        print(f"{name}: accuracy {found[name]:.4f}, mean staleness {mean:.2f}; {against}")
    worst = min(
        found[name] / max(found["one device"], found["sync, 2 workers"])
        for name in found
        if name.startswith("async")
    )
    print(f"one device: accuracy {found['one device']:.4f}")
    print(f"asked: {ASKED}; the worst of the asynchronous ones: {worst:.4f}")


if __name__ == "__main__":
    main()
