"""A dry run of serving says what serving takes: bytes exactly, times by the roofline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import jax
import keras
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from test_server import LAYOUTS, build

import meshwright as mw
from meshwright.commands.dry_run import dry_run
from meshwright.commands.texts import PriceText
from meshwright.planning.prices import price_of
from meshwright.planning.serving import ServingReport
from meshwright.targets.hardware import hardware_of, load_hardware
from meshwright.targets.target import Target

X = jax.ShapeDtypeStruct((1, 8), "float32")


def built() -> tuple:
    """What the command line builds."""
    return build(), (X, jax.ShapeDtypeStruct((1, 4), "float32")), LAYOUTS


@pytest.mark.full
def test_weights_of_a_device_are_those_that_the_server_holds() -> None:
    strategy = mw.Sharded(mw.create_mesh({"batch": 2, "model": 4}), LAYOUTS, zero=1)
    serving = strategy.serving(strategy.mesh)
    with mw.abstract():
        model = build()
    report = mw.dry_serve(model, X, strategy=serving, target="cpu:8", rows=[1, 8])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        net = build()
    with mw.Server(net, serving, buckets=[8]) as server:
        status = server.model("small").status().bytes_by_device
    assert set(status.values()) == {report.weight_bytes}
    memory = report.batches[1].report.memory
    assert (memory.slot_bytes, memory.gradient_bytes) == (0, 0)
    assert memory.input_bytes == 4 * 8 * 4  # four of eight rows
    assert report.fits is None  # nothing is known of this machine
    assert report.batches[1].report.collectives[0].kind == "all-reduce"


def test_a_batch_takes_what_the_server_does_beside_the_forward_pass(tmp_path: Path) -> None:
    strategy = mw.Sharded(mw.Mesh({"batch": 1}))
    with mw.abstract():
        model = build()
    known = replace(hardware_of("h100"), handover_s=1e-3)
    (tmp_path / "mine.toml").write_text(known.to_toml())
    report = mw.dry_serve(
        model, X, strategy=strategy, target="h100:1", compile=False, rows=[8],
        hardware=load_hardware(tmp_path / "mine.toml"),
    )  # fmt: skip
    (batch,) = report.batches
    assert batch.latency_s == pytest.approx(batch.report.step_time_s + 3e-3)


def test_eight_bits_of_shapes_are_those_that_keras_makes_of_values() -> None:
    strategy = mw.Sharded(mw.create_mesh({"model": 8}), LAYOUTS, batch=None)
    options = {"strategy": strategy, "target": "h100:8", "compile": False, "rows": [8]}
    with mw.abstract():
        shapes = build()
    report = mw.dry_serve(shapes, X, precision="int8", **options)
    assert report.weight_bytes < mw.dry_serve(shapes, X, **options).weight_bytes
    assert {weight.dtype for weight in shapes.weights} == {"float32"}
    model = build()
    with mw.Server(model, strategy, precision="int8", buckets=[8]) as server:
        bytes_by_device = server.model("small").status().bytes_by_device
    assert set(bytes_by_device.values()) == {report.weight_bytes}
    for name in ("hidden", "last"):
        model.get_layer(name).quantize("int8")
    own = mw.dry_serve(model, X, **options)
    assert (own.weight_bytes, own.batches[0].latency_s, own.batches[0].report.peak_bytes) == (
        report.weight_bytes,
        report.batches[0].latency_s,
        report.batches[0].report.peak_bytes,
    )
    with pytest.raises(mw.ModelError, match=r"not supported for model 'small': .* is already quan"):
        mw.dry_serve(model, X, precision="int8", **options)
    with pytest.raises(mw.ModelError, match=r"precision must be 'bfloat16', .*received 'int4'"):
        mw.dry_serve(model, X, precision="int4", **options)
    for rows in ([], [8, 0]):
        with pytest.raises(mw.BatchError, match="rows must list sizes of batches of at least 1"):
            mw.dry_serve(model, X, **{**options, "rows": rows})


@pytest.mark.parametrize("precision", [None, "bfloat16", "int8"])
def test_the_command_knows_the_precision_of_a_server(
    precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = mw.Sharded(mw.create_mesh({"model": 8}), LAYOUTS, batch=None)
    with mw.Server(build(), strategy, precision=precision, buckets=[8]) as server:
        bytes_by_device = server.model("small").status().bytes_by_device
    reports: list[ServingReport] = []
    monkeypatch.setattr("meshwright.display.text.columns.print_text", reports.append)
    words = [
        "test_dry_serve:built",
        "--target",
        "h100:8",
        "--mesh",
        "batch=1,model=8",
        "--no-compile",
    ]
    options = [] if precision is None else ["--precision", precision]
    result = CliRunner().invoke(dry_run, [*words, "--serve", "--rows", "8", *options])
    assert result.exit_code == 0, (result.output, result.exception)
    assert set(bytes_by_device.values()) == {reports[0].weight_bytes}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "int8"], "--precision: only valid with --serve"),
        (["--rows", "8", "--qps", "9"], "--rows, --qps: only valid with --serve"),
        (["--serve", "--p99-ms", "9"], "--p99-ms: only valid with --qps"),
        (["--serve", "--measure"], "--measure: not supported with --serve"),
        (["--serve", "--save", "a", "--html", "b"], "--html, --save: not supported with --serve"),
        (["--serve", "--tolerance", "0.1"], "--tolerance: not supported with --serve"),
        (["--tolerance", "0.1"], "--tolerance: only valid with --check"),
    ],
)
def test_options_of_the_other_kind_of_dry_run_are_refused(options, message):
    refused = CliRunner().invoke(dry_run, ["test_dry_serve:built", "--target", "h100:8", *options])
    assert (refused.exit_code, message in refused.output) == (2, True), refused.output


def test_a_model_of_eight_bits_that_cannot_be_made_again_is_refused() -> None:
    class Own(keras.Model):
        def __init__(self, width: int) -> None:
            super().__init__(name="own")
            self.dense = keras.layers.Dense(width)

        def call(self, x: object) -> object:
            return self.dense(x)

        def get_config(self) -> dict:
            raise NotImplementedError("no configuration")

    strategy = mw.Sharded(mw.Mesh({"model": 8}), batch=None)
    options = {"strategy": strategy, "target": "h100:8", "compile": False, "precision": "int8"}
    with mw.abstract(), pytest.raises(mw.ModelError, match=r"'own', which Keras cannot make again"):
        mw.dry_serve(Own(8), X, **options)


def test_a_table_of_prices_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text('h100 = 2.5\n"v5p:2x2x1" = 4\n')
    table = PriceText()(str(tmp_path / "prices.toml"))
    assert table == {"h100": 2.5, "v5p:2x2x1": 4.0}
    assert price_of(Target.of("v5p:2x2x1"), table) == 4.0
    assert PriceText()("1.5") == 1.5
    (tmp_path / "prices.toml").write_text("h100 = -1")
    for text in (str(tmp_path / "prices.toml"), "much", "-1", str(tmp_path / "none.toml")):
        with pytest.raises(click.BadParameter):
            PriceText()(text)


def test_the_devices_that_a_load_takes() -> None:
    def forward(params: dict, x: jax.Array) -> jax.Array:
        return x @ params["w"]

    shapes = {"w": jax.ShapeDtypeStruct((8192, 8192), "bfloat16")}
    program = mw.jax_program(forward, shapes, optax.sgd(1.0), forward=forward)
    placement = mw.Placement.of(mw.Mesh({"model": 4}), {"w": [None, "model"]}, batch=None)
    x = jax.ShapeDtypeStruct((1, 8192), "bfloat16")
    options = {"strategy": placement, "target": "h100:4", "compile": False, "rows": [1, 1024]}
    report = mw.dry_serve(program, x, **options)
    weight_bytes = 8192 * 8192 * 2 // 4
    assert report.weight_bytes == weight_bytes
    bandwidth = report.batches[0].report.hardware.memory_bandwidth_bytes_per_s
    one, many = (batch.latency_s for batch in report.batches)
    moved = weight_bytes + 2 * 8192 + 2 * 8192 // 4  # weights, a row, and a quarter of its results
    assert one == pytest.approx(moved / bandwidth)
    peak = report.batches[0].report.hardware.peak("bfloat16")
    moved += 1023 * (moved - weight_bytes)
    assert many == pytest.approx(max(moved / bandwidth, 2 * 1024 * 8192**2 / 4 / peak))
    load = report.devices_for(rows_per_s=2 * 0.8 * 1024 / many)
    assert (load.rows, load.copies, load.devices) == (1024, 2, 8)
    assert report.devices_for(rows_per_s=1).rows == 1
    assert report.price_per_million(2.0) == pytest.approx(1e6 * 2 * 4 * many / (3600 * 0.8 * 1024))
    table = {"v5p": 9.0, "h100": 2.0}
    assert report.price_per_million(table) == report.price_per_million(2.0)
    with pytest.raises(mw.DataError, match="no price of 'h100'"):
        report.price_per_million({"v5p": 9.0})
    full = replace(report.batches[1], report=replace(report.batches[1].report, refusal="no room"))
    small = replace(report, batches=(report.batches[0], full))
    assert small.price_per_million(2.0) == pytest.approx(1e6 * 2 * 4 * one / (3600 * 0.8))
    with pytest.raises(mw.PlanError, match="no batch of 'program' is answered within"):
        report.devices_for(rows_per_s=1, p99_s=one)
    none = replace(small, batches=(full,))
    with pytest.raises(mw.PlanError, match="no batch of 'program' fits into a device of h100:4"):
        none.devices_for(rows_per_s=1)
    unknown = mw.dry_serve(program, x, **{**options, "target": "cpu:4", "rows": [1]})
    with pytest.raises(mw.PlanError, match=r"(?s)no hardware figures for cpu.*--hardware measured"):
        unknown.devices_for(rows_per_s=1, p99_s=0.05)
    with pytest.raises(mw.TargetError, match=r"Give hardware=mw.calibrate\('cpu:2'\)\.$"):
        mw.plan(program, x, target="cpu:2", objective="latency")
    assert "batch of 1024: " in str(report)
    assert np.isfinite(one)
