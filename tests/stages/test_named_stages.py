"""A program over named dims in stages: the rule of the stages' axis says what they split."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from small_transformer import KEEPS_GRADIENTS

import meshwright as mw
import meshwright.named as mn

ROWS, TOLERANCE = 16, 5e-6  # of the largest gradient


def program() -> mw.Program:
    draw = np.random.default_rng(0)

    def weight(dims: str, *sizes: int) -> Any:
        return mn.named((0.5 * draw.normal(size=sizes)).astype("float32"), dims)

    def init() -> Any:
        blocks = [
            {"up": weight("width:8 hidden:16", 8, 16), "down": weight("hidden:16 width:8", 16, 8)}
            for _ in range(4)
        ]
        return {"first": weight("io:4 width:8", 4, 8), "blocks": blocks}

    def loss(params: Any, batch: Any) -> Any:
        x = mn.einsum([batch["x"], params["first"]])
        for block in params["blocks"]:
            hidden = mn.tanh(mn.einsum([x, block["up"]]))
            x = x + mn.einsum([hidden, block["down"]])
        return mn.reduce_mean(mn.square(x))

    batch = {"x": "batch io"}
    return mw.named_program(loss, init, KEEPS_GRADIENTS, batch=batch, example=example())


def example() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=[ROWS, 4]).astype("float32")}


def stepped(axes: dict[str, int], rules: str, pipeline: mw.Pipeline | None = None) -> Any:
    mesh = mw.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    options = mw.StepOptions(pipeline=pipeline)
    trainer = mw.Trainer(program(), mw.Placement.of(mesh, rules=rules), options)
    state, _ = trainer.step(trainer.init(), trainer.put(example()))
    return jax.tree.map(np.asarray, trainer.unpadded(state)).slots  # the gradients


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        ({"stage": 2, "data": 2}, "batch:data;layers:stage"),
        ({"stage": 2, "model": 2}, "hidden:model;layers:stage"),
    ],
)
def test_layers_lie_along_the_axis_of_the_stages(axes: dict[str, int], rules: str) -> None:
    wanted = stepped({"data": 1}, "batch:data")
    found = stepped(axes, rules, mw.Pipeline("stage", 4))
    largest = max(np.abs(value).max() for value in wanted.values())
    for path, value in wanted.items():
        assert np.abs(found[path] - value).max() <= TOLERANCE * largest, path
