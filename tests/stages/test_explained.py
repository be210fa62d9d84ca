"""What ``explain`` says of stages: each layer's, and what was done in another way, and why."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from small_transformer import program_of

import meshwright as mw
from meshwright.step.assemble import assemble


def explained(program: mw.Program, axes: dict[str, int], pipeline: mw.Pipeline) -> Any:
    mesh = mw.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    placement = mw.Placement.of(mesh, batch="data" if "data" in axes else None)
    return assemble(program, placement, mw.StepOptions(pipeline=pipeline)).explained


def made(loss: Any, params: Any, batch: Any) -> mw.Program:
    return mw.jax_program(loss, params, optax.sgd(0.1), batch=batch)


def test_every_layer_has_its_stage() -> None:
    report = explained(program_of(10), {"stage": 4}, mw.Pipeline("stage", 4))
    assert list(report.layers) == [
        ("embed", "0"),
        ("blocks/0 to blocks/9", "3 on 0, 3 on 1, 2 on 2, 2 on 3"),
        ("head", "3"),
    ]
    assert "blocks/0 to blocks/9  3 on 0, 3 on 1, 2 on 2, 2 on 3" in str(report)
    around = explained(program_of(4), {"stage": 2}, mw.Pipeline("stage", 4, "circular", 2))
    assert around.layers[1] == ("blocks/0 to blocks/3", "0, 1, 0, 1")


def test_stages_that_differ_say_why_and_what_is_passed_on_whole() -> None:
    def loss(params: Any, x: Any) -> Any:
        x = jnp.sin(x @ params["in"]["w"])
        x = jnp.tanh(x.reshape(-1, 32) @ params["half"]["w"])  # two rows for each of a batch
        return jnp.cos(x @ params["out"]["w"]).mean()

    dims = {"in": (64, 64), "half": (32, 48), "out": (48, 8)}
    params = {name: {"w": np.ones(of, "float32")} for name, of in dims.items()}
    program = made(loss, params, np.ones([64, 64], "float32"))
    cut = mw.Pipeline("stage", 2, cuts=["out"])
    report = explained(program, {"stage": 2, "data": 2}, cut)
    assert report.layers == (("in to half (2 layers)", "0"), ("out", "1"))
    why, whole = report.notes
    assert whole.startswith("12 KiB of what a stage passes on of a micro-batch have no dim of its")
    assert why == "the stages differ: the model has no chain of equal blocks to cut into 2 stages"
    assert f"note: {why}" in str(report)


def test_blocks_whose_rows_meet_say_that_gradients_are_summed_for_every_micro_batch() -> None:
    def loss(params: Any, x: Any, meet: bool) -> Any:
        for weight in params:
            x = jnp.tanh(x @ weight) - (x.mean(0) if meet else 0.0)
        return x.mean()

    params = [np.eye(4, dtype="float32") for _ in range(4)]
    for meet in (True, False):
        program = made(
            lambda params, x, meet=meet: loss(params, x, meet), params, np.ones([16, 4], "float32")
        )
        report = explained(program, {"stage": 2, "data": 2}, mw.Pipeline("stage", 2))
        assert any("for every micro-batch" in note for note in report.notes) == meet
