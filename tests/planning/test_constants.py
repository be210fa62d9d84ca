"""Operations on constants, and results of one element: from the trace to a plan and a report.

Neither is an array of the graph, so operations lack some of their operands or results, or all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from models import CPU

import meshwright as mw
from meshwright.jaxprs.flops import model_flops
from meshwright.jaxprs.names import Argument
from meshwright.planning.search import plan_step
from meshwright.planning.traced_graph import graph_of, unknown_kinds

ROWS, WIDTH = 32, 64
TARGETS = {"cpu:8": CPU, "v5e:2x4": None, "h100:8": None}

ROW, COLUMN = jnp.arange(float(ROWS)), jnp.arange(float(WIDTH))
LARGE = jnp.ones([ROWS, 4 * WIDTH])  # more elements than constants that lie as readers want them


def rope(x):
    return x * jnp.cos(jnp.einsum("i,j->ij", jnp.arange(float(ROWS)), jnp.arange(float(WIDTH))))


def turned_on(turns, x):
    return (
        lax.cond(turns > 0, lambda: jnp.ones([ROWS, WIDTH]), lambda: jnp.zeros([ROWS, WIDTH])) * x
    )


STEPS = {  # each takes the activation of ROWS x WIDTH and gives one
    "rope": rope,
    "outer": lambda x: x + jnp.outer(ROW, COLUMN),
    "inner": lambda x: x * jnp.vdot(COLUMN, COLUMN),
    "batched": lambda x: x + jnp.einsum("bi,bj->bij", jnp.ones([4, ROWS]), jnp.ones([4, WIDTH]))[0],
    "with a constant": lambda x: x @ jnp.eye(WIDTH),
    "with itself": lambda x: (x @ x.T) @ x,
    "batched with itself": lambda x: x * jnp.einsum("bi,bi->b", x, x)[:, None],
    "convolved": lambda x: (
        x
        + lax.conv_general_dilated(
            jnp.ones([1, 1, ROWS, WIDTH]), jnp.ones([1, 1, 3, 3]), (1, 1), "SAME"
        )[0, 0]
    ),
    "pooled": lambda x: (
        x + lax.reduce_window(jnp.ones([ROWS, WIDTH]), 0.0, lax.add, (3, 3), (1, 1), "SAME")
    ),
    "pooled to one": lambda x: (
        x * lax.reduce_window(x, 0.0, lax.add, (ROWS, WIDTH), (1, 1), "VALID")
    ),
    "concatenated": lambda x: x * jnp.concatenate([jnp.ones([8, WIDTH]), jnp.zeros([24, WIDTH])]),
    "stacked": lambda x: x * jnp.stack([COLUMN] * ROWS),
    "padded": lambda x: x * jnp.pad(jnp.ones([8, WIDTH]), ((0, 24), (0, 0))),
    "gathered": lambda x: x * jnp.ones([100, WIDTH])[jnp.arange(ROWS)],
    "gathered of a large one": lambda x: x * LARGE[jnp.arange(ROWS)][:, :WIDTH],
    "scattered": lambda x: x * jnp.zeros([ROWS, WIDTH]).at[jnp.arange(8)].add(1.0),
    "inner of arrays": lambda x: x * jnp.vdot(x, x),
    "convolved to one": lambda x: x * lax.conv(x[None, None], x[None, None], (1, 1), "VALID")[0, 0],
    "scattered to one": lambda x: x * jnp.zeros([1]).at[jnp.zeros(ROWS, "int32")].add(x[:, 0]),
    "gathered one": lambda x: x * x[jnp.array([3]), jnp.array([4])],
    "scattered rows": lambda x: jnp.zeros([ROWS, WIDTH]).at[jnp.arange(ROWS)[::-1]].set(x),
    "written": lambda x: (
        x * lax.dynamic_update_slice(jnp.ones([ROWS, WIDTH]), COLUMN[None], (3, 0))
    ),
    "cut": lambda x: x * lax.dynamic_slice(LARGE, (0, 8), (ROWS, WIDTH)),
    "cut to one": lambda x: x * lax.dynamic_slice(x, (0, 8), (1, 1)),
    "sorted": lambda x: x * jnp.sort(jnp.cos(COLUMN)),
    "best of all": lambda x: x * lax.top_k(x.reshape(-1), 1)[0],
    "least of all": lambda x: x + jnp.argmin(x),
    "best": lambda x: x * lax.top_k(jnp.cos(COLUMN), 1)[0],
    "summed up": lambda x: x * jnp.cumsum(COLUMN),
    "reduced": lambda x: x * jnp.sum(jnp.ones([8, WIDTH]), 0),
    "random": lambda x: x * jax.random.normal(jax.random.key(0), [ROWS, WIDTH]),
    "scanned": lambda x: (
        x
        + lax.scan(
            lambda c, row: (c + row, c @ jnp.eye(WIDTH)), jnp.zeros(WIDTH), jnp.ones([ROWS, WIDTH])
        )[1]
    ),
    "scanned to one": lambda x: x * lax.scan(lambda c, row: (c + row @ row, None), 0.0, x)[0],
    "scanned over nothing": lambda x: (
        x * lax.scan(lambda c, _: (2 * c, None), jnp.ones(WIDTH), None, length=3)[0]
    ),
    "looped": lambda x: x * lax.fori_loop(0, 3, lambda i, c: c @ jnp.eye(WIDTH), jnp.ones(WIDTH)),
    "of a branch": lambda x: turned_on(jnp.sum(COLUMN), x),
    "of a branch of the step": lambda x: turned_on(jnp.sum(x), x),
    "mapped": lambda x: x + jax.vmap(lambda row: row * COLUMN)(ROW),
    "computed again": jax.checkpoint(rope),
    "called": jax.jit(rope),
    "transformed": lambda x: x * jnp.abs(jnp.fft.fft(COLUMN)),
    "solved": lambda x: x * jnp.diag(jnp.linalg.cholesky(jnp.eye(WIDTH))),
    "empty": lambda x: x + jnp.sum(jnp.zeros([0, WIDTH]) @ jnp.eye(WIDTH)),
}


def step_of(name):
    """SGD on a loss that has the operation between a product and a square."""

    def loss(params, x):
        return jnp.mean(STEPS[name](x @ params["w"]) ** 2)

    def step(params, x):
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    return step


@pytest.mark.parametrize("name", STEPS)
def test_a_step_with_constants_is_planned(name):
    """From the trace through graph, facts and search to a plan, for each order of running."""
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    weights = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")}
    jaxpr = jax.make_jaxpr(step_of(name))(weights, rows)
    graph = graph_of(jaxpr, [Argument("w"), Argument("x", "input")], 1)
    counted = sum(operation.flops * operation.times for operation in graph.operations)
    expected = model_flops(jaxpr)
    assert expected is None or counted == expected
    assert not set(unknown_kinds(graph)) - {"cholesky", "triangular_solve"}
    for target, hardware in TARGETS.items():
        plan = plan_step(graph, target, hardware=hardware)
        assert plan.chosen.time_s > 0
        assert plan.chosen.peak_bytes > 0


@pytest.mark.parametrize("layouts", [{"w": [None, "model"]}, {"w": ["model", None]}])
def test_a_step_with_a_product_of_constants_is_estimated(layouts):
    """Rotary embeddings, as Keras Hub's Llama, Mistral and Gemma make them."""
    import optax

    def loss(params, x):
        return jnp.mean(rope(x @ params["w"]) ** 2)

    weights = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")}
    program = mw.jax_program(loss, weights, optax.sgd(0.1), name="rope")
    mesh = mw.Mesh({"batch": 4, "model": 2})
    strategy = mw.Sharded(mesh, layouts, unmatched="replicate")
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    report = mw.dry_run(program, rows, strategy=strategy, target="v5e:2x4", compile=False)
    assert report.is_analytic
    split = 8 if layouts["w"][1] else 4  # the table is split as the product is
    assert report.flops == 2 * 2 * ROWS * WIDTH * WIDTH / 8 + 2 * ROWS * WIDTH / split
