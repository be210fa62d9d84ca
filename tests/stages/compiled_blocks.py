"""Dry runs of a chain of equal blocks in stages, for devices that are not there."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from models import shapes

import meshwright as mw

WIDTH, HIDDEN, TOKENS = 256, 512, 256


def loss(params: Any, batch: Any) -> Any:
    x = params["first"][batch]
    for weights in params["blocks"]:
        x = x + jnp.tanh(x @ weights["up"]) @ weights["down"]
    return jnp.mean((x @ params["last"]) ** 2)


def report(
    mesh: dict[str, int],
    schedule: Any,
    micro_batches: int,
    target: str,
    layouts: Any = None,
    compile: bool = True,
    sizes: tuple[int, int, int] = (WIDTH, HIDDEN, TOKENS),
    rows_each: int = 8,
    repeats: int = 1,
    remat_stages: bool | None = None,
) -> mw.DryRun:
    """A dry run of eight blocks with ``rows_each`` rows in every micro-batch of a device."""
    width, hidden, tokens = sizes
    block = {"up": shapes(width, hidden), "down": shapes(hidden, width)}
    params = {
        "first": shapes(width, width),
        "blocks": [dict(block) for _ in range(8)],
        "last": shapes(width, width),
    }
    rows = rows_each * mesh["data"] * micro_batches
    strategy = mw.Sharded(
        mw.Mesh(mesh),
        layouts,
        batch="data",
        unmatched="replicate",
        pipeline=mw.Pipeline("stage", micro_batches, schedule, repeats, remat_stages),
    )
    batch = shapes(rows, tokens, dtype="int32")
    program = mw.jax_program(loss, params, optax.adam(1e-3))
    return mw.dry_run(
        program, batch, strategy=strategy, target=target, blocks="whole", compile=compile
    )
