"""What comes after the blocks of a pipeline: on the last stage alone, or shared by all stages.

    python benchmarks/shared_losses.py               # about a minute
    python benchmarks/shared_losses.py --words 8192

A Transformer is cut into four stages of virtual devices. Printed are FLOPs of the busiest stage and
bytes of one device, by compiled dry runs, and the median step, both sides in turn in one process.
Writes nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from quiet import Quiet, Sides

import meshwright as mw
from meshwright.stages.deal import Deal

WIDTH, TOKENS, BLOCKS, MICRO_BATCHES, ROWS = 128, 64, 8, 16, 64
WHO = ("the last stage", "all")
SCHEDULES = ("gpipe", "1f1b")


def loss(params: Any, batch: Any) -> Any:
    """Of a small Transformer."""
    x, mask = params["embed"][batch["x"]], jnp.tril(jnp.ones([TOKENS, TOKENS], bool))
    for own in params["blocks"]:
        q, k, v = jnp.split(x @ own["qkv"], 3, axis=-1)
        scores = q @ k.swapaxes(-1, -2) / WIDTH**0.5
        x = x + jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v
        x = x + jnp.tanh(x @ own["up"]) @ own["down"]
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {}


def program_of(words: int) -> tuple[mw.Program, dict[str, np.ndarray]]:
    """The program and a batch."""
    draw = np.random.default_rng(0)

    def made(*dims: int) -> np.ndarray:
        return (draw.normal(size=dims) / dims[0] ** 0.5).astype("float32")

    sizes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {
        "embed": made(words, WIDTH),
        "blocks": [{name: made(*dims) for name, dims in sizes.items()} for _ in range(BLOCKS)],
        "head": made(WIDTH, words),
    }
    batch = {name: draw.integers(0, words, [ROWS, TOKENS]).astype("int32") for name in "xy"}
    return mw.jax_program(loss, params, optax.adam(1e-3), batch=batch), batch


@dataclass
class Side:
    """One way of computing the loss, compiled and ready to run."""

    report: mw.DryRun
    trainer: mw.Trainer
    state: Any
    batch: Any

    @classmethod
    def of(cls, schedule: str, words: int, shares: bool) -> Side:
        program, batch = program_of(words)
        mesh, pipeline = mw.create_mesh({"stage": 4}), mw.Pipeline("stage", MICRO_BATCHES, schedule)
        strategy = mw.Sharded(mesh, batch=None, unmatched="replicate", pipeline=pipeline)
        placement = mw.Placement.of(mesh, batch=None, unmatched="replicate")
        with mock.patch.object(
            Deal, "or_shared", Deal.or_shared if shares else lambda own, *_: own
        ):
            report = mw.dry_run(program, batch, strategy=strategy, target="cpu:4")
            trainer = mw.Trainer(program, placement, mw.StepOptions(pipeline=pipeline))
            side = cls(report, trainer, trainer.init(), trainer.put(batch))
            side.step_s()
        assert report.ticks is not None
        assert report.ticks.shares_loss == shares
        return side

    def step_s(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        self.state, _ = self.trainer.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args()
    mw.virtual_devices(4)
    quiet, clock = Quiet.wait(), Sides()
    print("| schedule | the loss is computed by | GFLOPs | MiB at the peak | step |")
    print("|---|---|---|---|---|")
    for schedule in SCHEDULES:
        sides = [Side.of(schedule, asked.words, shares) for shares in (False, True)]
        named, times = dict(zip(WHO, sides, strict=True)), list[list[float]]()
        for _ in range(asked.steps):
            times.append([])
            for name, side in named.items():
                with clock.runs(f"{schedule}, {name}"):
                    times[-1].append(side.step_s())
        for number, (name, side) in enumerate(named.items()):
            flops, peak = side.report.estimate.flops / 1e9, side.report.peak_bytes / 2**20
            step = f"{statistics.median(row[number] for row in times):.2f} s"
            print(f'| `"{schedule}"` | {name} | {flops:.1f} | {peak:.1f} | {step} |')
    print(f"{os.cpu_count()} cores; {quiet.line(clock.cpu_s)}")


if __name__ == "__main__":
    main()
