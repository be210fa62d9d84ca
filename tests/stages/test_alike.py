"""Optimizers over stacks: what they do to each block's weights by itself, once for all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.stages.alike import Families, alike

PATHS = tuple(f"block/{n}" for n in range(4))


def run(function, given):
    """A function of two dicts, over stacks of what ``PATHS`` name; and its jaxpr."""
    shapes = [
        {p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in part.items()} for part in given
    ]
    names = ("first", "second")
    families = Families(tuple(tuple((name, p) for p in PATHS) for name in names))
    changed = alike(function, names, shapes, families)

    def stacked(part):
        rest = {p: v for p, v in part.items() if p not in PATHS}
        return {**rest, "stack": jnp.stack([part[p] for p in PATHS])}

    def call(*parts):
        args = dict(zip(names, parts, strict=True))
        return changed(args, [{"stack": PATHS}] * 2, [{"stack": PATHS}])

    parts = [stacked(part) for part in given]
    (result,) = call(*parts)
    return result, jax.make_jaxpr(call)(*parts)


def values(key):
    sizes = {**dict.fromkeys(PATHS, (3, 2)), "head": (5,)}
    rng = np.random.default_rng(key)
    return {p: jnp.asarray(rng.normal(size=size), "float32") for p, size in sizes.items()}


@pytest.mark.parametrize(
    "optimizer", [optax.adamw(0.1), optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))]
)
def test_an_optimizer_over_stacks_gives_the_same_numbers(optimizer):
    def update(params, grads):
        changes, _ = optimizer.update(grads, optimizer.init(params), params)
        return ({p: params[p] + change for p, change in changes.items()},)

    args = values(0), values(1)
    (expected,) = update(*args)
    actual, jaxpr = run(update, args)
    np.testing.assert_allclose(actual["head"], expected["head"], rtol=1e-6)
    np.testing.assert_allclose(actual["stack"], np.stack([expected[p] for p in PATHS]), rtol=1e-6)
    taken_out = [
        e for e in jaxpr.eqns if e.primitive.name == "slice" and e.outvars[0].aval.size > 1
    ]
    assert not taken_out  # only scalars leave their stacks


def test_what_differs_from_block_to_block_is_taken_out_and_right():
    def plain(params, grads):
        scales = dict(zip(PATHS, (1.0, 2.0, 1.0, 3.0), strict=True))
        return ({p: v - scales.get(p, 0.5) * grads[p] for p, v in params.items()},)

    args = values(0), values(1)
    actual, _ = run(plain, args)
    expected = np.stack([plain(*args)[0][p] for p in PATHS])
    np.testing.assert_allclose(actual["stack"], expected, rtol=1e-6)
