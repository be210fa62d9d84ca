"""Our side of the parameter-server jobs: the same steps under ``mw.ParameterServer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ps_protocol as jobs
from ps_protocol import job_from_arguments, measure

import meshwright as mw

Run = tuple[Callable[[int], None], Callable[[], float]]  # runs so many steps; the check


def main() -> None:
    job = job_from_arguments(__doc__)
    with mw.LocalCluster(workers=jobs.WORKERS, ps=jobs.SERVERS) as cluster:
        strategy = mw.ParameterServer(
            cluster, partitioner=mw.MinSizePartitioner(256 << 10, max_shards=jobs.SERVERS)
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
            keras.Input([jobs.INPUTS]),
            keras.layers.Dense(jobs.HIDDEN, activation="relu"),
            keras.layers.Dense(jobs.CLASSES),
        ]
    )
    rng = np.random.default_rng(0)
    hidden, output = (
        rng.normal(0, 0.05, size)
        for size in ((jobs.INPUTS, jobs.HIDDEN), (jobs.HIDDEN, jobs.CLASSES))
    )
    model.set_weights([hidden, np.zeros(jobs.HIDDEN), output, np.zeros(jobs.CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(jobs.LEARNING_RATE), loss)
    last: dict[str, float] = {}

    def dataset(context: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        x = (
            np.random.default_rng(1)
            .normal(size=(jobs.BATCH_SIZE * 8, jobs.INPUTS))
            .astype(np.float32)
        )
        y = x[:, : jobs.CLASSES].argmax(1)
        while True:
            for start in range(0, len(x), jobs.BATCH_SIZE):
                yield x[start : start + jobs.BATCH_SIZE], y[start : start + jobs.BATCH_SIZE]

    def run(steps: int) -> None:
        history = strategy.fit(model, dataset, epochs=1, steps_per_epoch=steps, verbose=0)
        last["loss"] = history.history["loss"][-1]

    return run, lambda: last["loss"]


def embedding(strategy: mw.ParameterServer) -> Run:
    table = strategy.variable("zeros", shape=(jobs.ROWS, jobs.WIDTH))
    ids = np.random.default_rng(1).integers(0, jobs.ROWS, (64, jobs.LOOKUPS))

    def step(number: int) -> float:
        asked = ids[number % len(ids)]
        missed = table.lookup(asked) - 1.0
        table.rows_add(asked, missed * (-2 * jobs.LEARNING_RATE / missed.size))
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
