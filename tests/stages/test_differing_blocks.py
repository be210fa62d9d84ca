"""Equal blocks that differ in numbers: random keys, rates, what is made of the batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw

BLOCKS, WIDTH = 4, 8
ROWS = np.random.default_rng(1).normal(size=[16, WIDTH]).astype("float32")
LAYOUTS = {"up/.": [None, "model"], "down/.": ["model", None]}


def block(params: Any, n: int, x: Any) -> Any:
    return jnp.tanh(x @ params["up"][str(n)]) @ params["down"][str(n)]


def kept(key: Any, x: Any, rate: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def with_keys_split_before(params: Any, x: Any, keys: Any) -> Any:
    of_blocks = jnp.swapaxes(jax.vmap(lambda key: jax.random.split(key, BLOCKS))(keys), 0, 1)
    for n, of_block in enumerate(of_blocks):
        x = x + jax.vmap(lambda key, y: kept(key, y, 0.2))(of_block, block(params, n, x))
    return x


def with_keys_handed_on(params: Any, x: Any, keys: Any) -> Any:
    data = jax.vmap(jax.random.key_data)(keys)  # as of programs from before typed keys
    for n in range(BLOCKS):
        data, drawn = jnp.moveaxis(jax.vmap(jax.random.split)(data), 1, 0)
        x = x + jax.vmap(lambda key, y: kept(key, y, 0.2))(drawn, block(params, n, x))
    return x


def with_stochastic_depth(params: Any, x: Any, keys: Any) -> Any:
    rates = np.linspace(0.1, 0.4, BLOCKS)
    for n, rate in enumerate(map(float, rates)):
        here = jax.vmap(lambda key, n=n: jax.random.fold_in(key, n))(keys)
        y = block(params, n, x)
        x = x + jax.vmap(lambda key, y, rate=rate: y * kept(key, jnp.ones([]), rate))(here, y)
    return x


def with_an_entry_of_a_table(params: Any, x: Any, keys: Any) -> Any:
    scales = jnp.linspace(0.5, 1.0, BLOCKS)
    inputs = x
    for n in range(BLOCKS):
        x = x + scales[n] * block(params, n, x) + jnp.roll(inputs, n, axis=1)
    return x


def with_constants(params: Any, x: Any, keys: Any) -> Any:
    for n in range(BLOCKS):
        x = x + block(params, n, x) * np.linspace(0, n + 1, WIDTH, dtype="float32")
    return x


def program(net: Callable[[Any, Any, Any], Any]) -> mw.Program:
    draw = np.random.default_rng(0)
    ups, downs = (draw.normal(size=[BLOCKS, *dims]) / 4 for dims in ([WIDTH, 16], [16, WIDTH]))
    params = {
        "up": {str(n): value.astype("float32") for n, value in enumerate(ups)},
        "down": {str(n): value.astype("float32") for n, value in enumerate(downs)},
    }

    def loss(params: Any, rows: Any, keys: Any) -> Any:
        return jnp.mean(net(params, rows, keys) ** 2)

    return mw.jax_program(loss, params, optax.sgd(0.1), batch=ROWS)


def trained(net: Any, axes: dict[str, int], **how: Any) -> tuple[dict[str, Any], float]:
    """The weights after two steps, and the loss of the second."""
    mesh = mw.create_mesh(axes, devices=jax.devices()[: np.prod(list(axes.values()))])
    placement = mw.Placement.of(mesh, batch="data", layouts=how.pop("layouts", {}))
    trainer = mw.Trainer(program(net), placement, mw.StepOptions(**how))
    state, logs = trainer.init(), {}
    for _ in range(2):
        state, logs = trainer.step(state, trainer.put(ROWS))
    params = trainer.unpadded(state).params
    return {path: np.asarray(value) for path, value in params.items()}, float(logs["loss"])


@pytest.mark.parametrize(
    ("net", "pipeline"),
    [
        (with_keys_split_before, mw.Pipeline("stage", 4)),
        (with_keys_handed_on, mw.Pipeline("stage", 4, schedule="zero_bubble")),
        (with_stochastic_depth, mw.Pipeline("stage", 4, schedule="circular", repeats=2)),
        (with_an_entry_of_a_table, mw.Pipeline("stage", 4)),
        (with_constants, mw.Pipeline("stage", 4, schedule="gpipe")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_that_differ_in_numbers_are_those_of_one_device(net: Any, pipeline: Any) -> None:
    expected, loss = trained(net, {"data": 1})
    splits_weights = pipeline.schedule != "zero_bubble"  # this and repeats are for equal blocks
    axes = {"stage": 2, "data": 2, **({"model": 2} if splits_weights else {})}
    layouts = LAYOUTS if splits_weights else {}
    result, same = trained(net, axes, pipeline=pipeline, layouts=layouts)
    assert same == pytest.approx(loss, rel=1e-6)
    for path, value in expected.items():
        np.testing.assert_allclose(result[path], value, atol=2e-6, err_msg=path)


def test_blocks_that_differ_in_what_weights_make_are_refused_with_the_reason() -> None:
    def gated(params: Any, x: Any, keys: Any) -> Any:
        gates = jnp.split(x @ params["up"]["0"][:, :BLOCKS], BLOCKS, axis=1)
        for n, gate in enumerate(gates):
            x = x + gate * block(params, n, x)
        return x

    with pytest.raises(mw.PipelineError, match="made of weights outside of them"):
        trained(gated, {"stage": 2, "data": 2, "model": 2}, pipeline=mw.Pipeline("stage", 4))
