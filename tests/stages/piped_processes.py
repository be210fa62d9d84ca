"""What each process of a pipeline runs: a step by each schedule, against JAX's own gradients."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from small_transformer import batch_of, loss, params_of, program_of

import meshwright as mw

BLOCKS = 4
SCHEDULES = "1f1b", "zero_bubble"


def errors() -> dict[str, float]:
    """By schedule, the largest difference to the gradients of one device, by their largest."""
    batch = batch_of()
    grads = jax.grad(lambda params: loss(params, batch)[0])(params_of(BLOCKS))
    expected = {
        "/".join(key(part) for part in path): v for path, v in jax.tree.leaves_with_path(grads)
    }
    placement = mw.Placement.of(mw.create_mesh({"stage": 2, "data": 2}), batch="data")
    results = {}
    for schedule in SCHEDULES:
        pipeline = mw.Pipeline("stage", 4, schedule)
        trainer = mw.Trainer(program_of(BLOCKS), placement, mw.StepOptions(pipeline=pipeline))
        state, _ = trainer.step(trainer.init(), trainer.put(batch))
        slots = process_allgather(trainer.unpadded(state).slots, tiled=True)
        results[schedule] = difference(slots, expected)
    return results


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
    print(errors(), flush=True)
