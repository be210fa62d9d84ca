"""The peer: TensorFlow's ParameterServerStrategy and ClusterCoordinator, as in its guide.

Two workers, two parameter servers, each a process of its own, and this one as the coordinator.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import numpy as np
import ps_protocol as jobs
import tensorflow as tf
from ps_protocol import PsJob, job_from_arguments, measure

Scheduled = tuple[Callable[[], None], Callable[[], float]]  # schedules one step; the check


def main() -> None:
    if "TF_CONFIG" in os.environ:
        serve()
    job = job_from_arguments(__doc__)
    spec = {"worker": addresses(jobs.WORKERS), "ps": addresses(jobs.SERVERS), "chief": addresses(1)}
    tasks = [start(spec, kind, n) for kind in ("worker", "ps") for n in range(len(spec[kind]))]
    try:
        measure_here(job, spec, [task.pid for task in tasks])
    finally:
        for task in tasks:
            task.kill()


def addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return found


def start(spec: dict[str, list[str]], kind: str, index: int) -> subprocess.Popen[bytes]:
    config = json.dumps({"cluster": spec, "task": {"type": kind, "index": index}})
    command = [sys.executable, __file__]
    return subprocess.Popen(command, env={**os.environ, "TF_CONFIG": config})


def serve() -> None:
    found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    options = tf.compat.v1.ConfigProto()
    options.inter_op_parallelism_threads = 4  # with fewer a server of two cores can hang
    server = tf.distribute.Server(
        found.cluster_spec(),
        job_name=found.task_type,
        task_index=found.task_id,
        protocol="grpc",
        config=options,
    )
    server.join()


def measure_here(job: PsJob, spec: dict[str, list[str]], pids: list[int]) -> None:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(
        resolver,
        variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=256 << 10, max_shards=jobs.SERVERS
        ),
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    schedule, check = {"counter": counter, "mlp": mlp, "embedding": embedding}[job.name](
        strategy, coordinator
    )

    def run(steps: int) -> None:
        for _ in range(steps):
            schedule()
        coordinator.join()

    measure("tensorflow", job, run, lambda: pids, check)


def counter(strategy: Any, coordinator: Any) -> Scheduled:
    with strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def step() -> None:
        total.assign_add(1.0)

    return lambda: coordinator.schedule(step), lambda: float(total.read_value())


def mlp(strategy: Any, coordinator: Any) -> Scheduled:
    rng = np.random.default_rng(0)
    with strategy.scope():
        hidden = tf.Variable(rng.normal(0, 0.05, (jobs.INPUTS, jobs.HIDDEN)).astype(np.float32))
        hidden_bias = tf.Variable(tf.zeros(jobs.HIDDEN))
        output = tf.Variable(rng.normal(0, 0.05, (jobs.HIDDEN, jobs.CLASSES)).astype(np.float32))
        output_bias = tf.Variable(tf.zeros(jobs.CLASSES))
    last = {}

    def dataset() -> Any:
        made = np.random.default_rng(1)
        x = made.normal(size=(jobs.BATCH_SIZE * 8, jobs.INPUTS)).astype(np.float32)
        y = x[:, : jobs.CLASSES].argmax(1)
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(jobs.BATCH_SIZE)

    # A sharded variable answers to one gradient for each of its parts.
    pieces = list(getattr(hidden, "variables", [hidden]))

    @tf.function
    def step(iterator: Any) -> Any:
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            kernel = tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]
            logits = tf.nn.relu(x @ kernel + hidden_bias) @ output + output_bias
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            )
        trained = [*pieces, hidden_bias, output, output_bias]
        for variable, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            variable.assign_sub(jobs.LEARNING_RATE * gradient)
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def schedule() -> None:
        last["loss"] = coordinator.schedule(step, args=(iterator,))

    return schedule, lambda: float(last["loss"].fetch())


def embedding(strategy: Any, coordinator: Any) -> Scheduled:
    with strategy.scope():
        table = tf.Variable(tf.zeros((jobs.ROWS, jobs.WIDTH)))
    last = {}
    pieces = list(table.variables)

    def dataset() -> Any:
        ids = np.random.default_rng(1).integers(0, jobs.ROWS, (64, jobs.LOOKUPS))
        return tf.data.Dataset.from_tensor_slices(ids).repeat()

    @tf.function
    def step(iterator: Any) -> Any:
        ids = next(iterator)
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, ids)
            loss = tf.reduce_mean(tf.square(rows - 1.0))
        for variable, gradient in zip(pieces, tape.gradient(loss, pieces), strict=True):
            variable.scatter_sub(
                tf.IndexedSlices(jobs.LEARNING_RATE * gradient.values, gradient.indices)
            )
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def schedule() -> None:
        last["loss"] = coordinator.schedule(step, args=(iterator,))

    return schedule, lambda: float(last["loss"].fetch())


if __name__ == "__main__":
    main()
