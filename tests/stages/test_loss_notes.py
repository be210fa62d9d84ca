"""Losses that are not the mean of their micro-batches' losses: a note says so, and a warning."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.stages.staged import Staged

MICRO_BATCHES, WIDTH = 4, 8
DRAW = np.random.default_rng(0)
BATCH = {
    "x": DRAW.normal(size=[16, WIDTH]).astype("float32"),
    "words": DRAW.integers(0, WIDTH, [16]).astype("int32"),
}


def by_row(x: Any, words: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x, words)


def contrastive(x: Any, words: Any) -> Any:
    return jnp.mean(by_row(x @ x.T, jnp.arange(len(x))))


def masked(x: Any, words: Any) -> Any:
    return jnp.sum(by_row(x, words) * (words > 0)) / jnp.maximum(jnp.sum(words > 0), 1)


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "mean": (lambda x, words: jnp.mean(by_row(x, words)) + 0.1 * jnp.mean(x**2), ""),
    "sum": (lambda x, words: jnp.sum(by_row(x, words)), "a sum over rows, and a step takes the"),
    "half of a sum": (
        lambda x, words: 0.5 * jnp.sum(x**2),
        "a sum over rows, and a step takes the",
    ),
    "half of a mean": (lambda x, words: 0.5 * jnp.mean(x**2), ""),
    "root": (lambda x, words: jnp.sqrt(jnp.mean(x**2)), r"rows meet in the loss .* \(sqrt\)"),
    "masked": (masked, r"rows meet in the loss .* \(max\)"),
    "contrastive": (contrastive, r"rows meet in the loss .* \(dot_general\)"),
}


def program(name: str) -> mw.Program:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for weight in params["blocks"]:
            x = x + jnp.tanh(x @ weight)
        return LOSSES[name][0](x, batch["words"])

    weights = [jnp.eye(WIDTH) * number / 4 for number in range(1, 5)]
    return mw.jax_program(loss, {"blocks": weights}, optax.sgd(0.01), batch=BATCH)


@pytest.mark.parametrize("name", LOSSES)
def test_a_note_says_where_a_loss_is_not_the_mean_of_its_micro_batches(name: str) -> None:
    placement = mw.Placement.of(mw.Mesh({"stage": 2}), batch=None, unmatched="replicate")
    staged = Staged.of(program(name), placement, mw.Pipeline("stage", MICRO_BATCHES))
    _, expected = LOSSES[name]
    assert re.fullmatch(f".*{expected}.*" if expected else "", "\n".join(staged.notes))
    alone = Staged.of(program(name), placement, mw.Pipeline("stage", 1))
    assert alone.notes == ()


def test_of_a_sum_over_rows_the_mean_is_taken_with_a_warning() -> None:
    def changes(stages: int, **how: Any) -> np.ndarray:
        mesh = mw.create_mesh({"stage": stages}, devices=jax.devices()[:stages])
        placement = mw.Placement.of(mesh, batch=None, unmatched="replicate")
        trainer = mw.Trainer(program("sum"), placement, mw.StepOptions(**how))
        state, _ = trainer.train(trainer.init(), [BATCH])
        return np.asarray(trainer.unpadded(state).params["blocks/0"]) - np.eye(WIDTH) / 4

    expected = changes(1)
    with pytest.warns(mw.MeshwrightWarning, match="of 4 micro-batches, which is 1/4 of it"):
        piped = changes(2, pipeline=mw.Pipeline("stage", MICRO_BATCHES))
    np.testing.assert_allclose(MICRO_BATCHES * piped, expected, rtol=2e-4, atol=1e-7)


def test_what_needs_all_rows_of_a_batch_is_told_that_it_has_those_of_a_micro_batch() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for weight in params:
            x = x + jnp.tanh(x @ weight)
        return jnp.mean((x @ x.T - batch["pairs"]) ** 2)

    batch = {"x": BATCH["x"], "pairs": np.eye(16, dtype="float32")}
    program = mw.jax_program(loss, [jnp.eye(WIDTH)] * 2, optax.sgd(0.01), batch=batch)
    mesh = mw.create_mesh({"stage": 2}, devices=jax.devices()[:2])
    trainer = mw.Trainer(
        program,
        mw.Placement.of(mesh, batch=None),
        mw.StepOptions(pipeline=mw.Pipeline("stage", MICRO_BATCHES)),
    )
    with pytest.raises(TypeError, match="incompatible shapes") as raised:
        trainer.step(trainer.init(), trainer.put(batch))
    assert "a micro-batch of the pipeline: 4 of 16 rows." in " ".join(raised.value.__notes__)
