"""ZeRO shares stacked weights of a loop out one layer at a time, with the losses of level 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw

WIDTH, HIDDEN, ROWS = 32, 128, 16
DATA, BOTH = {"data": 8}, {"data": 4, "model": 2}
SPLIT = {"layers/up": [None, None, "model"], "layers/down": [None, "model", None]}


def block(x: Any, layer: Any) -> tuple[Any, None]:
    hidden = jnp.tanh(x @ layer["up"])
    return x + jnp.tanh(hidden @ layer["down"] + layer["bias"]), None


def marked(x: Any, layer: Any) -> tuple[Any, None]:
    return mw.block_output(block(x, layer)[0]), None


def net(body: Callable[..., Any], **how: Any) -> Callable[[Any, Any], Any]:
    def loss(params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(body, x @ params["first"], params["layers"], **how)
        return jnp.mean((x @ params["first"].T) ** 2)

    return loss


def in_bfloat16(params: Any, x: Any) -> Any:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return net(block)(params, x.astype(jnp.bfloat16)).astype(jnp.float32)


def by_number(params: Any, x: Any) -> Any:
    """Layer 1 is not read, and the first one twice."""
    x = x @ params["first"]
    for number in (0, 2, 3, 4, 5, 0):
        x, _ = block(x, jax.tree.map(lambda stack, n=number: stack[n], params["layers"]))
    return jnp.mean((x @ params["first"].T) ** 2)


def looked_up(params: Any, x: Any) -> Any:
    x = x @ params["first"]
    for number in (0, -1, 3, 4, 5, 0):
        x, _ = block(x, jax.tree.map(lambda a, n=number: jnp.take(a, n, axis=0), params["layers"]))
    return jnp.mean((x @ params["first"].T) ** 2)


def both_ways(params: Any, x: Any) -> Any:
    x = x @ params["layers"]["up"][3] @ params["layers"]["down"][-1]
    return net(block)(params, x) + jnp.mean(params["layers"]["down"] ** 2)


LOSSES = {
    "by number": by_number,
    "looked up": looked_up,
    "both ways": both_ways,
    "plain": net(block),
    "from the last": net(block, reverse=True),
    "computed again": net(jax.checkpoint(block)),
    "marked": net(marked),
    "jitted": jax.jit(net(block)),
    "bfloat16": in_bfloat16,
}


def weights(layers: int, width: int = WIDTH, hidden: int = HIDDEN) -> Any:
    draw = np.random.default_rng(0)
    shapes = {"up": (width, hidden), "down": (hidden, width), "bias": (width,)}
    stacked = {
        name: draw.normal(size=[layers, *shape]).astype("float32") / 8
        for name, shape in shapes.items()
    }
    return {"first": draw.normal(size=[width, width]).astype("float32") / 8, "layers": stacked}


def trained(loss: Any, layers: int, axes: Any, zero: int, **how: Any) -> list[float]:
    program = mw.jax_program(loss, weights(layers), optax.adam(0.01))
    layouts = SPLIT if "model" in axes else {}
    placement = mw.Placement.of(mw.create_mesh(axes), layouts, batch="data", zero=zero)
    trainer = mw.Trainer(program, placement, mw.StepOptions(**how))
    rows = np.random.default_rng(1).normal(size=[ROWS, WIDTH]).astype("float32")
    batch: Any = trainer.put(rows)
    if how.get("accumulate"):
        batch = tuple(trainer.put(rows[n::2]) for n in range(2))
    state, losses = trainer.init(), list[float]()
    for _ in range(3):
        state, logs = trainer.step(state, batch)
        losses.append(float(logs["loss"]))
    return losses


FULL = pytest.mark.full
CASES = [
    ("plain", 8, DATA, {}),  # the layers lie on different devices
    ("plain", 6, DATA, {}),  # every device has a piece of each layer
    pytest.param("from the last", 8, DATA, {}, marks=FULL),
    pytest.param("computed again", 8, BOTH, {}, marks=FULL),
    pytest.param("marked", 8, DATA, {"remat": "block"}, marks=FULL),
    pytest.param("marked", 8, BOTH, {"remat": "selective"}, marks=FULL),
    pytest.param("plain", 8, DATA, {"remat": "block"}, marks=FULL),
    pytest.param("from the last", 6, BOTH, {"remat": "selective"}, marks=FULL),
    pytest.param("plain", 8, BOTH, {"remat": "dots_saveable"}, marks=FULL),
    pytest.param("plain", 8, BOTH, {"accumulate": 2}, marks=FULL),
    ("jitted", 8, BOTH, {}),
    pytest.param("bfloat16", 8, BOTH, {}, marks=FULL),
    ("by number", 8, DATA, {}),
    pytest.param("looked up", 6, BOTH, {}, marks=FULL),
    pytest.param("by number", 6, BOTH, {}, marks=FULL),
    pytest.param("by number", 8, DATA, {"remat": "nothing_saveable", "accumulate": 2}, marks=FULL),
    pytest.param("both ways", 8, BOTH, {}, marks=FULL),
]


LOWER = [
    ("plain", 8, DATA, {}, 1),
    ("jitted", 6, BOTH, {}, 2),
    pytest.param("from the last", 8, BOTH, {}, 1, marks=FULL),
    pytest.param("computed again", 6, DATA, {}, 1, marks=FULL),
    pytest.param("marked", 8, DATA, {"remat": "block"}, 2, marks=FULL),
    pytest.param("jitted", 8, DATA, {"remat": "block"}, 1, marks=FULL),
    pytest.param("plain", 8, DATA, {"remat": "dots_saveable"}, 1, marks=FULL),
    pytest.param("plain", 8, BOTH, {"accumulate": 2}, 1, marks=FULL),
    pytest.param("plain", 6, DATA, {"accumulate": 2}, 2, marks=FULL),
    pytest.param("bfloat16", 8, DATA, {}, 1, marks=FULL),
    pytest.param("by number", 8, DATA, {}, 1, marks=FULL),
    pytest.param("both ways", 6, BOTH, {}, 2, marks=FULL),
]


@pytest.mark.parametrize(("name", "layers", "axes", "how"), CASES)
def test_level_3_has_the_losses_of_level_0(name: str, layers: int, axes: Any, how: Any) -> None:
    have_equal_losses(name, layers, axes, how, 3)


@pytest.mark.parametrize(("name", "layers", "axes", "how", "zero"), LOWER)
def test_levels_1_and_2_have_the_losses_of_level_0(
    name: str, layers: int, axes: Any, how: Any, zero: int
) -> None:
    have_equal_losses(name, layers, axes, how, zero)


def have_equal_losses(name: str, layers: int, axes: Any, how: Any, zero: int) -> None:
    expected = trained(LOSSES[name], layers, axes, 0, **how)
    off = 1e-2 if name == "bfloat16" else 1e-5
    np.testing.assert_allclose(trained(LOSSES[name], layers, axes, zero, **how), expected, rtol=off)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("jitted", {}),
        ("looked up", {}),
        pytest.param("plain", {}, marks=FULL),
        pytest.param("plain", {"remat": "nothing_saveable"}, marks=FULL),
        pytest.param("marked", {"remat": "block"}, marks=FULL),
        pytest.param("plain", {"remat": "block"}, marks=FULL),
        pytest.param("computed again", {}, marks=FULL),
    ],
)
def test_no_device_holds_all_layers(name: str, how: Any) -> None:
    """Gathered before the loop, and in its backward pass, they would be twice the parameters."""
    shapes = jax.eval_shape(lambda: weights(16, 128, 512))
    program = mw.jax_program(LOSSES[name], shapes, optax.adam(0.01))
    report = mw.dry_run(
        program,
        jax.ShapeDtypeStruct((64, 128), "float32"),
        strategy=mw.Sharded(mw.Mesh(DATA), {}, batch="data", zero=3, **how),
        target="cpu:8",
    )
    parameters = 4 * sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert report.peak_bytes < 1.35 * parameters
