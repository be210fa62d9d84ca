"""One of the processes that train a GPT, as stages or not: ``python pipelines_ours.py SIDE STEPS``.

Started with torchrun's variables, on one core each. Rank 0 prints the seconds of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time

if hasattr(os, "sched_setaffinity"):  # before XLA counts its threads
    os.sched_setaffinity(0, {int(os.environ["RANK"]) % (os.cpu_count() or 1)})

import meshwright as mw

mw.join()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pipelines_jobs as jobs  # noqa: E402

SCHEDULES = {  # side -> schedule, and whether stages compute again
    "gpipe": ("gpipe", False),
    "1f1b": ("1f1b", False),
    "1f1b, recomputed": ("1f1b", True),
    "zero_bubble": ("zero_bubble", False),
}


def params() -> dict[str, object]:
    """The weights at the start."""
    draw = np.random.default_rng(0)

    def made(*dims: int) -> np.ndarray:
        return (draw.normal(size=dims) / np.sqrt(dims[0])).astype("float32")

    blocks = [
        {
            "norm": [np.ones(jobs.WIDTH, "float32"), np.ones(jobs.WIDTH, "float32")],
            "qkv": made(jobs.WIDTH, 3 * jobs.WIDTH),
            "out": made(jobs.WIDTH, jobs.WIDTH),
            "up": made(jobs.WIDTH, 4 * jobs.WIDTH),
            "down": made(4 * jobs.WIDTH, jobs.WIDTH),
        }
        for _ in range(jobs.BLOCKS)
    ]
    return {
        "embed": made(jobs.WORDS, jobs.WIDTH),
        "blocks": blocks,
        "head": made(jobs.WIDTH, jobs.WORDS),
    }


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Without mean and bias, as RMSNorm."""
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(weights: dict, x: jax.Array) -> jax.Array:
    """Attention and two products, each on normed values and added."""
    rows = x.shape[0]
    qkv = (normed(x, weights["norm"][0]) @ weights["qkv"]).reshape(
        rows, jobs.TOKENS, 3, jobs.HEADS, -1
    )
    attended = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
    x = x + attended.reshape(x.shape) @ weights["out"]
    hidden = jax.nn.relu(normed(x, weights["norm"][1]) @ weights["up"])
    return x + hidden @ weights["down"]


def loss(params: dict, batch: dict) -> jax.Array:
    """Of the next token."""
    x = params["embed"][batch["x"]]
    for weights in params["blocks"]:
        x = block(weights, x)
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def main(side: str, steps: int) -> None:
    """Train, and print what it took."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, jobs.WORDS, (jobs.ROWS, jobs.TOKENS)).astype("int32")
    batch = {"x": x, "y": np.roll(x, -1, 1)}
    program = mw.jax_program(loss, params(), optax.sgd(jobs.LEARNING_RATE), batch=batch)
    take = 1
    if side in SCHEDULES:
        schedule, recompute = SCHEDULES[side]
        pipeline = mw.Pipeline("stage", jobs.MICRO_BATCHES, schedule, remat_stages=recompute)
        placement = mw.Placement.of(mw.create_mesh({"stage": jobs.STAGES}), batch=None)
        how = mw.StepOptions(pipeline=pipeline)
    else:  # "one device" takes micro-batch after micro-batch, "data" all rows at once
        placement = mw.Placement.of(mw.create_mesh({"data": -1}), batch="data")
        take = jobs.MICRO_BATCHES if side == "one device" else 1
        how = mw.StepOptions(accumulate=take)
    trainer = mw.Trainer(program, placement, how)
    state, loss_of_step = trainer.init(), 0.0
    micro = jobs.ROWS // take
    parts = [
        trainer.put({name: rows[at : at + micro] for name, rows in batch.items()})
        for at in range(0, jobs.ROWS, micro)
    ]
    taken = parts[0] if take == 1 else tuple(parts)
    wall_s, cpu_s = [], []
    for _ in range(steps):
        began, began_cpu = time.perf_counter(), time.process_time()
        state, logs = trainer.step(state, taken)
        loss_of_step = float(logs["loss"])  # there once the step has ended
        wall_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - began_cpu)
    if jax.process_index() == 0:
        print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "loss": loss_of_step}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
