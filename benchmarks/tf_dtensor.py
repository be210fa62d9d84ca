"""The peer: TensorFlow DTensor with tf_keras, as its tutorial trains digits.

A compiled train step, DTensor's own optimizer and metrics, on eight logical CPU devices, each
batch packed from NumPy. Of the settings tried (see ``README.md``) these are the fastest.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras
from digits import initial_weights, input_shape, load, orders
from protocol import Clock, read_arguments, report
from settings import DEVICES, SEED, Job

dtensor: Any = tf.experimental.dtensor

# Left alone, DTensor joins the all-reduces of several gradients, and Keras' optimizers then read
# slots of the step before. With groups of one the values are right.
COMBINE = "DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE"

INTRA_OP_THREADS = 1  # eight devices keep the cores busy: more threads cost a fifth of the speed


def build_model(job: Job, mesh: Any) -> Any:
    layers = tf_keras.layers
    layout_map = tf_keras.dtensor.experimental.LayoutMap(mesh)
    for path, spec in job.layouts:
        entries = [dtensor.UNSHARDED if axis is None else axis for axis in spec]
        layout_map[path.replace("/", ".")] = dtensor.Layout(entries, mesh)
    with layout_map.scope():
        model = tf_keras.Sequential(
            [
                layers.Input(input_shape(job)),
                layers.Dense(128, activation="relu", name="hidden"),
                layers.Dense(10, name="output"),
            ]
        )
    model.set_weights(list(initial_weights(job).values()))
    return model


def make_train_step(model: Any, optimizer: Any, accuracy: Any) -> Any:
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf_keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        return loss

    return tf.function(train_step)


def make_packer(job: Job, mesh: Any) -> Any:
    """NumPy batch -> DTensor laid out over ``batch``, one piece for each device of the mesh."""
    shards = dict(job.mesh)["batch"]
    copies = DEVICES // shards
    layouts = {rank: dtensor.Layout.batch_sharded(mesh, "batch", rank=rank) for rank in (1, 2)}

    def pack(batch: np.ndarray) -> Any:
        pieces = [piece for piece in np.split(batch, shards) for _ in range(copies)]
        return dtensor.pack(pieces, layouts[batch.ndim])

    return pack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--right", action="store_true", help=f"set {COMBINE}=1")
    job, given = read_arguments(parser)
    if job.network != "mlp":
        parser.error(f"{job.name}: the tutorial trains the MLP, and so does this script.")
    if given.right:
        os.environ[COMBINE] = "1"
    tf.config.threading.set_intra_op_parallelism_threads(INTRA_OP_THREADS)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
    )
    tf_keras.backend.experimental.enable_tf_random_generator()
    tf_keras.utils.set_random_seed(SEED)
    mesh = dtensor.create_mesh(list(job.mesh), devices=[f"CPU:{i}" for i in range(DEVICES)])

    model = build_model(job, mesh)
    optimizer = tf_keras.dtensor.experimental.optimizers.Adam(job.learning_rate, mesh=mesh)
    accuracy = tf_keras.metrics.SparseCategoricalAccuracy(mesh=mesh)
    train_step = make_train_step(model, optimizer, accuracy)
    pack = make_packer(job, mesh)

    x, y = load(job)
    clock = Clock()
    clock.mark()
    loss = correct = 0.0
    for order in orders(job):
        accuracy.reset_state()
        losses = [
            train_step(pack(x[rows]), pack(y[rows]))
            for rows in order.reshape(job.steps_per_epoch, job.batch_size)
        ]
        # Cheaper for the rival than a Mean metric on the mesh: that costs every step 5 %.
        loss, correct = float(np.mean([float(each) for each in losses])), float(accuracy.result())
        clock.mark()
    report(
        "tf_dtensor_right" if given.right else "tf_dtensor",
        job,
        clock,
        loss=loss,
        accuracy=correct,
        versions={"tensorflow": tf.__version__, "tf_keras": tf_keras.__version__},
    )


if __name__ == "__main__":
    main()
