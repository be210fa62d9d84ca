"""The peer: the loop that someone who knows JAX well writes by hand for this one job.

Plain functions over a dictionary of arrays, Keras' Adam, the metrics in the donated state, one
``jax.jit`` step, no wait before the end of an epoch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from digits import initial_weights, load, orders
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from protocol import Clock, eight_jax_devices, job_from_arguments, report
from settings import Job

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7  # of Keras' Adam
Arrays = dict[str, Any]


def dense(p: Arrays, layer: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{layer}/kernel"] + p[f"{layer}/bias"]


def conv(p: Arrays, layer: str, x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        x, p[f"{layer}/kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y + p[f"{layer}/bias"])


def pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mlp(p: Arrays, x: jax.Array) -> jax.Array:
    return dense(p, "output", jax.nn.relu(dense(p, "hidden", x)))


def convolutional(p: Arrays, x: jax.Array) -> jax.Array:
    x = pool(conv(p, "conv_a", x))
    x = pool(conv(p, "conv_b", x))
    x = conv(p, "conv_c", x)
    return mlp(p, x.reshape(len(x), -1))


FORWARD = {"mlp": mlp, "convolutional": convolutional}


def loss_and_logits(network: Any, p: Arrays, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    logits = network(p, x)
    hot = jax.nn.one_hot(y, logits.shape[-1])
    return -jnp.mean(jnp.sum(hot * jax.nn.log_softmax(logits), axis=-1)), logits


def adam(p: Arrays, slots: Any, gradients: Arrays, rate: float) -> tuple[Arrays, Any]:
    step = slots["step"] + 1
    t = step.astype(jnp.float32)
    alpha = rate * jnp.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
    m = jax.tree.map(lambda m, g: m + (g - m) * (1 - BETA_1), slots["m"], gradients)
    v = jax.tree.map(lambda v, g: v + (g * g - v) * (1 - BETA_2), slots["v"], gradients)
    p = jax.tree.map(lambda p, m, v: p - m * alpha / (jnp.sqrt(v) + EPSILON), p, m, v)
    return p, {"m": m, "v": v, "step": step}


def train_step(network: Any, rate: float, state: Arrays, x: jax.Array, y: jax.Array) -> Arrays:
    p, metrics = state["p"], state["metrics"]
    gradient = jax.value_and_grad(partial(loss_and_logits, network), has_aux=True)
    (loss, logits), gradients = gradient(p, x, y)
    p, slots = adam(p, state["slots"], gradients, rate)
    right = jnp.sum(jnp.argmax(logits, axis=-1) == y)
    metrics = {
        "loss": metrics["loss"] + loss * len(y),
        "right": metrics["right"] + right,
        "count": metrics["count"] + len(y),
    }
    return {"p": p, "slots": slots, "metrics": metrics}


def zero_metrics(whole: NamedSharding) -> Arrays:
    return jax.device_put(dict.fromkeys(("loss", "right", "count"), np.float32(0)), whole)


def initial_state(job: Job, mesh: Any) -> Arrays:
    whole = NamedSharding(mesh, P())
    specs = dict(job.layouts)
    layouts = {path: NamedSharding(mesh, P(*specs.get(path, ()))) for path in initial_weights(job)}
    zeros = {path: np.zeros_like(value) for path, value in initial_weights(job).items()}
    slots = {
        "m": jax.device_put(zeros, layouts),
        "v": jax.device_put(zeros, layouts),
        "step": jax.device_put(np.int32(0), whole),
    }
    p = jax.device_put(initial_weights(job), layouts)
    return {"p": p, "slots": slots, "metrics": zero_metrics(whole)}


def main() -> None:
    job = job_from_arguments(__doc__)
    eight_jax_devices()
    names, sizes = zip(*job.mesh, strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    by_batch, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    state = initial_state(job, mesh)
    layouts = jax.tree.map(lambda array: array.sharding, state)
    step = jax.jit(
        partial(train_step, FORWARD[job.network], job.learning_rate),
        donate_argnums=0,
        out_shardings=layouts,
    )

    x, y = load(job)
    clock = Clock()
    clock.mark()
    totals: dict[str, float] = {}
    for order in orders(job):
        state["metrics"] = zero_metrics(whole)
        for rows in order.reshape(job.steps_per_epoch, job.batch_size):
            state = step(state, *jax.device_put((x[rows], y[rows]), by_batch))
        totals = {name: float(value) for name, value in state["metrics"].items()}
        clock.mark()
    report(
        "hand_written",
        job,
        clock,
        loss=totals["loss"] / totals["count"],
        accuracy=totals["right"] / totals["count"],
        versions={"jax": jax.__version__},
    )


if __name__ == "__main__":
    main()
