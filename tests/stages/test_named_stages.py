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
Case = tuple[mw.Program, dict[str, np.ndarray]]  # with a batch


def tanh_of(x: Any, weight: Any) -> Any:
    return jax.checkpoint(mn.tanh)(x)


def in_loops(x: Any, weight: Any) -> Any:
    """What is laid out by a rule is read by a loop, and by a branch that each stage takes alone."""
    x = jax.lax.scan(lambda y, _: (mn.tanh(y) * 1.5, None), x, None, length=2)[0]
    return jax.lax.cond(weight.array[0, 0] > 0, mn.tanh, lambda y: 0.5 * y, x)


def tanh_blocks(within: Any = tanh_of) -> Case:

    def init() -> Any:
        draw = np.random.default_rng(0)

        def weight(dims: str, *sizes: int) -> Any:
            return mn.named((0.5 * draw.normal(size=sizes)).astype("float32"), dims)

        blocks = [
            {"up": weight("width:8 hidden:16", 8, 16), "down": weight("hidden:16 width:8", 16, 8)}
            for _ in range(4)
        ]
        return {"first": weight("io:4 width:8", 4, 8), "blocks": blocks}

    def loss(params: Any, batch: Any) -> Any:
        x = mn.einsum([batch["x"], params["first"]])
        for block in params["blocks"]:
            hidden = within(mn.einsum([x, block["up"]]), block["up"])
            x = x + mn.einsum([hidden, block["down"]])
        return mn.reduce_mean(mn.square(x))

    rows = {"x": np.random.default_rng(1).normal(size=[ROWS, 4]).astype("float32")}
    return named(loss, init, {"x": "batch io"}, rows)


def named(loss: Any, init: Any, dims: dict[str, str], rows: dict[str, np.ndarray]) -> Case:
    return mw.named_program(loss, init, KEEPS_GRADIENTS, batch=dims, example=rows), rows


def transformer(**options: Any) -> Case:
    """That of the library, whose ``relu`` and products have gradients of their own."""
    dims = "length:4 vocab:8 d_model:8 d_ff:16 heads:2 d_kv:4 layers:2"
    model = mn.models.Transformer(dims, **options)
    tokens = np.random.default_rng(0).integers(0, 8, [8, 4]).astype("int32")
    return named(
        lambda params, batch: model.loss(params, batch["tokens"]),
        lambda: model.init(jax.random.key(0)),
        {"tokens": "batch length"},
        {"tokens": tokens},
    )


def reversible() -> Case:
    """Blocks that are computed again, and laid out again, by a gradient of their own."""
    draw = np.random.default_rng(0)
    arrays = [0.5 * draw.normal(size=[2, 8, 8]).astype("float32") for _ in range(2)]

    def half(some: Any, x: Any) -> Any:
        return mn.einsum([mn.tanh(mn.einsum([x, some["up"]])), some["down"]])

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch["x"], 0.5 * batch["x"]
        for some in params:
            x, y = mn.reversible([half, half])([some, some], x, y)
        return mn.reduce_mean(mn.square(x + y))

    def init() -> Any:
        dims = {"up": "io:8 hidden:8", "down": "hidden:8 io:8"}
        return [
            {
                name: mn.named(array, of)
                for array, (name, of) in zip(pair, dims.items(), strict=True)
            }
            for pair in arrays
        ]

    rows = {"x": draw.normal(size=[8, 8]).astype("float32")}
    return named(loss, init, {"x": "batch io"}, rows)


def stepped(
    case: Case,
    axes: dict[str, int],
    rules: str,
    pipeline: mw.Pipeline | None = None,
    zero: int = 0,
) -> Any:
    program, rows = case
    mesh = mw.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    options = mw.StepOptions(pipeline=pipeline)
    placement = mw.Placement.of(mesh, rules=rules, zero=zero)
    trainer = mw.Trainer(program, placement, options)
    state, _ = trainer.step(trainer.init(), trainer.put(rows))
    return jax.tree.map(np.asarray, trainer.unpadded(state)).slots  # the gradients


def assert_those_of_one_device(
    case: Case, axes: dict[str, int], rules: str, pipeline: mw.Pipeline, zero: int = 0
) -> None:
    expected = stepped(case, {"data": 1}, "batch:data")
    result = stepped(case, axes, rules, pipeline, zero)
    largest = max(np.abs(value).max() for value in expected.values())
    for path, value in expected.items():
        assert np.abs(result[path] - value).max() <= TOLERANCE * largest, path


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "rules", "zero"),
    [
        ({"stage": 2, "data": 2}, "batch:data;layers:stage", 1),
        ({"stage": 2, "model": 2}, "hidden:model;layers:stage", 0),
    ],
)
def test_layers_lie_along_the_axis_of_the_stages(
    axes: dict[str, int], rules: str, zero: int
) -> None:
    assert_those_of_one_device(tanh_blocks(), axes, rules, mw.Pipeline("stage", 4), zero)


@pytest.mark.full
def test_loops_and_branches_read_what_is_laid_out_by_a_rule() -> None:
    axes, rules = {"stage": 2, "model": 2}, "hidden:model;layers:stage"
    assert_those_of_one_device(tanh_blocks(in_loops), axes, rules, mw.Pipeline("stage", 4))


HEADS = "d_ff:model;heads:model;vocab:model;layers:stage"


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        ({"stage": 2, "model": 2, "data": 2}, f"batch:data;{HEADS}"),
        ({"stage": 2, "model": 2}, "length:model;layers:stage"),
    ],
)
def test_a_transformer_trains_by_stages_under_rules(axes: dict[str, int], rules: str) -> None:
    assert_those_of_one_device(transformer(), axes, rules, mw.Pipeline("stage", 2))


@pytest.mark.full
def test_gradients_of_their_own_are_taken_in_the_mesh_of_a_stage() -> None:
    axes, rules = {"stage": 2, "model": 2}, "hidden:model;layers:stage"
    assert_those_of_one_device(reversible(), axes, rules, mw.Pipeline("stage", 2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "rules", "schedule"),
    [
        ({"stage": 2}, "layers:stage", "1f1b"),
        ({"stage": 2, "data": 2}, "batch:data;layers:stage", "zero_bubble"),
        ({"stage": 2, "model": 2}, HEADS, "gpipe"),
    ],
)
def test_a_bias_that_all_layers_share_has_the_gradients_of_all_stages(
    axes: dict[str, int], rules: str, schedule: str
) -> None:
    case = transformer(positions="relative")
    assert_those_of_one_device(case, axes, rules, mw.Pipeline("stage", 2, schedule))
