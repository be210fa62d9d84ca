"""Random keys and the step's number reach a loss, equal on every mesh and for any micro-batches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
import meshwright.named as mn
from meshwright.errors import ModelError
from meshwright.frontends.extras import Extras
from meshwright.step.accumulate import Way, accumulating_in

WIDTH, ROWS = 8, 16
X = np.random.default_rng(0).normal(size=[4, ROWS, WIDTH]).astype("float32")
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "one device": ({"batch": 1}, 0),
    "rows": ({"batch": 8}, 0),
    "rows and model": ({"batch": 4, "model": 2}, 2),
}


def by_row(params: Any, batch: Any, keys: Any, step: Any) -> Any:
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, [WIDTH]))(keys)
    rate = 1.0 + step.astype("float32")
    return jnp.mean(((batch @ params["w"]) * mask * rate - 1) ** 2)


def by_batch(params: Any, batch: Any, key: Any) -> Any:
    mask = jax.random.bernoulli(key, 0.5, batch.shape)
    return jnp.mean(((batch @ params["w"]) * mask - 1) ** 2)


def named_by_row(params: Any, batch: Any, keys: Any, step: Any) -> Any:
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, [WIDTH]))(keys)
    mask = mn.named(mask.astype("float32"), f"batch:{len(keys)} out:{WIDTH}")
    y = mn.einsum([batch, params["w"]]) * mask * (1.0 + step.astype("float32"))
    return mn.reduce_mean(mn.square(y - 1.0))


def program(loss: Any, seed: int = 0) -> mw.Program:
    if loss is named_by_row:
        w = mn.named(jnp.ones([WIDTH, WIDTH]), f"io:{WIDTH} out:{WIDTH}")
        return mw.named_program(loss, {"w": w}, optax.sgd(0.1), batch="batch io", seed=seed)
    return mw.jax_program(loss, {"w": jnp.ones([WIDTH, WIDTH])}, optax.sgd(0.1), seed=seed)


def trained(
    loss: Any, mesh: str = "one device", accumulate: int = 1, way: Way | None = None, **how: Any
) -> np.ndarray:
    """The weight after four steps of 16 rows."""
    axes, zero = MESHES[mesh]
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    bound = mw.create_mesh(axes, devices=devices)
    rules: Any = {"w": [None, "model"]} if "model" in axes else {}
    if loss is named_by_row:
        rules = {"rules": "batch:batch;out:model" if "model" in axes else "batch:batch"}
        placement = mw.Placement.of(bound, **rules, zero=zero)
    else:
        placement = mw.Placement.of(bound, rules, zero=zero)
    trainer = mw.Trainer(program(loss, **how), placement, mw.StepOptions(accumulate=accumulate))
    with accumulating_in(way):
        state, _ = trainer.train(trainer.init(), X.reshape(4 * accumulate, -1, WIDTH))
    return np.asarray(state.params["w"])


@functools.cache
def expected(loss: Any) -> np.ndarray:
    return trained(loss)


@pytest.mark.parametrize("mesh", ["rows", "rows and model"])
@pytest.mark.parametrize("loss", [by_row, by_batch, named_by_row])
def test_draws_are_one_devices_on_every_mesh(loss: Any, mesh: str) -> None:
    np.testing.assert_allclose(trained(loss, mesh), expected(loss), rtol=1e-5)


@pytest.mark.parametrize("loss", [by_row, named_by_row])
@pytest.mark.parametrize(("accumulate", "way"), [(2, "written out"), (4, "in a loop"), (2, None)])
def test_draws_of_rows_do_not_depend_on_micro_batches(
    loss: Any, accumulate: int, way: Way | None
) -> None:
    np.testing.assert_allclose(
        trained(loss, "rows and model", accumulate, way), expected(loss), rtol=1e-5
    )


def test_each_batch_micro_batch_and_seed_draws_anew() -> None:
    drawn: list[int] = []

    def loss(params: Any, batch: Any, key: Any) -> Any:
        jax.debug.callback(lambda bits: drawn.append(int(bits)), jax.random.bits(key))
        return jnp.mean(batch @ params["w"])

    trained(loss, accumulate=2)
    trained(loss, accumulate=2, seed=1)
    jax.effects_barrier()
    assert len(drawn) == len(set(drawn)) == 16


def test_a_resumed_run_draws_on(tmp_path: Path) -> None:
    trainer = mw.Trainer(program(by_row), mw.Placement.of(mw.create_mesh({"batch": 8})))
    with mw.Checkpoints(tmp_path / "run") as checkpoints:
        trainer.train(trainer.init(), X[:2], checkpoints=checkpoints)
        state, _ = trainer.train(trainer.init(), X, checkpoints=checkpoints)
    np.testing.assert_allclose(state.params["w"], expected(by_row), rtol=1e-5)


def test_a_default_is_the_users() -> None:
    def loss(params: Any, batch: Any, key: Any = None, step: int = 3) -> Any:
        return params, batch, key, step

    assert Extras.of(loss, 0).names == ("key",)
    assert Extras.of(functools.partial(loss, key=jnp.ones([])), 0).names == ()
    assert Extras.of(lambda *both: 0.0, 0).names == ()
    assert Extras.of(lambda params, /, batch, *, keys: 0.0, 0).names == ("keys",)


def test_other_arguments_without_default_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"unknown: rng, model\. Expected params, batch and any of"
    ):
        program(lambda params, batch, rng, *, model: 0.0)
    with pytest.raises(ModelError, match="seed='x' is invalid"):
        program(by_row, seed="x")  # type: ignore[arg-type]
