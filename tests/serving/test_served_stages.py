"""A model cut into stages answers as on one device, and batches follow each other through them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import meshwright as mw
from meshwright.serving.turns import turn
from meshwright.targets.hardware import hardware_of

ROWS = np.random.default_rng(0).normal(size=[6, 8]).astype("float32")
TOLERANCE = 2e-6


def build(blocks: int = 3) -> keras.Model:
    """Blocks that add to their input."""
    keras.utils.set_random_seed(3)
    x = keras.Input([8], name="x")
    h: Any = x
    for number in range(blocks):
        y = layers.Dense(8, "gelu", name=f"block_{number}")(h)
        h = layers.LayerNormalization(name=f"norm_{number}")(h + y)
    return keras.Model(x, layers.Dense(2, name="last")(h), name="stacked")


def strategy(axes: dict[str, int], **pipeline: Any) -> mw.Sharded:
    mesh = mw.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    batch = "batch" if "batch" in axes else None
    stages = mw.Pipeline("stage", micro_batches=2, **pipeline)
    return mw.Sharded(mesh, batch=batch, pipeline=stages)


@pytest.mark.parametrize(
    "axes", [{"stage": 2}, pytest.param({"batch": 2, "stage": 2}, marks=pytest.mark.full)], ids=str
)
def test_stages_answer_as_one_device_and_hold_their_own_weights(axes: dict[str, int]) -> None:
    model = build()
    expected = np.asarray(model(ROWS))
    with mw.Server(model, strategy(axes), buckets=[4]) as server:
        actual = server.answer({"x": ROWS}).outputs["last"]
        status = server.model("stacked").status()
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    bytes_by_device = status.bytes_by_device
    whole = sum(4 * math.prod(weight.shape) for weight in model.weights)
    assert sum(bytes_by_device.values()) == whole * axes.get("batch", 1)
    assert max(bytes_by_device.values()) < 0.7 * whole
    assert dict(status.mesh) == axes


def texts() -> keras.Model:
    """A model with a tied embedding, of which no parameter trains once it is of eight bits."""
    keras.utils.set_random_seed(5)
    ids = keras.Input([4], dtype="int32", name="ids")
    embed: Any = layers.ReversibleEmbedding(32, 8, name="embed")
    h: Any = embed(ids)
    for number in range(2):
        wide = layers.Dense(32, "gelu", use_bias=False, name=f"block_{number}")(h)
        h = h + layers.Dense(8, use_bias=False, name=f"narrow_{number}")(wide)
    return keras.Model(ids, embed(h, reverse=True), name="texts")


def function(params: Any, x: Any) -> Any:
    for path in ("one", "two", "three"):
        x = jnp.tanh(x @ params[path])
    return x


def of_eight_bits(kind: str) -> tuple[Any, dict[str, Any], Any, list[int]]:
    """What is served, an input of it, and the bytes of each of its stages."""
    if kind == "keras":
        ids = np.arange(8, dtype="int32").reshape(2, 4)
        return texts(), {}, ids, [32 * (8 + 4) + 2 * 8 * 32 + 4 * (8 + 32)] * 2
    rng = np.random.default_rng(6)
    params = {path: rng.normal(size=[8, 8]).astype("float32") for path in ("one", "two", "three")}
    block = 8 * 8 + 4 * 8
    options: Any = {"params": params, "example": ROWS, "name": "f"}
    return function, options, ROWS, [2 * block, block]


@pytest.mark.parametrize(("kind", "cut"), [("keras", "block_1"), ("program", "three")])
def test_eight_bits_by_stages_are_those_of_one_device(kind: str, cut: str) -> None:
    model, options, x, expected_bytes = of_eight_bits(kind)
    options |= {"precision": "int8", "buckets": [2]}
    name = "ids" if kind == "keras" else "input"
    own = model(x) if kind == "keras" else model(options["params"], x)
    with mw.Server(model, **options) as server:
        (expected,) = server.answer({name: x}).outputs.values()
    how = strategy({"stage": 2}, cuts=[cut])
    with mw.Server(model, how, sample={name: x}, **options) as server:
        loaded: Any = server.model(options.get("name", "texts"))
        (actual,) = loaded.answer({name: x}).outputs.values()
        status = loaded.status()
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    assert list(status.bytes_by_device.values()) == expected_bytes
    assert {weight.dtype for weight in status.weights} == {"int8", "float32"}
    (difference,) = loaded.differences
    assert 0 < difference.largest == pytest.approx(np.abs(actual - own).max(), rel=1e-3)


def test_the_next_batch_begins_while_a_later_stage_computes() -> None:
    with mw.Server(build(), strategy({"stage": 2}), buckets=[1]) as server:
        model: Any = server.model("stacked")
        first, second = model.forward._parts
        with turn(second.stage.source.mesh):  # the second stage waits
            futures = [model._submitted({"x": ROWS[:1]}, None).future for _ in range(2)]
            until_s = time.monotonic() + 60
            # The second stage has one and waits for its turn; the first is done with the other.
            while second._tasks.qsize() < 1 or not first._tasks.empty():
                assert time.monotonic() < until_s
                time.sleep(0.01)
            assert not any(future.done() for future in futures)
        for future in futures:
            np.testing.assert_array_equal(
                future.result(60).outputs["last"], futures[0].result(60).outputs["last"]
            )


def test_cuts_of_training_and_weights_that_several_stages_read() -> None:
    def forward(params: Any, x: Any) -> Any:
        for name in ("one", "two", "three"):
            x = jnp.tanh(x @ params[name]) * params["scale"]
        return {"y": x, "of": x.sum(-1)}

    rng = np.random.default_rng(1)
    params: Any = {n: rng.normal(size=[8, 8]).astype("float32") for n in ("one", "two", "three")}
    params["scale"] = np.float32(0.5)
    expected = forward(params, ROWS)
    how = strategy({"stage": 2}, cuts=["three"])
    with mw.Server(forward, how, params=params, example=ROWS, name="f", buckets=[2]) as server:
        answer = server.answer({"input": ROWS})
        bytes_by_device = server.model("f").status().bytes_by_device
    assert list(bytes_by_device.values()) == [2 * 256 + 4, 256 + 4]
    for name, values in expected.items():
        np.testing.assert_allclose(answer.outputs[name], values, atol=TOLERANCE)


def test_a_tied_embedding_is_held_by_both_stages_and_never_sent() -> None:
    def forward(params: Any, ids: Any) -> Any:
        x = params["embed"][ids]
        for number in range(2):
            x = x + jnp.tanh(x @ params[f"w{number}"])
        return x @ params["embed"].T

    rng = np.random.default_rng(4)
    params: Any = {"embed": rng.normal(size=[32, 8]).astype("float32")}
    params |= {f"w{n}": rng.normal(size=[8, 8]).astype("float32") for n in range(2)}
    ids = rng.integers(0, 32, [2, 5]).astype("int32")
    how = strategy({"stage": 2}, cuts=["w1"])
    with mw.Server(forward, how, params=params, example=ids, name="f", buckets=[2]) as server:
        model: Any = server.model("f")
        answer = model.answer({"input": ids})
        (compiled,) = model.forward._parts[1].compiled.values()
        bytes_by_device = model.status().bytes_by_device
    np.testing.assert_allclose(answer.outputs["output"], forward(params, ids), rtol=1e-5, atol=1e-5)
    assert [like.shape for like in compiled.entering] == [(2, 5, 8)]
    assert set(bytes_by_device.values()) == {4 * (32 * 8 + 8 * 8)}


@pytest.mark.parametrize(
    ("precision", "near"), [(None, 1e-4), pytest.param("int8", 0.05, marks=pytest.mark.full)]
)
def test_a_checkpoint_is_read_by_stages_and_the_next_one_swapped_in(
    precision: Any, near: float, tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    model = build()
    values = {
        path: [rng.normal(size=weight.shape).astype("float32") for weight in [variable] * 2]
        for variable in model.weights
        for path in [variable.path]
    }
    with mw.Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in (1, 2):
            params = {path: both[step - 1] for path, both in values.items()}
            checkpoints.save(step, mw.TrainState(params, {}, {}, {}))
    second = tmp_path / "step_2"
    second.rename(tmp_path / "later")
    options: Any = {"build": build, "checkpoint": tmp_path, "precision": precision, "buckets": [4]}
    with mw.Server(strategy=strategy({"stage": 2}), **options) as server:
        before = server.answer({"x": ROWS})
        (tmp_path / "later").rename(second)
        loaded: Any = server.model("stacked")
        assert loaded.reload()
        after = server.answer({"x": ROWS})
    assert (before.version, after.version) == ("1", "2")
    for number, answer in enumerate((before, after)):
        for variable in model.weights:
            variable.assign(values[variable.path][number])
        expected = np.asarray(model(ROWS))
        atol = near * np.abs(expected).max()
        np.testing.assert_allclose(answer.outputs["last"], expected, atol=atol)


def test_what_cannot_be_served_by_stages_says_why() -> None:
    with pytest.raises(mw.PipelineError, match="too few for 4 stages"):
        mw.Server(build(0), strategy({"stage": 4}))


def test_a_batch_is_a_step_of_each_process_so_agents_start_a_lost_group_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sections = list[str]()

    @contextlib.contextmanager
    def inside(section: str) -> Iterator[None]:
        sections.append(section)
        yield

    with mw.Server(build(), strategy({"stage": 2}), buckets=[1]) as server:
        monkeypatch.setattr("meshwright.serving.staged.inside", inside)
        server.answer({"x": ROWS[:1]})
    assert sections == ["step"]


def test_an_error_of_a_stage_fails_its_batch_alone() -> None:
    with mw.Server(build(), strategy({"stage": 2}), buckets=[1]) as server:
        model: Any = server.model("stacked")
        part = model.forward._parts[1]
        computed = part.computed

        def broken(*args: Any) -> Any:
            part.computed = computed
            raise RuntimeError("no memory")

        part.computed = broken
        with pytest.raises(mw.ModelFailedError, match="RuntimeError: no memory"):
            server.answer({"x": ROWS[:1]})
        assert server.answer({"x": ROWS[:1]}).version == "1"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["blocks", "eight bits"])
def test_a_dry_run_says_of_each_stage_what_is_served(kind: str) -> None:
    how, x, model = strategy({"batch": 2, "stage": 2}), ROWS, build()
    options: dict[str, Any] = {}
    if kind == "eight bits":
        how, options = strategy({"stage": 2}), {"precision": "int8"}
        model, _, x, _ = of_eight_bits("keras")
    mesh = how.mesh
    with mw.Server(model, how, buckets=[4], **options) as server:
        loaded: Any = server.model(model.name)
        held = loaded.status().bytes_by_device
        stages = loaded.forward._parts
        compiled = [
            part.compiled[loaded.forward.shapes[0]].call.memory_analysis() for part in stages
        ]
    likes = jax.ShapeDtypeStruct(x.shape, x.dtype)
    options |= {"strategy": how.on(mesh.abstract()), "target": f"cpu:{mesh.size}", "rows": [4]}
    report = mw.dry_serve(model, likes, **options)
    (batch,) = report.batches
    assert len(batch.stages) == 2
    for stage, part, served in zip(batch.stages, stages, compiled, strict=True):
        assert {held[f"cpu:{d.id}"] for d in part.stage.source.mesh.devices} == {stage.weight_bytes}
        memory: Any = stage.report.memory
        of_server = served.argument_size_in_bytes, served.temp_size_in_bytes
        received = memory.input_bytes + stage.weight_bytes, memory.temporary_bytes
        assert received == of_server
        assert memory.peak_bytes == sum(of_server) + served.output_size_in_bytes
    by_model = mw.dry_serve(model, likes, compile=False, **options).batches[0].stages
    for stage, other in zip(batch.stages, by_model, strict=True):
        assert other.weight_bytes == stage.weight_bytes
        assert other.received_bytes == stage.received_bytes
        assert other.report.flops == stage.report.flops
        assert other.report.peak_bytes == pytest.approx(stage.report.peak_bytes, rel=0.35)
    # The first axis of one mesh is that of the batch.
    assert ("note: the devices of a stage are taken to lie next to" in str(report)) == (
        kind == "blocks"
    )
    # What enters the second stage is what the first passes on: four rows of 8 numbers each.
    size = math.prod(x.shape[1:]) * (8 if kind == "eight bits" else 1)
    assert [stage.received_bytes for stage in batch.stages] == [0, 4 * 4 * size // (mesh.size // 2)]


def test_the_slowest_stage_sets_the_rows_per_second() -> None:
    how = strategy({"stage": 2}, cuts=["block_1"])
    like = jax.ShapeDtypeStruct((1, 8), "float32")
    known = replace(hardware_of("h100"), handover_s=1e-6)
    options: Any = {"strategy": how, "target": "h100:2", "compile": False, "rows": [64]}
    report: Any = mw.dry_serve(build(), like, hardware=known, **options)
    (batch,) = report.batches
    first, second = batch.stages
    link: Any = known.link("nvlink")
    assert second.received_bytes == 64 * 8 * 4
    assert second.receive_s == pytest.approx(link.latency_s + 64 * 8 * 4 / link.bytes_per_s)
    for stage in batch.stages:
        computing_s = stage.busy_s - stage.receive_s - 1e-6
        assert computing_s == pytest.approx(stage.report.step_time_s)
    assert batch.latency_s == pytest.approx(first.busy_s + second.busy_s + 3e-6)
    assert batch.bottleneck is second
    assert batch.rows_per_s == pytest.approx(64 / second.busy_s)
    text = str(report)
    assert "estimated, nothing was compiled: " in text
    assert "stage 1, from block_1/kernel: " in text
    assert text.endswith("(the bottleneck)")
    assert (
        report.devices_for(0.8 * 64 / second.busy_s, second.busy_s + batch.latency_s).devices == 2
    )
    with pytest.raises(mw.PlanError, match="is answered within"):
        report.devices_for(1, second.busy_s + 0.99 * batch.latency_s)
