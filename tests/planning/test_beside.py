"""A prediction beside a measurement: bytes and collectives agree, and no value is touched."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from keras import layers

import meshwright as mw
from meshwright.cli import main
from meshwright.frontends import measures
from meshwright.planning import Target
from meshwright.planning.dry_run import DryRun, Memory
from meshwright.planning.measurement import SeenCollective
from meshwright.planning.measuring import copier
from meshwright.planning.profiled import Event, collectives_seen
from meshwright.targets import calibrate
from meshwright.targets.hardware import Hardware, Link

AXES = (("batch", 4), ("model", 2))
GUESS = Hardware(
    "guess",
    (("float32", 1e9),),
    memory_bandwidth_bytes_per_s=1e9,
    links=(Link("shared", "shared", 1e9),),
)
SEEN = mw.Measured(
    name="net",
    platform="cpu",
    device="cpu",
    axes=AXES,
    parameter_bytes=6,
    slot_bytes=24,
    state_bytes=1,
    input_bytes=1,
    peak_bytes=None,
    peak_is="",
    step_times_s=(0.25, 0.5, 4.0),
)


def bare(target="cpu:8", axes=AXES):
    return DryRun("net", Target.of(target), axes, Memory(6, 12, 1, 1, 6))


@functools.cache
def trained():
    """A Keras model after a fit under ZeRO, with all that a step has: seeds, metrics, slots."""
    mesh = mw.create_mesh(dict(AXES))
    strategy = mw.Sharded(
        mesh, {"up/kernel": [None, "model"], "up/bias": ["model"], "down/kernel": ["model", None]},
        zero=3,
    )  # fmt: skip
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([64]),
                layers.Dense(128, activation="relu", name="up"),
                layers.Dropout(0.5),
                layers.Dense(64, name="down"),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    strategy.fit(model, x, x, batch_size=32, verbose=0)
    return model, (x[:32], x[:32]), strategy


def values_of(model):
    every = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(weight.numpy()) for weight in every]


def test_after_fit_bytes_and_collectives_are_those_foretold_and_no_value_has_changed():
    model, batch, strategy = trained()
    before, lie = values_of(model), [v.value.sharding for v in model.variables]
    result = mw.measure(model, batch, strategy=strategy, steps=2)
    for old, new in zip(before, values_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert [v.value.sharding for v in model.variables] == lie
    report = mw.dry_run(model, batch, strategy=strategy, target="cpu:8", hardware=GUESS)
    compared = report.beside(result)
    for name in ("parameters", "slots", "other state", "inputs"):
        assert compared.row(name).ratio == 1.0, name
    assert compared.row("peak").ratio == pytest.approx(1.0, abs=0.05)
    assert {collective.kind for collective in compared.collectives} >= {"all-reduce", "all-gather"}
    for collective in compared.collectives:
        assert collective.count[0] == collective.count[1], collective
        assert collective.nbytes[0] == collective.nbytes[1], collective
        assert (collective.time_s[1] or 0.0) > 0
    assert len(result.step_times_s) == 2
    mfu, time_s = report.mfu, report.step_time_s
    assert mfu is not None
    assert time_s is not None
    actual = compared.row("model FLOPs").second
    assert actual == pytest.approx(mfu * time_s / result.step_time_s)


def test_the_model_trains_on_after_a_measurement():
    model, (x, y), strategy = trained()
    mw.measure(model, (x, y), strategy=strategy, steps=1)
    before = values_of(model)
    strategy.fit(model, x, y, batch_size=32, verbose=0)
    assert any((old != new).any() for old, new in zip(before, values_of(model), strict=True))


def test_values_come_back_where_a_step_fails(monkeypatch):
    model, batch, strategy = trained()
    before = values_of(model)

    def fails(jitted, state, taken, **_):
        jitted(state, taken)  # which donates the state
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measures, "measure_step", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        mw.measure(model, batch, strategy=strategy)
    for old, new in zip(before, values_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.full
def test_of_a_program_collectives_inside_a_loop_count_each_time():
    def loss(params, x):
        def layer(x, kernel):
            return jnp.tanh(x @ kernel), None

        return jnp.mean(jax.lax.scan(layer, x, params["kernels"])[0] ** 2)

    program = mw.jax_program(loss, {"kernels": np.full([6, 16, 16], 0.1, "float32")}, optax.sgd(1))
    placement = mw.Placement.of(mw.create_mesh(dict(AXES)), {"kernels": [None, "model", None]})
    rows = jax.ShapeDtypeStruct((8, 16), "float32")
    report = mw.dry_run(program, rows, strategy=placement, target="cpu:8")
    compared = report.beside(mw.measure(program, rows, strategy=placement, steps=1))
    assert max(collective.count[0] or 0 for collective in compared.collectives) >= 6
    for collective in compared.collectives:
        assert collective.count[0] == collective.count[1], collective
    assert compared.row("step time").first is None
    assert "hardware=mw.calibrate('cpu:8')" in str(compared)


def test_micro_batches_are_taken_as_a_step_takes_them():
    program = mw.jax_program(lambda p, x: jnp.mean((x @ p) ** 2), np.ones([4, 4]), optax.sgd(0.1))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    trainer = mw.Trainer(program, placement, mw.StepOptions(accumulate=2))
    result = mw.measure(program, np.ones([16, 4], "float32"), strategy=trainer, steps=1)
    assert result.input_bytes == 2 * 2 * 4 * 4  # two of them, two rows of four floats in a device
    assert result.name == "program"


def test_a_copy_of_a_state_outlives_it():
    layout = mw.Layout(["batch", None], mw.create_mesh(dict(AXES)))
    array = jax.device_put(np.arange(32.0).reshape(8, 4), layout.sharding)
    again = copier({"x": array})
    array.delete()
    assert again()["x"].sharding == layout.sharding
    np.testing.assert_array_equal(again()["x"], np.arange(32.0).reshape(8, 4))


# What is told


def test_the_table_has_what_was_foretold_what_was_seen_and_their_ratio():
    actual = replace(SEEN, peak_bytes=40, peak_is="counted")
    lines = str(bare().beside(actual)).splitlines()
    assert lines[0] == "net: predicted for cpu:8, measured on cpu"
    assert lines[1].split() == ["predicted", "measured", "ratio"]
    assert lines[3].split() == ["slots", "12", "B", "24", "B", "2.00"]
    assert lines[6].endswith("  measured: counted")
    assert "median of 3 steps, 250 ms to 4 s" in lines[7]
    with pytest.raises(KeyError):
        bare().beside(actual).row("no such row")
    with pytest.raises(mw.DataError, match=r"type int\. Give report\.beside\(mw\.measure"):
        bare().beside(3)
    with pytest.raises(mw.DataError, match=r"received 'plan\.json'\. .* mw\.Plan\.load"):
        bare().to_html("plan.json")


@pytest.mark.parametrize(
    ("run", "seen", "note"),
    [
        (bare("v5e:2x4"), SEEN, "predicted for v5e:2x4, measured on cpu: times differ"),
        (bare("h100:8"), replace(SEEN, platform="gpu", collectives=()), None),
        (
            bare(axes=(("batch", 8),)),
            SEEN,
            "on a different mesh from the dry run: batch=4, model=2",
        ),
        (bare(), SEEN, "the profiler recorded no collectives, so none are compared"),
        (bare(), replace(SEEN, collectives=()), None),
    ],
    ids=["platform", "gpu", "mesh", "no profiler", "none"],
)
def test_what_cannot_be_compared_is_said(run, seen, note):
    notes = run.beside(seen).notes
    if note is None:
        assert not any("times differ" in line or "recorded no" in line for line in notes)
    else:
        assert any(note in line for line in notes), notes


def test_what_was_not_foretold_stands_beside_nothing():
    more = SeenCollective("all-gather", ("model",), 2.0, 64, 0.125)
    (row,) = bare().beside(replace(SEEN, collectives=(more,))).collectives
    assert (row.count, row.nbytes, row.time_s) == ((0, 2.0), (0, 64), (None, 0.125))


TEXT = """HloModule jit_step
ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %sum = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}
}"""


def test_other_programs_in_a_trace_do_not_count():
    runs = [Event("sum", "jit_step", "a", 1.0), Event("sum", "jit_other", "a", 1.0)]
    result = collectives_seen(runs, TEXT, (("batch", 2),), 1)
    assert result == (SeenCollective("all-reduce", ("batch",), 1.0, 16, 1.0),)
    assert collectives_seen(runs[1:], TEXT, (("batch", 2),), 1) is None
    assert collectives_seen([], TEXT.replace("all-reduce", "copy"), (), 1) == ()


def test_where_somebody_else_is_profiling_the_rest_is_measured(tmp_path):
    program = mw.jax_program(lambda p, x: jnp.mean((x @ p) ** 2), np.ones([4, 4]), optax.sgd(0.1))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
    with jax.profiler.trace(str(tmp_path)):
        result = mw.measure(program, np.ones([8, 4], "float32"), strategy=placement, steps=1)
    assert result.collectives is None
    assert result.step_time_s > 0


# What cannot be measured


def test_what_cannot_be_measured_is_an_error_with_a_way_out():
    model, batch, strategy = trained()
    for steps in (0, 2.5):
        with pytest.raises(
            mw.ModelError, match=f"steps must be a whole number, at least 1; received {steps}"
        ):
            mw.measure(model, batch, strategy=strategy, steps=steps)
    with pytest.raises(mw.LayoutError, match=r"such as mw\.Sharded; received .* type Placement"):
        mw.measure(model, batch, strategy=strategy.placement)
    with pytest.raises(mw.TopologyError, match="needs devices"):
        mw.measure(model, batch, strategy=strategy.on(mw.Mesh(dict(AXES))))
    with strategy.scope():
        eager = keras.Sequential([keras.Input([64]), layers.Dense(64, name="up")])
        eager.compile("sgd", "mse", run_eagerly=True)
    loose = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with pytest.raises(mw.ModelError, match=r"run_eagerly=True, .* compile it without"):
        mw.measure(eager, batch, strategy=loose)


# The command

JOB = """
import keras, numpy as np

def build():
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(4, name="last")])
    model.compile("adam", "mse")
    return model, (np.zeros([16, 16], "float32"), np.zeros([16, 4], "float32"))
"""


@pytest.mark.full
def test_the_command_runs_the_step_on_virtual_devices(tmp_path, monkeypatch):
    mw.create_mesh({"batch": 8})  # before the command can ask for devices of its own
    (tmp_path / "job_to_measure.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "job_to_measure", raising=False)
    command = ["dry-run", "job_to_measure:build", "--measure", "--target"]
    with monkeypatch.context() as patched:
        patched.setattr(calibrate, "calibrate", lambda target: GUESS)
        result = CliRunner().invoke(main, [*command, "cpu:8"])
    assert result.exit_code == 0, result.output
    assert "predicted for cpu:8, measured on cpu" in result.stdout
    assert "median of 10 steps" in result.stdout
    refused = CliRunner().invoke(main, [*command, "v5e:2x4"])
    assert refused.exit_code == 2
    assert "v5e:2x4 cannot be measured here: JAX has" in refused.output
