"""A plan for latency or throughput: layouts, batches and precision, and a server that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from click.testing import CliRunner

import meshwright as mw
from meshwright.planning.search.plan import PlannedBatch
from meshwright.targets.hardware import Hardware, Link

ROW = jax.ShapeDtypeStruct((1, 64), "float32")
FAST = Hardware(  # links that are worth a split, and products that cost nothing
    "fast",
    (("float32", 1e15),),
    memory_bytes=1 << 30,
    memory_bandwidth_bytes_per_s=1e9,
    links=(Link("shared", "shared", 1e12, 0.0),),
)


def dense(width: int = 1024) -> keras.Model:
    inputs = keras.Input([64], name="x")
    hidden = keras.layers.Dense(width, "relu", name="up")(inputs)
    return keras.Model(inputs, keras.layers.Dense(8, name="down")(hidden), name="small")


def shapes() -> keras.Model:
    with mw.abstract():
        return dense()


def large() -> mw.Program:
    def forward(params: dict, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["up"]) @ params["down"]

    params = {
        "up": jax.ShapeDtypeStruct((64, 1 << 20), "bfloat16"),
        "down": jax.ShapeDtypeStruct((1 << 20, 64), "bfloat16"),
    }
    return mw.jax_program(forward, params, optax.sgd(1.0), forward=forward)


def test_latency_splits_what_is_read_and_throughput_copies_it() -> None:
    batch = jax.ShapeDtypeStruct((1, 64), "bfloat16")
    program, weight_bytes = large(), 2 * 2 * 64 * (1 << 20)
    one, many = (
        mw.plan(program, batch, target="h100:8", objective=mw.ServingGoal(aim, (1, 2, 64)))
        for aim in ("latency", "throughput")
    )
    assert one.serving is not None
    assert many.serving is not None
    assert (one.mesh.size, one.serving.copies, one.serving.rows) == (8, 1, 1)
    assert one.batch == ()
    assert (many.mesh.size, many.serving.copies, many.serving.rows) == (1, 8, 64)
    # What is said of a batch is what the dry run of serving says, weights to the byte.
    report = mw.dry_serve(
        program,
        batch,
        strategy=one.placement(),
        target="h100:8",
        rows=one.serving.buckets,
        compile=False,
    )
    assert report.weight_bytes == weight_bytes // 8
    assert one.serving.batches == tuple(
        PlannedBatch(batch.rows, batch.latency_s, batch.report.peak_bytes)
        for batch in report.batches
    )
    assert report.batches[0].report.collectives  # those of the forward pass are counted
    assert mw.Plan.from_json(many.to_json()) == many
    # One device reads all weights for each batch: a batch of 1 takes as long as one of 2.
    assert 1 not in many.serving.buckets
    assert any("no batch of 1: it takes" in note for note in many.notes)
    assert "plan for serving on h100:8, estimated, not compiled: most throughput" in str(many)
    assert "of 8 copies" in str(many)
    assert "micro-batches" not in str(many)
    page = many.to_html()
    assert "The batches that are compiled" in page
    assert "the most throughput" in page


def test_a_narrower_type_is_chosen_where_it_is_faster_or_alone_fits() -> None:
    own, both = (
        mw.plan(
            shapes(),
            ROW,
            target="h100:1",
            objective=mw.ServingGoal("latency", precisions=precisions),
        )
        for precisions in (("own",), None)
    )
    assert own.serving is not None
    assert both.serving is not None
    assert (own.serving.precision, both.serving.precision) == (None, "bfloat16")
    assert both.chosen.peak_bytes < own.chosen.peak_bytes
    assert "precision" not in str(own.why)  # there was none to compare with
    (reason,) = (str(reason) for reason in both.why if "precision" in str(reason))
    assert reason.startswith("precision bfloat16: the model's own precision takes")
    assert "bfloat16 takes" not in reason
    limit = both.serving.batches[0].peak_bytes
    assert limit is not None
    goal = mw.ServingGoal("latency", rows=(1,))
    least = mw.plan(shapes(), ROW, target="h100:1", objective=goal, memory_limit=limit + 1024)
    assert least.serving is not None
    assert least.serving.precision == "bfloat16"
    assert "the model's own precision does not fit" in str(least)
    with pytest.raises(mw.PlanError, match=r"(?s)the model's own precision: .*bfloat16: "):
        mw.plan(shapes(), ROW, target="h100:1", objective="latency", memory_limit=1000)
    with pytest.raises(mw.PlanError, match=r"(?s)precisions must list .*received \['int4'\]"):
        mw.ServingGoal("latency", precisions=["int4"])
    narrow = mw.ServingGoal("latency", [1], ["int8"])
    eight = mw.plan(large(), ROW, target="h100:1", objective=narrow)
    assert eight.serving is not None
    assert eight.serving.precision == "int8"
    with pytest.raises(mw.PlanError, match="rows must be sizes of batches"):
        mw.ServingGoal("latency", rows=[0])


def test_a_plan_serves_with_its_mesh_batches_and_precision(tmp_path: Path) -> None:
    result = mw.plan(
        shapes(),
        ROW,
        target="cpu:8",
        objective=mw.ServingGoal("latency", (2, 8), ["bfloat16"]),
        hardware=FAST,
    )
    result.save(tmp_path / "serve.json")
    plan = mw.Plan.load(tmp_path / "serve.json")
    assert plan.mesh.size == 8
    assert plan.serving is not None
    keras.utils.set_random_seed(0)
    model = dense()
    x = np.random.default_rng(0).normal(size=[2, 64]).astype("float32")
    with mw.Server(model, plan) as server:
        served: Any = server.model("small")
        status = served.status()
        (answer,) = server.answer({"x": x}).outputs.values()
        forward = served.forward
    assert status.mesh == dict(plan.axes)
    assert tuple(shape.rows for shape in forward.shapes) == plan.serving.buckets
    assert {weight.dtype for weight in status.weights} == {"bfloat16"}
    report = mw.dry_serve(
        shapes(), ROW, strategy=plan.placement(), target="cpu:8", rows=plan.serving.buckets,
        precision="bfloat16", hardware=FAST, compile=False,
    )  # fmt: skip
    assert set(status.bytes_by_device.values()) == {report.weight_bytes}
    np.testing.assert_allclose(answer, model(x), atol=0.05)
    with mw.Server(model, plan, buckets=[4], precision=None) as server:
        served = server.model("small")
        assert tuple(shape.rows for shape in served.forward.shapes) == (4,)
        assert {weight.dtype for weight in served.status().weights} == {"float32"}


def test_kernels_of_eight_bits_are_laid_out_by_the_plan(tmp_path: Path) -> None:
    model = dense(4096)
    for name in ("up", "down"):
        model.get_layer(name).quantize("int8")
    goal = mw.ServingGoal("latency", rows=(1,), precisions=["own"])
    plan = mw.plan(model, ROW, target="cpu:8", objective=goal, hardware=FAST)
    assert plan.mesh.size == 8
    assert plan.serving is not None
    (batch,) = plan.serving.batches
    assert batch.peak_bytes == pytest.approx(plan.chosen.peak_bytes, rel=0.01)  # not whole
    with mw.abstract():
        wide = dense(4096)
    goal = mw.ServingGoal("latency", rows=(1,), precisions=["int8"])
    same = mw.plan(wide, ROW, target="cpu:8", objective=goal, hardware=FAST)
    assert same.serving is not None
    assert (same.chosen, same.layouts) == (plan.chosen, plan.layouts)
    assert (same.serving.precision, same.serving.batches) == ("int8", plan.serving.batches)
    plan.save(tmp_path / "plan.json")
    with mw.Server(model, tmp_path / "plan.json") as server:
        bytes_by_device = server.model("small").status().bytes_by_device
    whole = sum(weight.value.nbytes for weight in model.weights)
    assert max(bytes_by_device.values()) < whole / 7


BUILD = """
import jax, keras
def build():
    model = keras.Sequential([keras.Input([64], name="x"), keras.layers.Dense(32)], name="small")
    model.compile("sgd", "mse")
    return model, tuple(jax.ShapeDtypeStruct((8, size), "float32") for size in (64, 32))
"""


def test_the_commands_plan_and_serve_by_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.cli import main
    from meshwright.commands.serving import ServeOptions, server_for

    monkeypatch.chdir(tmp_path)
    Path("planned.py").write_text(BUILD)
    words = ["plan", "planned.py:build", "--target", "h100:2", "--objective", "throughput"]
    result = CliRunner().invoke(main, [*words, "--rows", "1,16", "--save", "serve.json"])
    assert result.exit_code == 0, result.output
    assert "plan for serving on h100:2" in result.output
    assert "of 2 copies" in result.output
    assert mw.Plan.load("serve.json").objective == "throughput"
    for wrong, message in (
        (["--batch-size", "8"], "use --rows"),
        (["--objective", "time", "--rows", "8"], "--rows need a plan for serving"),
    ):
        result = CliRunner().invoke(main, [*words, *wrong])
        assert result.exit_code
        assert message in result.output
    dense(8).save("small.keras")
    with pytest.raises(mw.ServingError, match="leave --mesh out"):
        server_for(
            ServeOptions(Path("small.keras"), plan=Path("serve.json"), mesh=mw.Mesh({"a": 1}))
        )
