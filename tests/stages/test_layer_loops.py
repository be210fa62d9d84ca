"""Layers that a model goes through in a loop, over weights that it has stacked."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_named_stages import HEADS, assert_those_of_one_device, transformer

import meshwright as mw

LAYERS, WIDTH = 4, 8
ROWS = np.random.default_rng(1).normal(size=[16, WIDTH]).astype("float32")
LAYOUTS = {"layers/up": [None, None, "model"], "layers/down": [None, "model", None]}


def layer(weights: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def scanned(params: Any, x: Any, keys: Any) -> Any:
    body = jax.checkpoint(lambda x, weights: (layer(weights, x), None))
    return jax.lax.scan(body, x, params["layers"])[0]


def scanned_with_keys(params: Any, x: Any, keys: Any) -> Any:
    """In a function of its own, with a count and keys that it hands on."""

    def body(carry: Any, weights: Any) -> Any:
        x, keys, count = carry
        keys, drawn = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, [WIDTH]))(drawn)
        return (x + kept * layer(weights, x) / (1 + count), keys, count + 1), None

    @jax.jit
    def net(weights: Any, x: Any) -> Any:
        count = jnp.zeros([], "int32")
        return jax.lax.scan(body, (x, keys, count), weights)[0][0]

    return net(params["layers"], x)


def scanned_twice(params: Any, x: Any, keys: Any) -> Any:
    """A loop over fewer weights comes first."""
    body = lambda x, weights: (layer(weights, x), None)  # noqa: E731
    x, _ = jax.lax.scan(lambda x, weight: (x + x * weight, None), x, params["scales"])
    return jax.lax.scan(body, x, params["layers"])[0]


def looped_in_python(params: Any, x: Any, keys: Any) -> Any:
    for number in range(LAYERS):
        weights = jax.tree.map(lambda stacked, number=number: stacked[number], params["layers"])
        x = layer(weights, x)
    return x


def looped_in_calls(params: Any, x: Any, keys: Any) -> Any:
    return jax.jit(jax.checkpoint(looped_in_python))(params, x, keys)


def scanned_in_calls(params: Any, x: Any, keys: Any) -> Any:
    return jax.checkpoint(scanned)(params, x, keys)


def in_reverse(params: Any, x: Any, keys: Any) -> Any:
    body = lambda x, weights: (layer(weights, x), None)  # noqa: E731
    return jax.lax.scan(body, x, params["layers"], reverse=True)[0]


def with_losses_of_layers(params: Any, x: Any, keys: Any) -> Any:
    def body(x: Any, weights: Any) -> Any:
        x = layer(weights, x)
        return x, jnp.mean(x, 1)

    x, losses = jax.lax.scan(body, x, params["layers"])
    return x + 0.1 * jnp.sum(losses, 0)[:, None]


def with_large_results(params: Any, x: Any, keys: Any) -> Any:
    def body(x: Any, weights: Any) -> Any:
        x = layer(weights, x)
        return x, jnp.mean(x) * jnp.ones([128, 64])  # 32 KiB each

    x, results = jax.lax.scan(body, x, params["layers"])
    return x + jnp.mean(results)


def program(net: Callable[[Any, Any, Any], Any]) -> mw.Program:
    draw = np.random.default_rng(0)
    up, down = (draw.normal(size=[LAYERS, *dims]) / 4 for dims in ([WIDTH, 16], [16, WIDTH]))
    layers = {"up": up.astype("float32"), "down": down.astype("float32")}
    head = draw.normal(size=[WIDTH, 4]).astype("float32")

    def loss(params: Any, rows: Any, keys: Any) -> Any:
        return jnp.mean((net(params, rows, keys) @ params["head"]) ** 2)

    params = {"layers": layers, "head": head, "scales": np.linspace(0.1, 0.3, 3 * WIDTH)}
    params["scales"] = params["scales"].reshape(3, WIDTH).astype("float32")
    return mw.jax_program(loss, params, optax.sgd(0.1, momentum=0.9), batch=ROWS)


def trainer(net: Any, axes: dict[str, int], **how: Any) -> mw.Trainer:
    mesh = mw.create_mesh(axes, devices=jax.devices()[: np.prod(list(axes.values()))])
    placed = {name: how.pop(name) for name in ("layouts", "zero") if name in how}
    placement = mw.Placement.of(mesh, batch="data", **{"layouts": {}, **placed})
    return mw.Trainer(program(net), placement, mw.StepOptions(**how))


def trained(trainer: mw.Trainer, **how: Any) -> dict[str, Any]:
    state, _ = trainer.train(trainer.init(), [ROWS] * 2, **how)
    return {path: np.asarray(value) for path, value in trainer.unpadded(state).params.items()}


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for path, value in expected.items():
        np.testing.assert_allclose(result[path], value, rtol=2e-6, atol=2e-6, err_msg=path)


@pytest.mark.parametrize(
    ("net", "axes", "how"),
    [
        (scanned, {"stage": 2, "data": 2, "model": 2}, {"layouts": LAYOUTS}),
        (scanned_twice, {"stage": 2, "data": 2, "model": 2}, {"layouts": LAYOUTS}),
        (scanned_with_keys, {"stage": 4, "data": 2}, {"zero": 1}),
        (looped_in_python, {"stage": 2, "data": 2}, {}),
        (looped_in_calls, {"stage": 2, "data": 2}, {"zero": 1}),
        (scanned_in_calls, {"stage": 4, "data": 1}, {}),
        (with_losses_of_layers, {"stage": 2, "data": 2, "model": 2}, {"layouts": LAYOUTS}),
    ],
    ids=[
        "scanned",
        "scanned twice",
        "scanned with keys",
        "looped in Python",
        "looped in calls",
        "scanned in calls",
        "losses of layers",
    ],
)
def test_a_loop_over_layers_is_cut_between_them(net: Any, axes: Any, how: Any) -> None:
    of_equal_blocks = net in (looped_in_python, looped_in_calls)
    schedule = "zero_bubble" if of_equal_blocks else "1f1b"
    piped = trainer(net, axes, pipeline=mw.Pipeline("stage", 4, schedule), **how)
    assert_same(trained(piped), trained(trainer(net, {"data": 1})))
    per_stage = f"{LAYERS} blocks, {LAYERS // axes['stage']} on each of {axes['stage']} stages"
    assert str(piped.explain()).count(per_stage) == 4  # two weights, each with a slot


def test_a_run_goes_on_with_other_stages_or_none(tmp_path: pathlib.Path) -> None:
    checkpoints = mw.Checkpoints(tmp_path)
    piped = trainer(scanned, {"stage": 4, "data": 2}, pipeline=mw.Pipeline("stage", 4))
    trained(piped, checkpoints=checkpoints)
    plain = trainer(scanned, {"data": 2})
    state, _ = plain.train(plain.init(), [ROWS] * 3, checkpoints=checkpoints)
    alone = trainer(scanned, {"data": 1})
    expected, _ = alone.train(alone.init(), [ROWS] * 3)
    for path, value in expected.params.items():
        np.testing.assert_allclose(state.params[path], value, rtol=2e-6, atol=2e-6, err_msg=path)


@pytest.mark.full
def test_a_scanned_transformer_trains_by_stages_under_rules() -> None:
    axes, rules = {"stage": 2, "model": 2, "data": 2}, f"batch:data;{HEADS}"
    case = transformer(scan=True, remat=True)
    assert_those_of_one_device(case, axes, rules, mw.Pipeline("stage", 2))


@pytest.mark.parametrize(
    ("net", "stages", "pipeline", "message"),
    [
        (in_reverse, 2, mw.Pipeline("stage", 4), "from the first entry to the last"),
        (with_large_results, 2, mw.Pipeline("stage", 4), "read by more than the next one"),
        (scanned, 3, mw.Pipeline("stage", 4), "4 layers do not divide over 3 stages"),
        (scanned, 2, mw.Pipeline("stage", 4, "circular", repeats=2), "repeats=2 is not supported"),
        (scanned, 2, mw.Pipeline("stage", 4, cuts=["layers"]), "cuts= is not supported"),
    ],
    ids=["in reverse", "large results", "three stages", "repeats", "cuts"],
)
def test_other_loops_are_refused_with_the_reason(
    net: Any, stages: int, pipeline: Any, message: str
) -> None:
    axes = {"stage": stages, "model": 2}  # beside which stages that differ are refused
    with pytest.raises(mw.PipelineError, match=message):
        _ = trainer(net, {**axes, "data": 1}, pipeline=pipeline).step


def test_dry_runs_and_plans_know_pipelines_of_loops() -> None:
    batch = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)
    strategy = mw.Sharded(
        mw.create_mesh({"stage": 2, "data": 4}), {}, batch="data", pipeline=mw.Pipeline("stage", 4)
    )
    how = {"strategy": strategy, "target": "v5e:2x4", "compile": False}
    report = mw.dry_run(program(scanned), batch, **how)
    assert report.step_time_s
    assert report.parameter_bytes < 4 * sum(np.prod(i.dims) for i in program(scanned).params)
    plans = [mw.plan(program(net), batch, target="v5e:2x4", limit_s=1.0) for net in (
        scanned, with_large_results,
    )]  # fmt: skip
    assert "no pipeline: the best, of" in str(plans[0])
    assert "weights (layers/down, layers/up) that is not cut: what a block makes" in str(plans[1])
