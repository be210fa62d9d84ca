"""The compiled step multiplies no more than the model's share, however it is laid out and cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import meshwright as mw
from meshwright.hlo.costs import read_costs
from meshwright.jaxprs.flops import model_flops
from meshwright.step.accumulate import Way, accumulating_in

WIDTH, HEADS, WORDS, TOKENS = 64, 8, 128, 16
SPLIT = {
    "table": ["model", None],
    "[qkv]": [None, "model", None],
    "o": ["model", None, None],
    "up": [None, "model"],
    "down": ["model", None],
    "head": [None, "model"],
}


def params() -> dict[str, Any]:
    d_head = WIDTH // HEADS
    dims = {
        "table": (WORDS, WIDTH),
        **dict.fromkeys("qkv", (WIDTH, HEADS, d_head)),
        "o": (HEADS, d_head, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "head": (WIDTH, WORDS),
    }
    return {name: jnp.ones(shape) for name, shape in dims.items()}


def rotated(x: Any) -> Any:
    """Rotary positions, as Llama has them: a table of one row, stacked pairs, reshaped."""
    angles = jnp.einsum("bi,j->bij", jnp.arange(float(TOKENS))[None], jnp.ones(x.shape[-1] // 2))
    angles = jnp.stack([angles, angles], -2).reshape(1, TOKENS, 1, -1)
    first, second = jnp.split(x, 2, -1)
    pairs = jnp.stack([-second, first], -2).reshape(x.shape)
    return x * jnp.cos(angles) + pairs * jnp.sin(angles)


def loss(p: dict[str, Any], tokens: Any) -> Any:
    x = p["table"][tokens]
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = (jnp.einsum("btd,dhe->bthe", h, p[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", rotated(q), rotated(k)))
    x += jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", scores, v), p["o"])
    x += jax.nn.silu(x @ p["up"]) @ p["down"]
    right = jax.nn.one_hot(tokens, WORDS) * jax.nn.log_softmax(x @ p["head"])
    return -jnp.mean(right.sum(-1))


class Case(NamedTuple):
    mesh: Mapping[str, int]
    zero: int
    accumulate: int
    rows: int  # of a micro-batch, on each device
    way: Way | None = None


CASES = {
    "one row": Case({"batch": 4, "model": 2}, 1, 2, 1, "written out"),
    "in a loop": Case({"batch": 4, "model": 2}, 1, 2, 1, "in a loop"),
    "side by side": Case({"batch": 2, "model": 4}, 1, 2, 1, "side by side"),
    "one batch": Case({"batch": 4, "model": 2}, 0, 1, 1),
    "two rows": Case({"batch": 2, "model": 4}, 0, 4, 2, "in a loop"),
    "four rows": Case({"batch": 4, "model": 2}, 3, 1, 4),
    "rows alone": Case({"batch": 8}, 2, 4, 1, "written out"),
    "shared parameters": Case({"batch": 4, "model": 2}, 3, 2, 1, "in a loop"),
}
FAST = ("one row", "one batch")
LAYOUTS = {"batch": 4, "model": 2}, {"batch": 2, "model": 4}
# Each number of micro-batches with each number of rows, and both of them with either layout.
CASES |= {
    f"{accumulate} micro-batches of {1 << place} rows": Case(
        LAYOUTS[(number + place) % 2], 0, accumulate, 1 << place
    )
    for number, accumulate in enumerate((1, 2, 4))
    for place in range(3)
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if name in FAST else pytest.mark.full, id=name)
     for name, case in CASES.items()],
)  # fmt: skip
def test_no_device_multiplies_more_than_its_share(case: Case) -> None:
    """Replicated work would be much more than the share; a walk that misses some, less."""
    mesh = mw.create_mesh(dict(case.mesh))
    rules = SPLIT if "model" in case.mesh else {}
    program = mw.jax_program(loss, params, optax.adam(1e-3))
    how = mw.StepOptions(accumulate=case.accumulate)
    trainer = mw.Trainer(program, mw.Placement.of(mesh, rules, zero=case.zero,
                                                  unmatched="replicate"), how)  # fmt: skip
    tokens = jnp.zeros([case.rows * case.mesh["batch"], TOKENS], "int32")
    of_model = model_flops(jax.make_jaxpr(jax.grad(loss))(params(), tokens))
    assert of_model is not None
    batch = trainer.put(tokens)
    with accumulating_in(case.way):
        taken = batch if case.accumulate == 1 else (batch,) * case.accumulate
        text = trainer.step.lower(trainer.init(), taken).compile().as_text()
    flops = read_costs(text, tuple(mesh.axes)).flops
    assert flops == pytest.approx(case.accumulate * of_model / mesh.size, rel=0.02)


@pytest.mark.full
@pytest.mark.targets
def test_no_tpu_multiplies_more_than_its_share_of_micro_batches() -> None:
    """One row of a micro-batch in each device, whose split once got lost in the loop."""
    program = mw.jax_program(loss, params, optax.adam(1e-3))
    mesh, tokens = mw.Mesh({"batch": 2, "model": 2}), jnp.zeros([2, TOKENS], "int32")
    strategy = mw.Sharded(mesh, SPLIT, zero=1, accumulate=2, unmatched="replicate")
    with accumulating_in("in a loop"):
        report = mw.dry_run(program, tokens, strategy=strategy, target="v5e:2x2", blocks="whole")
    flops = model_flops(jax.make_jaxpr(jax.grad(loss))(params(), tokens))
    assert flops is not None
    assert report.flops == pytest.approx(2 * flops / mesh.size, rel=0.02)
