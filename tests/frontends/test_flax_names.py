"""The names that a model of Flax gives to the dims of its weights are what rules split by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.frontends.program_values import arrays_by_path

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 4)).astype("float32")
DRAW = nn.initializers.lecun_normal()
Made = tuple[Callable[..., Any], Callable[[], Any]]


class Linen(nn.Module):
    partitioned: Callable[..., Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        first = self.partitioned(DRAW, ("embed", "mlp"))
        last = self.partitioned(DRAW, ("mlp", None))
        x = nn.LayerNorm()(nn.Dense(16, kernel_init=first, name="first")(x))
        return nn.Dense(4, kernel_init=last, name="last")(jnp.tanh(x))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        first = nnx.with_partitioning(DRAW, ("embed", "mlp"))
        self.first = nnx.Linear(8, 16, kernel_init=first, rngs=rngs)
        weights = jax.random.normal(rngs.params(), [16, 4])
        self.last = nnx.Param(weights, out_sharding=jax.P("mlp", None))

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.first(x)) @ self.last[...]


def mean_of_squares(outputs: Any) -> Any:
    return jnp.mean((outputs - Y) ** 2)


def linen(partitioned: Callable[..., Any]) -> Made:
    model = Linen(partitioned)
    return (
        lambda params, batch: mean_of_squares(model.apply({"params": params}, batch)),
        lambda: model.init(jax.random.key(0), X[:1])["params"],
    )


def of_nnx() -> Made:
    with nnx.use_eager_sharding(False):  # else NNX wants a mesh while it makes the weights
        graph, params = nnx.split(Nnx(nnx.Rngs(0)))
    loss = lambda params, batch: mean_of_squares(nnx.merge(graph, params)(batch))  # noqa: E731
    return loss, lambda: params


MODELS: dict[str, Callable[[], Made]] = {
    "partitioned": lambda: linen(nn.with_partitioning),
    "logically partitioned": lambda: linen(nn.with_logical_partitioning),
    "nnx": of_nnx,
}


def trained(made: Made, placement: mw.Placement, optimizer: Any) -> tuple[mw.Trainer, Any]:
    trainer = mw.Trainer(mw.jax_program(*made, optimizer), placement)
    return trainer, trainer.train(trainer.init(), [X] * 3)[0]


@pytest.mark.parametrize("name", MODELS)
def test_rules_split_what_the_model_names(name: str) -> None:
    loss, params = MODELS[name]()
    optimizer = optax.adam(0.01)
    rules = "mlp:model; embed:data"
    placement = mw.Placement.of(mw.create_mesh({"data": 4, "model": 2}), rules=rules, batch="data")
    trainer, state = trained((loss, params), placement, optimizer)
    explanation = trainer.explain()
    for path in ("first/kernel", "0/mu/first/kernel"):
        assert str(explanation[path].layout.unbound()) == "[data, model]"
    last = "last" if name == "nnx" else "last/kernel"
    assert str(explanation[last].layout.unbound()) == "[model, unsharded]"
    assert str(explanation["first/bias"].layout.unbound()) == "[unsharded]"

    assert {*arrays_by_path(params)} == {*state.params}  # as servers take them

    alone, slots = params(), optimizer.init(params())
    for _ in range(3):
        gradients = jax.grad(loss)(alone, X)
        updates, slots = optimizer.update(gradients, slots)
        alone = optax.apply_updates(alone, updates)
    expected = jax.tree.leaves(alone)
    for actual, value in zip(jax.tree.leaves(list(state.params.values())), expected, strict=True):
        np.testing.assert_allclose(actual, value, atol=2e-6)


def test_a_layout_goes_before_names_and_finds_both_spellings_of_a_path() -> None:
    mesh = mw.create_mesh({"data": 4, "model": 2})
    layouts = {"first/kernel/value": [None, "data"], "last/kernel": ["data", None]}
    placement = mw.Placement.of(mesh, layouts, rules="mlp:model", batch="data")
    loss, params = MODELS["partitioned"]()
    explanation = mw.Trainer(mw.jax_program(loss, params, optax.sgd(0.1)), placement).explain()
    assert str(explanation["first/kernel"].layout.unbound()) == "[unsharded, data]"
    assert str(explanation["last/kernel"].layout.unbound()) == "[data, unsharded]"


def test_names_that_rules_cannot_have_are_never_split() -> None:
    """Two axes of one dim, a name that is no word, and a name that an array has twice."""
    names = (("data", "model"), "to-model", "mlp", "mlp")
    draw = nn.with_partitioning(DRAW, names)
    shapes = jax.eval_shape(lambda: {"w": draw(jax.random.key(0), (2, 4, 8, 8))})
    program = mw.jax_program(lambda params, batch: 0.0, shapes, optax.sgd(0.1))
    assert str(program.params[0].names) == "_ _ mlp _"
