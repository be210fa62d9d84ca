"""What logs or the loss read of equal blocks: numbers of any type that they make, and weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw

BLOCKS, WIDTH = 4, 8
ROWS = np.random.default_rng(1).normal(size=[16, WIDTH]).astype("float32")


def net(params: Any, batch: Any) -> tuple[Any, Any]:
    h, made = batch, list[Any]()
    for weights in params["blocks"]:
        a = jnp.tanh(h @ weights)
        count = (a > 0.2).sum()
        bits = count.astype("uint32") * np.uint32(0xFEDCBA97)
        made.append([count, count * -70_001_234, bits, (a > 0.9).any()])
        h = h + a
    count, place, bits, is_any = map(jnp.stack, zip(*made, strict=True))
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    loss = jnp.mean((h @ params["head"]) ** 2) * (1 + count.sum() / 100) + squares / 100
    # The digits apart, since a float holds no 32 bits.
    logs = {"place": place & 255, "above": place >> 8, "bits": bits & 0xFFF, "high": bits >> 20}
    return loss, {
        "count": count[1],
        "any": is_any,
        "rows": batch.shape[0],
        "squares": squares,
        **logs,
    }


def program() -> mw.Program:
    draw = np.random.default_rng(0)
    blocks = [draw.normal(size=[WIDTH, WIDTH]).astype("float32") / 3 for _ in range(BLOCKS)]
    params = {"blocks": blocks, "head": draw.normal(size=[WIDTH, 2]).astype("float32")}
    return mw.jax_program(net, params, optax.sgd(0.1), batch=ROWS)


def one_step(axes: dict[str, int], batch: Any, zero: int = 0, **how: Any) -> tuple[Any, Any]:
    mesh = mw.create_mesh(axes, devices=jax.devices()[: np.prod(list(axes.values()))])
    layouts = {"blocks/.*": [None, "model"]} if "model" in axes else {}
    placement = mw.Placement.of(mesh, layouts, batch="data", zero=zero, unmatched="replicate")
    trainer = mw.Trainer(program(), placement, mw.StepOptions(**how))
    state, logs = trainer.step(trainer.init(), trainer.put(batch))
    return trainer.unpadded(state).params, logs


@pytest.mark.parametrize(
    ("pipeline", "axes", "zero"),
    [
        (mw.Pipeline("stage", 4), {"stage": 2, "data": 1, "model": 2}, 0),
        (mw.Pipeline("stage", 4, "zero_bubble"), {"stage": 2, "data": 2}, 1),
        (mw.Pipeline("stage", 4, "circular", repeats=2), {"stage": 2, "data": 1}, 0),
    ],
    ids=["1f1b beside a model axis", "zero bubble", "circular"],
)
def test_logs_and_the_loss_read_what_is_of_each_block(
    pipeline: mw.Pipeline, axes: dict[str, int], zero: int
) -> None:
    params, logs = one_step(axes, ROWS, zero, pipeline=pipeline)
    micros = tuple(np.split(ROWS, 4))
    expected_params, expected = one_step({"data": 1}, micros, accumulate=4)
    for path, value in expected_params.items():
        np.testing.assert_allclose(params[path], value, rtol=2e-6, atol=2e-6, err_msg=path)
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=2e-6, err_msg=name)
