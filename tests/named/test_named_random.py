"""Random numbers: those of JAX on one device, under every kind of rules, made where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import KINDS, Case, scope

import meshwright as mw
import meshwright.named as mn
from meshwright.hlo.collectives import read_collectives
from meshwright.named import random

DIMS = "a:8 b:8 c:16"
SHAPE = (8, 8, 16)
CHANCES = np.linspace(0, 1, 8).astype("float32")


def logits() -> mn.NamedArray:
    return mn.named(jnp.sin(jnp.arange(1024.0)).reshape(SHAPE), DIMS)


# Each beside the same in JAX, which knows of no mesh.
DRAWS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "uniform": (
        lambda key: random.uniform(key, DIMS, -1, 3),
        lambda key: jax.random.uniform(key, SHAPE, minval=-1, maxval=3),
    ),
    "normal": (
        lambda key: random.normal(key, DIMS, 1.0, 2.0),
        lambda key: 1 + 2 * jax.random.normal(key, SHAPE),
    ),
    "truncated_normal": (
        lambda key: random.truncated_normal(key, DIMS, 1.0, 2.0),
        lambda key: 1 + 2 * jax.random.truncated_normal(key, -2, 2, SHAPE),
    ),
    "bernoulli": (
        lambda key: random.bernoulli(key, DIMS, mn.named(CHANCES, "b:8")),
        lambda key: jax.random.bernoulli(key, CHANCES[:, None], SHAPE),
    ),
    "dropout": (
        lambda key: random.dropout(logits(), key, rate=0.25),
        lambda key: jnp.where(jax.random.bernoulli(key, 0.75, SHAPE), logits().array / 0.75, 0),
    ),
    "dropout of whole rows": (
        lambda key: random.dropout(logits(), key, keep_prob=0.75, noise_dims="a c"),
        lambda key: jnp.where(
            jax.random.bernoulli(key, 0.75, (8, 16))[:, None], logits().array / 0.75, 0
        ),
    ),
    "categorical": (
        lambda key: random.categorical(key, logits(), "c"),
        lambda key: jax.random.categorical(key, logits().array),
    ),
    "categorical over a split dim": (
        lambda key: random.categorical(key, logits(), "a"),
        lambda key: jax.random.categorical(key, logits().array, axis=0),
    ),
}


@pytest.mark.full_for("1-D", "2-D", "3-D")
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_under_any_rules(kind):
    rules = Case("random", len, len, [], ("a", "b", "c")).rules(kind)
    key = jax.random.key(7)
    with scope(rules):
        draw = jax.jit(lambda key: {name: named(key) for name, (named, _) in DRAWS.items()})
        result = draw(key)
    with mn.no_rules():
        expected = jax.jit(lambda key: {name: bare(key) for name, (_, bare) in DRAWS.items()})(key)
    for name, x in result.items():
        np.testing.assert_allclose(x.array, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
        if rules is not None:
            lies = rules.layout(x.dims).sharding
            assert x.array.sharding.is_equivalent_to(lies, x.array.ndim), name


@pytest.mark.parametrize("name", [name for name in DRAWS if "categorical" not in name])
def test_numbers_are_made_where_they_lie(name):
    """Nothing is exchanged, and no device makes more than its own part."""
    with mn.rules("a:rows;c:cols", mw.create_mesh({"rows": 4, "cols": 2})):
        compiled = jax.jit(DRAWS[name][0]).lower(jax.random.key(0)).compile()
    assert not read_collectives(compiled.as_text(), (("rows", 4), ("cols", 2)))
    assert "[2,8,8]" in compiled.as_text()
    assert "[8,8,16]" not in compiled.as_text()


def test_only_candidates_are_exchanged():
    mesh = mw.create_mesh({"all": 8})
    with mn.rules("vocab:all", mesh):
        x = mn.named(jnp.zeros([4, 256]), "batch:4 vocab:256")
        sample = jax.jit(lambda key, x: random.categorical(key, x, "vocab"))
        compiled = sample.lower(jax.random.key(0), x).compile()
    traffic = read_collectives(compiled.as_text(), mesh.axes)
    assert (
        sum(collective.elements for collective in traffic) == 2 * 4 * 8
    )  # a value and a place from each device


def test_old_keys_and_other_types_are_taken():
    x = random.normal(jax.random.PRNGKey(1), "a:8", dtype=jnp.bfloat16)
    assert x.dtype == jnp.bfloat16
    assert random.dropout(x, jax.random.key(0), rate=0.5).dtype == jnp.bfloat16
    assert random.uniform(jax.random.key(0), "").shape == {}


def test_explicit_rules():
    mesh = mw.create_mesh({"all": 8})
    x = random.normal(jax.random.key(0), "a:8", rules=mn.BoundRules(mn.DimRules("a:all"), mesh))
    assert x.array.addressable_shards[0].data.shape == (1,)


def test_temperature_makes_choices_more_even():
    weights = np.array([0.5, -1.0, 1.5, 0.0])
    x = mn.named(jnp.asarray(np.tile(weights, (8192, 1)), jnp.float32), "draw:8192 vocab:4")
    for temperature in (0.5, 1.0, 2.0):
        drawn = random.sample_with_temperature(jax.random.key(2), x, "vocab", temperature)
        actual = np.bincount(np.asarray(drawn), minlength=4) / 8192
        expected = np.exp(weights / temperature) / np.sum(np.exp(weights / temperature))
        np.testing.assert_allclose(actual, expected, atol=4 * 0.5 / 8192**0.5)
    cold = random.sample_with_temperature(jax.random.key(2), x, "vocab", 0)
    assert set(np.asarray(cold)) == {2}


def test_dropout_keeps_the_mean_and_its_gradient_is_what_it_kept():
    x = mn.named(jnp.ones([64, 64]), "batch:64 io:64")
    drop = lambda x: random.dropout(x, jax.random.key(0), rate=0.2)  # noqa: E731
    dropped = np.asarray(drop(x))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1.25)}
    assert abs(dropped.mean() - 1) < 0.02
    gradient = jax.grad(lambda x: mn.reduce_sum(drop(x)).array)(x)
    np.testing.assert_array_equal(gradient.array, dropped)


def test_dropout_of_nothing_and_of_everything():
    x = mn.named(jnp.array([1.0, jnp.inf]), "io:2")
    assert random.dropout(x, jax.random.key(0), rate=0).array is x.array
    np.testing.assert_array_equal(random.dropout(x, jax.random.key(0), keep_prob=0.0), [0, 0])


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({}, "rate=, the part to drop, or keep_prob=, the part to keep; received neither"),
        ({"rate": 0.1, "keep_prob": 0.9}, "received both"),
        ({"rate": 1.5}, "dropout: rate=1.5 is a part of all elements, from 0 to 1"),
        ({"keep_prob": -1}, "keep_prob=-1"),
    ],
)
def test_a_wrong_part_is_refused(part, says):
    x = mn.named(jnp.ones(2), "io:2")
    with pytest.raises(mw.ModelError, match=says):
        random.dropout(x, jax.random.key(0), **part)


def test_wrong_dims_are_refused():
    key, x = jax.random.key(0), mn.named(jnp.ones(2), "io:2")
    with pytest.raises(mw.DimError, match=r"there is no dim 'batch' in \[io:2\]"):
        random.dropout(x, key, rate=0.5, noise_dims="batch")
    with pytest.raises(mw.DimError, match=r"the probabilities have io:2, which \[a:3\] lacks"):
        random.bernoulli(key, "a:3", x)
    with pytest.raises(mw.ModelError, match=r"temperature=-1.*less than 0 has no meaning"):
        random.sample_with_temperature(key, x, "io", -1)


def test_what_is_no_key_is_refused():
    x = mn.named(np.ones(3, "float32"), "a:3")
    for wrong in (lambda: mn.normal(0, "a:3"), lambda: mn.dropout(x, None, rate=0.5)):
        with pytest.raises(mw.ModelError, match="key must be one random key"):
            wrong()
