"""Plans for serving in stages: chosen where one device does not hold the model and it pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.frontends.forwards import Forwards
from meshwright.frontends.serving_dry_runs import dry_run_of_serving
from meshwright.frontends.staged_forwards import StagedForwards
from meshwright.stages.pipeline import Pipeline
from meshwright.targets.hardware import Hardware, Link
from meshwright.targets.target import Target

WIDTH, BLOCKS = 64, 8
ROW = jax.ShapeDtypeStruct((1, WIDTH), "float32")
BLOCK_BYTES = 4 * WIDTH * WIDTH
SLOW_LINKS = Hardware(  # a collective costs more than what it saves
    "slow links",
    (("float32", 1e12),),
    memory_bytes=1 << 30,
    memory_bandwidth_bytes_per_s=1e9,
    links=(Link("shared", "shared", 1e8, 1e-5),),
)
GOAL = mw.ServingGoal("throughput", (1, 8))


def build(width: int = WIDTH) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input([width], name="x")
    for number in range(BLOCKS):
        x = keras.layers.Dense(width, "tanh", use_bias=False, name=f"block_{number}")(x)
    return keras.Model(inputs, x, name="deep")


def planned(limit: float, goal: Any = GOAL, hardware: Hardware = SLOW_LINKS, **how: Any) -> mw.Plan:
    """The plan where a device holds so many blocks."""
    limit_bytes = int(limit * BLOCK_BYTES)
    options = {"objective": goal, "hardware": hardware, "memory_limit": limit_bytes, **how}
    return mw.plan(build(), ROW, **({"target": "cpu:8"} | options))


def test_the_server_of_a_plan_with_stages_holds_and_takes_what_the_plan_says() -> None:
    plan = planned(4.8)
    assert plan.axes == (("stage", 2),)
    assert plan.serving is not None
    assert plan.serving.copies == 4
    assert mw.Plan.from_json(plan.to_json()) == plan
    report = mw.dry_serve(
        build(), ROW, strategy=plan.strategy(plan.mesh), target="cpu:2", hardware=SLOW_LINKS,
        rows=plan.serving.buckets, compile=False,
    )  # fmt: skip
    for batch, dry in zip(plan.serving.batches, report.batches, strict=True):
        assert (batch.rows, batch.latency_s, batch.interval_s) == (
            dry.rows, dry.latency_s, dry.interval_s,
        )  # fmt: skip
        assert batch.rows_per_s == dry.rows_per_s
        assert dry.latency_s / 2 <= dry.interval_s < dry.latency_s
    chosen, whole = plan.chosen, plan.named["without stages"]
    assert chosen.time_s == plan.serving.batches[-1].latency_s
    assert plan.rows_per_s(chosen) == 4 * plan.serving.batches[-1].rows_per_s
    assert plan.rows_per_s(chosen) > plan.rows_per_s(whole)
    text = str(plan)
    assert "next batch" in text
    assert "schedule" not in text
    assert "without stages" in plan.to_html()
    x = np.random.default_rng(0).normal(size=[8, WIDTH]).astype("float32")
    model = build()
    with mw.Server(model, plan) as server:
        (answer,) = server.answer({"x": x}).outputs.values()
        status = server.model("deep").status()
    assert list(status.bytes_by_device.values()) == [4 * BLOCK_BYTES] * 2
    np.testing.assert_allclose(answer, model(x), atol=2e-6)


def test_each_stage_is_laid_out_by_itself_where_it_takes_several_devices() -> None:
    fast = replace(SLOW_LINKS, links=(Link("shared", "shared", 1e12, 0.0),))
    plan = planned(1.5, mw.ServingGoal("latency", (8,)), fast)
    others = {*plan.runners_up, *plan.named.values(), plan.chosen}
    staged = [option for option in others if option.pipeline is not None]
    assert any(len(option.axes) > 1 for option in staged)
    for option in staged:
        assert option.axes[0][0] == "stage"
        assert option.held_bytes <= plan.limit_bytes


@pytest.mark.full
def test_verified_stages_have_the_figures_of_their_compiled_dry_run() -> None:
    plan = planned(4.8, mw.ServingGoal("throughput", (8,)), target="cpu:2", verify=1)
    assert plan.chosen.pipeline is not None
    assert plan.is_compiled
    report = mw.dry_serve(
        build(), ROW, strategy=plan.strategy(plan.mesh), target="cpu:2", hardware=SLOW_LINKS,
        rows=(8,),
    )  # fmt: skip
    assert plan.chosen.dry_run_time_s == report.batches[0].latency_s
    assert plan.chosen.interval_s == report.batches[0].interval_s
    assert plan.chosen.dry_run_peak_bytes == report.batches[0].report.peak_bytes


def test_stages_hold_what_no_axis_splits() -> None:
    with mw.abstract():
        odd = build(67)
    row = jax.ShapeDtypeStruct((1, 67), "float32")
    options: Any = {"target": "cpu:8", "objective": GOAL, "hardware": SLOW_LINKS}
    plan = mw.plan(odd, row, memory_limit=int(2.9 * 4 * 67 * 67), **options)
    assert plan.axes == (("stage", 4),)
    assert "stages: without them nothing fits" in str(plan)
    with pytest.raises(mw.PlanError, match=r"8 stages: (more than|one of them takes)"):
        mw.plan(odd, row, memory_limit=4 * 67 * 67, **options)
    with pytest.raises(mw.PlanError) as raised:
        mw.plan(odd, row, memory_limit=4 * 67 * 67, axes="model=8", **options)
    assert "stages" not in str(raised.value)


def test_a_limit_of_nothing_is_said_once() -> None:
    with pytest.raises(mw.PlanError) as raised:
        planned(0)
    assert str(raised.value) == "memory_limit must be 1 byte or more; received 0."


def test_a_model_that_a_device_holds_has_no_stages() -> None:
    plan = planned(20)
    assert plan.chosen.num_devices == 1
    assert all(option.pipeline is None for option in (*plan.runners_up, *plan.named.values()))


@pytest.mark.parametrize("axis", ["model", None], ids=["blocks alike", "one lies otherwise"])
def test_stages_that_are_alike_are_estimated_once(axis: str | None) -> None:
    layouts = {"block_5/kernel": [None, axis], ".*": [None, "model"]}
    placement = mw.Sharded(mw.Mesh({"stage": 4, "model": 2}), layouts, batch=None).placement
    forwards, pipeline = Forwards(build(), ROW), Pipeline("stage", 4)
    target = Target.of("cpu:8")
    staged = StagedForwards(forwards, placement, pipeline, target, compiles=False, is_named=False)
    # The first stage has the inputs, and the last one tanh more than the others.
    assert [stage.like for stage in staged.on(8)] == [None, None, 1 if axis else None, None]
    once, each_by_itself = (
        dry_run_of_serving(
            forwards, placement, pipeline, target, SLOW_LINKS,
            rows=[8], compile=False, timeout_s=60, is_named=is_named,
        ).batches[0]
        for is_named in (False, True)
    )  # fmt: skip
    assert once.latency_s == each_by_itself.latency_s
    assert once.interval_s == each_by_itself.interval_s
    assert once.report.peak_bytes == each_by_itself.report.peak_bytes
