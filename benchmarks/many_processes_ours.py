"""One of several processes that train one model: ``python many_processes_ours.py JOB SIDE EPOCHS``.

Started with torchrun's variables, on one core each. Rank 0 prints the seconds of each epoch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

if hasattr(os, "sched_setaffinity"):  # before XLA counts its threads
    os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % (os.cpu_count() or 1)})

if sys.argv[2] == "loopback":
    os.environ["MESHWRIGHT_SHARED_MEMORY"] = "0"

import meshwright as mw

mw.join()

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from many_processes_jobs import JOBS, Job  # noqa: E402

LAYERS = keras.layers


def build(job: Job) -> keras.Model:
    """The job's model, compiled."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(job.input), *map(layer, job.layers)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def layer(said: str) -> keras.layers.Layer:
    """``dense:256:relu``, ``conv:32``, ``pool``, ``flatten``."""
    kind, *rest = said.split(":")
    if kind == "dense":
        return LAYERS.Dense(int(rest[0]), activation=rest[1] if len(rest) > 1 else None)
    if kind == "conv":
        return LAYERS.Conv2D(int(rest[0]), 3, padding="same", activation="relu")
    return LAYERS.MaxPooling2D(2) if kind == "pool" else LAYERS.Flatten()


class Clock(keras.callbacks.Callback):
    """The wall time and CPU time of each epoch, which begins in both processes at once."""

    def __init__(self, other: socket.socket | None = None) -> None:
        super().__init__()
        self.wall_s, self.cpu_s = list[float](), list[float]()
        self._other = other

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if self._other is not None:
            self._other.sendall(b".")
            self._other.recv(1)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.wall_s.append(time.perf_counter() - self._wall)
        self.cpu_s.append(time.process_time() - self._cpu)


def other_process() -> socket.socket:
    """A connection to the other one of two processes that know nothing of each other."""
    address = "127.0.0.1", int(os.environ["MEETING_PORT"])
    if os.environ["LOCAL_RANK"] == "0":
        with socket.create_server(address) as server:
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)


def main(name: str, side: str, epochs: int) -> None:
    """Train, and print what it took."""
    job = JOBS[name]
    sums = mw.GradientSum(fusion_bytes=0) if side == "apart" else None
    mesh = mw.create_mesh({"batch": -1})
    strategy = mw.DataParallel(mesh, sums=sums)
    with strategy.scope():
        model = build(job)
    rows = job.rows_per_process * jax.process_count()
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows * job.steps, *job.input)).astype("float32")
    y = draw.integers(0, 10, rows * job.steps).astype("int32")
    clock = Clock(other_process() if side == "ours side by side" else None)
    history = strategy.fit(
        model, x, y, batch_size=rows, epochs=epochs, verbose=0, callbacks=[clock]
    )
    if jax.process_index() == 0:
        found = {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s, "loss": history.history["loss"][-1]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
