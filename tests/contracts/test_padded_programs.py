"""Programs of plain JAX whose parameters are stored padded: every number is one device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshwright as mw

MESHES = {"4x2": {"batch": 4, "model": 2}, "2x4": {"batch": 2, "model": 4}}
RULES = {
    "first": mw.Layout([None, "model"], pad=True),
    "second": mw.Layout(["model", None], pad=True),
}


def program(seed: int = 0) -> mw.Program:
    draw = np.random.default_rng(seed)
    params = {
        "first": draw.normal(size=[6, 11]).astype("float32"),
        "second": draw.normal(size=[11, 3]).astype("float32"),
    }

    def loss(params: Any, batch: Any) -> Any:
        hidden = jax.numpy.tanh(batch["x"] @ params["first"])
        return jax.numpy.mean((hidden @ params["second"] - batch["y"]) ** 2)

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=1e-2))
    return mw.jax_program(loss, params, optimizer)


def batches(count: int = 4) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(3)
    return [
        {
            "x": draw.normal(size=[8, 6]).astype("float32"),
            "y": draw.normal(size=[8, 3]).astype("float32"),
        }
        for _ in range(count)
    ]


def test_the_trainer_agrees_and_goes_on_elsewhere(tmp_path: Path) -> None:
    trained, visible = program(), batches()
    one = mw.Trainer(trained, mw.Placement.of(mw.create_mesh({"batch": 1}, jax.devices()[:1])))
    expected, _ = one.train(one.init(), visible)
    here = mw.Trainer(trained, mw.Placement.of(mw.create_mesh(MESHES["2x4"]), RULES))
    with mw.Checkpoints(tmp_path) as checkpoints:
        state, _ = here.train(here.init(), visible[:2], checkpoints=checkpoints)
    assert state.params["first"].shape == (6, 12)
    (first,) = (value for path, value in state.slots.items() if path.endswith("mu/first"))
    assert first.sharding.shard_shape(first.shape) == (6, 3)
    assert here.step._cache_size() == 1
    assert here.unpadded(state).params["first"].shape == (6, 11)
    there = mw.Trainer(trained, mw.Placement.of(mw.create_mesh(MESHES["4x2"]), RULES))
    with mw.Checkpoints(tmp_path) as checkpoints:
        state, _ = there.train(there.init(), visible, checkpoints=checkpoints)
    for part, values in zip(there.unpadded(state), expected, strict=True):
        for path, value in values.items():
            assert np.abs(np.asarray(part[path]) - np.asarray(value)).max() <= 2e-5, path


@pytest.mark.full
def test_the_check_compares_padded_parameters_too() -> None:
    batch = batches(1)[0]
    mw.testing.assert_equivalent(lambda: (program(), batch), [MESHES["2x4"]], RULES, steps=2)
