"""Modules of Flax NNX and Equinox, which know nothing of Meshwright, as Programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from foreign_families import check_plan

import meshwright as mw

pytestmark = pytest.mark.full

TARGETS = {"v5e:4x4": (4, 4), "v5p:4x4x4": (16, 4), "h100:8": (2, 4)}  # batch, model


class Case(NamedTuple):
    """How a module's loss and parameters are made at a width, and which weights are split."""

    make: Callable[[int], tuple[Callable[[Any, Any], jax.Array], Callable[[], Any]]]
    rules: dict[str, Any]


def squared(output: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((output - batch["y"]) ** 2)


class Block(nnx.Module):
    """A residual block of Flax."""

    def __init__(self, width: int, rngs: Any) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


def of_nnx(width: int) -> Any:
    def build() -> Any:
        return nnx.split(Block(width, nnx.Rngs(0)))

    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(width, nnx.Rngs(0))))

    def loss(params: Any, batch: Any) -> jax.Array:
        return squared(nnx.merge(graph, params)(batch["x"]), batch)

    return loss, lambda: build()[1]


def of_equinox(width: int) -> Any:
    def build() -> Any:
        return eqx.nn.MLP(width, width, 4 * width, depth=1, key=jax.random.key(0))

    _, static = eqx.partition(eqx.filter_eval_shape(build), _is_array)

    def loss(params: Any, batch: Any) -> jax.Array:
        model = eqx.combine(params, static)
        return squared(jax.vmap(jax.vmap(model))(batch["x"]), batch)

    return loss, lambda: eqx.filter(build(), eqx.is_array)


def _is_array(value: Any) -> bool:
    return eqx.is_array(value) or isinstance(value, jax.ShapeDtypeStruct)


CASES = {
    "Flax NNX": Case(of_nnx, {r"up/kernel": [None, "model"], r"down/kernel": ["model", None]}),
    "Equinox": Case(
        of_equinox, {r"layers/0/weight": ["model", None], r"layers/1/weight": [None, "model"]}
    ),
}


def program_of(case: Case, width: int) -> mw.Program:
    loss, params = case.make(width)
    return mw.jax_program(loss, params, optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_device(name: str) -> None:
    draw = np.random.default_rng(2)
    batch = {key: draw.normal(size=[8, 4, 16]).astype("float32") for key in "xy"}
    results = []
    for axes, count in (({"batch": 1, "model": 1}, 1), ({"batch": 4, "model": 2}, 8)):
        mesh = mw.create_mesh(axes, devices=jax.devices()[:count])
        placement = mw.Placement.of(mesh, CASES[name].rules, unmatched="replicate")
        trainer = mw.Trainer(program_of(CASES[name], 16), placement)
        state, logs = trainer.train(trainer.init(), [batch, batch])
        results.append((float(logs["loss"]), jax.tree.map(np.asarray, state.params)))
    (loss, alone), (other, split) = results
    assert other == pytest.approx(loss, rel=1e-5)
    for path, value in alone.items():
        np.testing.assert_allclose(split[path], value, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("name", CASES)
def test_real_widths_are_dry_run_on_targets_that_are_not_there(name: str) -> None:
    program = program_of(CASES[name], 2048)
    shape = jax.ShapeDtypeStruct((64, 256, 2048), "float32")
    for target, (batch, parts) in TARGETS.items():
        placement = mw.Placement.of(
            mw.Mesh({"batch": batch, "model": parts}), CASES[name].rules, unmatched="replicate"
        )
        report = mw.dry_run(
            program, {"x": shape, "y": shape}, strategy=placement, target=target, compile=False
        )
        assert report.is_analytic
        assert report.collectives


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_the_planner_finds_a_layout_no_slower_than_those_with_a_name(
    name: str, target: str
) -> None:
    shape = jax.ShapeDtypeStruct((64, 256, 2048), "float32")
    program = program_of(CASES[name], 2048)
    check_plan(mw.plan(program, {"x": shape, "y": shape}, target=target, limit_s=2))
