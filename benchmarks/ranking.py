"""Does the estimate rank layouts as well as a second measurement does?

One small Transformer is laid out in sixteen ways over eight virtual CPU devices. Each layout's
step is estimated before anything runs, from the compiled program and the numbers that
``calibrate`` found and wrote to a file; then all are run, in turn, in two passes. A run is recorded
beside those before it.

    python benchmarks/ranking.py                      # calibrates first
    python benchmarks/ranking.py HARDWARE.toml        # made by calibrate() if it is not there
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import report
from quiet import Quiet, Sides

import meshwright as mw
from meshwright.planning import compile_ahead
from meshwright.planning.estimate import estimate
from meshwright.targets.calibrate import calibrate
from meshwright.targets.hardware import Hardware, load_hardware

BLOCKS, WIDTH, HIDDEN, HEADS, VOCAB, LENGTH, ROWS = 2, 256, 1024, 8, 1024, 64, 16
ROUNDS_PER_PASS = 5
RATE = 0.01


@dataclass(frozen=True)
class Way:
    """A way to lay the model out. ``parts`` of it are split over "model"; ``sharded`` splits the
    other dim of each weight over "data" as well (FSDP); ``positions`` is the axis of positions."""

    name: str
    data: int
    model: int
    parts: tuple[str, ...] = ("attention", "ffn", "vocab")
    sharded: bool = False
    positions: bool = False
    remat: bool = False


WAYS = (
    Way("data 8", 8, 1),
    Way("data 8, remat", 8, 1, remat=True),
    Way("data 8, weights split", 8, 1, sharded=True),
    Way("data 4, model 2", 4, 2),
    Way("data 4, model 2, weights split", 4, 2, sharded=True),
    Way("data 4, model 2 in attention", 4, 2, ("attention",)),
    Way("data 4, model 2 in ffn", 4, 2, ("ffn",)),
    Way("data 4, model 2 in vocab", 4, 2, ("vocab",)),
    Way("data 4, positions 2", 4, 2, (), positions=True),
    Way("data 2, model 4", 2, 4),
    Way("data 2, model 4, remat", 2, 4, remat=True),
    Way("data 2, model 4 in attention and ffn", 2, 4, ("attention", "ffn")),
    Way("data 2, model 4 in ffn", 2, 4, ("ffn",)),
    Way("data 2, positions 4", 2, 4, (), positions=True),
    Way("model 8", 1, 8),
    Way("model 8 in ffn", 1, 8, ("ffn",)),
)


# The model: plain JAX


def _dims() -> dict[str, Any]:
    head = WIDTH // HEADS
    block = dict.fromkeys(("query", "key", "value"), (WIDTH, HEADS, head))
    block |= {"mix": (HEADS, head, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    blocks = {f"block_{i}": dict(block) for i in range(BLOCKS)}
    return {"embed": (VOCAB, WIDTH), "head": (WIDTH, VOCAB), **blocks}


def _specs(way: Way) -> dict[str, Any]:
    def axis(part: str) -> str | None:
        return "model" if part in way.parts else None

    other = "data" if way.sharded else None
    attention, ffn, vocab = axis("attention"), axis("ffn"), axis("vocab")
    block = {name: [other, attention, None] for name in ("query", "key", "value")}
    block |= {"mix": [attention, None, other], "up": [other, ffn], "down": [ffn, other]}
    blocks = {f"block_{i}": dict(block) for i in range(BLOCKS)}
    return {"embed": [vocab, other], "head": [other, vocab], **blocks}


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _block(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    h = _normed(x)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, weights[n]) for n in ("query", "key", "value"))
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) * (WIDTH / HEADS) ** -0.5)
    mixed = jnp.einsum("bhts,bshk->bthk", scores, v)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, weights["mix"])
    return x + jax.nn.gelu(_normed(x) @ weights["up"]) @ weights["down"]


def _loss(weights: dict[str, Any], ids: jax.Array, remat: bool) -> jax.Array:
    x = weights["embed"][ids]
    block = jax.checkpoint(_block) if remat else _block
    for i in range(BLOCKS):
        with jax.named_scope(f"block_{i}"):
            x = block(weights[f"block_{i}"], x)
    logits = jax.nn.log_softmax(_normed(x) @ weights["head"])
    return -jnp.mean(jnp.take_along_axis(logits, ids[..., None], -1))


def _step(weights: dict[str, Any], ids: jax.Array, remat: bool) -> tuple[Any, jax.Array]:
    loss, grads = jax.value_and_grad(_loss)(weights, ids, remat)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), loss


def _prepared(way: Way) -> tuple[Any, Any, jax.Array]:
    """The jitted step and its arguments, laid out."""
    mesh = mw.create_mesh({"data": way.data, "model": way.model})
    is_dims = functools.partial(lambda value: isinstance(value, tuple))
    lies = jax.tree.map(
        lambda _, spec: mw.Layout(spec, mesh).sharding, _dims(), _specs(way), is_leaf=is_dims
    )
    keys = iter(jax.random.split(jax.random.key(0), 64))
    weights = jax.tree.map(
        lambda dims: 0.02 * jax.random.normal(next(keys), dims), _dims(), is_leaf=is_dims
    )
    ids = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, VOCAB)
    over = mw.Layout(["data", "model" if way.positions else None], mesh).sharding
    step = jax.jit(
        functools.partial(_step, remat=way.remat), donate_argnums=0, out_shardings=(lies, None)
    )
    return step, jax.device_put(weights, lies), jax.device_put(ids, over)


# Ranks


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""
    return statistics.correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def measure(hardware: Hardware, ways: Sequence[Way] = WAYS) -> dict[str, Any]:
    """Estimate every way, then run every way in two passes of interleaved rounds."""
    prepared = [_prepared(way) for way in ways]
    compiled = [compile_ahead(step, (weights, ids), "cpu:8") for step, weights, ids in prepared]
    found = [estimate(each, hardware) for each in compiled]
    ready = [[step.lower(w, ids).compile(), w, ids] for step, w, ids in prepared]
    quiet, sides, passes = Quiet.wait(), Sides(), []
    for _ in range(2):
        rounds: list[list[float]] = []
        for number in range(ROUNDS_PER_PASS):
            order = list(range(len(ways)))[:: -1 if number % 2 else 1]
            times = {}
            for place in order:
                with sides.runs(ways[place].name):
                    times[place] = _time_s(ready[place])
            rounds.append([times[place] for place in range(len(ways))])
        passes.append([min(times) for times in zip(*rounds, strict=True)])
    both = [min(times) for times in zip(*passes, strict=True)]
    agreement = spearman(*passes)
    predictions = {
        "estimate": [each.step_time_s or 0.0 for each in found],
        "bytes alone": [float(each.bytes) for each in found],
        "FLOPs alone": [each.flops for each in found],
        "compute and memory": [(e.compute_s or 0.0) + (e.memory_s or 0.0) for e in found],
        "communication": [sum(s or 0.0 for _, s in e.communication_s) for e in found],
    }
    return {
        "quiet": quiet.record(sides.cpu_s),
        "machine": report.machine(),
        "hardware": hardware.to_toml(),
        "repeat_to_repeat": agreement,
        "spearman": {name: spearman(values, both) for name, values in predictions.items()},
        "within_2x_of_fastest": sum(time_s <= 2 * min(both) for time_s in both),
        "layouts": [
            {
                "name": way.name,
                "estimated_s": each.step_time_s,
                "passes_s": [passes[0][place], passes[1][place]],
                "flops": each.flops,
                "bytes": each.bytes,
                "communication_s": sum(s or 0.0 for _, s in each.communication_s),
                "bound_by": each.bound_by,
            }
            for place, (way, each) in enumerate(zip(ways, found, strict=True))
        ],
    }


def _time_s(ready: list[Any]) -> float:
    step, weights, ids = ready
    begin = time.perf_counter()
    ready[1], loss = step(weights, ids)
    jax.block_until_ready((ready[1], loss))
    return time.perf_counter() - begin


def hardware_of(path: Path | None) -> Hardware:
    if path is not None and path.exists():
        return load_hardware(path)
    hardware = calibrate("cpu:8")
    if path is not None:
        path.write_text(hardware.to_toml())
    return hardware


def main(path: Path | None) -> None:
    mw.virtual_devices(8)
    found = measure(hardware_of(path))
    print(json.dumps(found, indent=1))
    runs = [*report.saved("ranking"), found]
    report.save("ranking", runs)
    report.write_page()
    print(report.ranking_table(runs[-1:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
