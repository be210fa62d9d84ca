"""What each process of a pipeline runs: a step by each schedule, against JAX's own gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from small_transformer import KEEPS_GRADIENTS, batch_of, loss, params_of

import meshwright as mw

BLOCKS = 4
BY_ROWS = {"stage": 2, "data": 2}
SPLIT = {"up": [None, "model"], "down": ["model", None]}


def transformer_loss(params: Any, batch: Any) -> Any:
    return loss(params, batch)[0]


def weights(**dims: tuple[int, int]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {name: draw.normal(size=of).astype("float32") / 2 for name, of in dims.items()}


ROWS = weights(x=(16, 6))["x"]
CHAIN = [weights(up=(6, 8), down=(8, 6)) for _ in range(BLOCKS)]
DIFFERING = weights(a=(6, 8), b=(8, 12), c=(12, 4))
TOWERS = weights(left=(6, 4), right=(6, 4))


def chain_loss(params: Any, x: Any) -> Any:
    for own in params:
        x = x + jnp.tanh(x @ own["up"]) @ own["down"]
    return jnp.mean(x**2)


def differing_loss(params: Any, x: Any) -> Any:
    return jnp.mean(jax.nn.sigmoid(jnp.sin(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]))


def towers_loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params["left"]) * jnp.sin(x @ params["right"]))


TRANSFORMER = transformer_loss, params_of(BLOCKS), batch_of()
CASES = {
    "1f1b": (*TRANSFORMER, BY_ROWS, mw.Pipeline("stage", 4), {}),
    "zero_bubble": (*TRANSFORMER, BY_ROWS, mw.Pipeline("stage", 4, "zero_bubble"), {}),
    "gpipe, model axis": (
        *(chain_loss, CHAIN, ROWS, {"stage": 2, "model": 2}),
        mw.Pipeline("stage", 2, "gpipe"),
        {"layouts": SPLIT, "batch": None},
    ),
    "circular, zero=2": (
        *(chain_loss, CHAIN, ROWS, BY_ROWS),
        mw.Pipeline("stage", 2, "circular", 2),
        {"zero": 2},
    ),
    "differing": (differing_loss, DIFFERING, ROWS, BY_ROWS, mw.Pipeline("stage", 2), {}),
    "branches": (
        *(towers_loss, TOWERS, ROWS, {"branch": 2, "data": 2}),
        mw.Branches("branch"),
        {},
    ),
}


def error(
    loss: Any, params: Any, batch: Any, axes: dict[str, int], how: Any, more: dict[str, Any]
) -> float:
    """The largest difference to the gradients of one device, by their largest."""
    grads = jax.jit(jax.grad(loss))(params, batch)
    expected = {
        "/".join(key(part) for part in path): v for path, v in jax.tree.leaves_with_path(grads)
    }
    placement = mw.Placement.of(mw.create_mesh(axes), **{"batch": "data", **more})
    program = mw.jax_program(loss, params, KEEPS_GRADIENTS, batch=batch)
    trainer = mw.Trainer(program, placement, mw.StepOptions(pipeline=how))
    state, _ = trainer.step(trainer.init(), trainer.put(batch))
    return difference(process_allgather(trainer.unpadded(state).slots, tiled=True), expected)


def key(part) -> str:
    return str(getattr(part, "key", getattr(part, "idx", part)))


def difference(slots, expected) -> float:
    """Slots are the gradients, under names that end with their paths."""
    largest = max(np.abs(values).max() for values in expected.values())
    worst = 0.0
    for path, values in expected.items():
        (slot,) = [name for name in slots if name.endswith(path)]
        worst = max(worst, float(np.abs(slots[slot] - values).max() / largest))
    return worst


if __name__ == "__main__":
    assert jax.process_count() == 2
    print({name: error(*case) for name, case in CASES.items()}, flush=True)
