"""Our side of the parameter-server jobs: the same steps under ``mw.ParameterServer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ps_protocol import (
    BATCH_SIZE,
    CLASSES,
    HIDDEN,
    INPUTS,
    LEARNING_RATE,
    LOOKUPS,
    ROWS,
    SERVERS,
    WIDTH,
    WORKERS,
    job_from_arguments,
    measure,
)

import meshwright as mw

Run = tuple[Callable[[int], None], Callable[[], float]]  # runs so many steps; the check


def main() -> None:
    job = job_from_arguments(__doc__)
    with mw.LocalCluster(workers=WORKERS, ps=SERVERS) as cluster:
        strategy = mw.ParameterServer(
            cluster, partitioner=mw.MinSizePartitioner(256 << 10, max_shards=SERVERS)
        )
        run, check = {"counter": counter, "mlp": mlp, "embedding": embedding}[job.name](strategy)
        pids = [cluster.pid(task) for task in cluster.tasks]
        measure("ours", job, run, lambda: pids, check)


def counter(strategy: mw.ParameterServer) -> Run:
    total = strategy.variable(0.0)

    def step() -> None:
        total.assign_add(1.0)

    return scheduling(strategy, step), lambda: float(total.read())


def mlp(strategy: mw.ParameterServer) -> Run:
    import keras

    model = keras.Sequential(
        [
            keras.Input([INPUTS]),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )
    rng = np.random.default_rng(0)
    hidden, output = (rng.normal(0, 0.05, size) for size in ((INPUTS, HIDDEN), (HIDDEN, CLASSES)))
    model.set_weights([hidden, np.zeros(HIDDEN), output, np.zeros(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss)
    last: dict[str, float] = {}

    def dataset(context: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        x = np.random.default_rng(1).normal(size=(BATCH_SIZE * 8, INPUTS)).astype(np.float32)
        y = x[:, :CLASSES].argmax(1)
        while True:
            for start in range(0, len(x), BATCH_SIZE):
                yield x[start : start + BATCH_SIZE], y[start : start + BATCH_SIZE]

    def run(steps: int) -> None:
        history = strategy.fit(model, dataset, epochs=1, steps_per_epoch=steps, verbose=0)
        last["loss"] = history.history["loss"][-1]

    return run, lambda: last["loss"]


def embedding(strategy: mw.ParameterServer) -> Run:
    table = strategy.variable("zeros", shape=(ROWS, WIDTH))
    ids = np.random.default_rng(1).integers(0, ROWS, (64, LOOKUPS))

    def step(number: int) -> float:
        asked = ids[number % len(ids)]
        missed = table.lookup(asked) - 1.0
        table.rows_add(asked, missed * (-2 * LEARNING_RATE / missed.size))
        return float(np.mean(np.square(missed)))

    last: dict[str, Any] = {}
    coordinator = mw.ClusterCoordinator(strategy)

    def run(steps: int) -> None:
        for number in range(steps):
            last["loss"] = coordinator.schedule(step, args=(number,))
        coordinator.join()

    return run, lambda: last["loss"].fetch()


def scheduling(strategy: mw.ParameterServer, step: Callable[[], None]) -> Callable[[int], None]:
    coordinator = mw.ClusterCoordinator(strategy)

    def run(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()

    return run


if __name__ == "__main__":
    main()
