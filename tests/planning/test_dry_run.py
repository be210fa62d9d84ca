"""A dry run says what training really holds and moves, for targets that need not be there."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers
from models import looped, shapes, two_layers

import meshwright as mw
from meshwright.frontends.dry_runs import dry_run
from meshwright.frontends.keras.abstract import abstract
from meshwright.hlo.collectives import Collective
from meshwright.hlo.origins import Origin
from meshwright.hlo.remedies import remedy
from meshwright.hlo.text import Array
from meshwright.layouts.params import ParamInfo, Placed
from meshwright.planning import Compiled, Target, compile_step
from meshwright.planning.dry_run import DryRun, Memory
from meshwright.targets.hardware import Hardware

AXES = {"batch": 4, "model": 2}
ROWS, IO, HIDDEN = 64, 16, 32


BATCH = shapes(ROWS, IO), shapes(ROWS, IO)
SPLIT = {"w/kernel": [None, "model"], "v/kernel": ["model", None]}


def of_two_layers(axes=AXES, rules=SPLIT, **how) -> DryRun:
    with abstract():
        model = two_layers(IO, HIDDEN)
    strategy = mw.Sharded(mw.Mesh(axes), {k: v for k, v in rules.items() if "model" in axes}, **how)
    return dry_run(model, BATCH, strategy=strategy, target="cpu:8")


@functools.cache
def split() -> DryRun:
    return of_two_layers()


# What a device holds


def net() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input([24]),
            layers.Dense(48, activation="relu", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.1),
            layers.Dense(8, name="last"),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def test_statistics_that_a_layer_computes_with_before_training_are_known():
    def built(scope):
        with scope:
            head = [keras.Input([8]), layers.Normalization(name="scaled"), layers.Dense(4)]
            model = keras.Sequential(head)
            model.compile("sgd", "mse")
        return model

    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    planned = built(abstract())
    taken = shapes(16, 8), shapes(16, 4)
    report = dry_run(planned, taken, strategy=strategy, target="cpu:8")
    assert report.parameter_bytes == 4 * (8 * 4 + 4)
    with pytest.raises(mw.ModelError, match="built as shapes only"):
        planned.layers[0].adapt_mean.numpy()
    rows = np.arange(16 * 8.0).reshape(16, 8)
    strategy.place(planned)
    planned.layers[0].adapt(rows)
    assert np.allclose(np.asarray(planned.layers[0](rows)).std(0), 1, atol=1e-3)


def test_a_layer_may_be_called_on_an_array_while_a_model_is_built():
    """As the positions of Keras' own TabTransformer are: they are a constant of the model."""

    def built():
        keras.utils.set_random_seed(3)
        inputs = x = keras.Input([4, 8])
        x = x + layers.Embedding(4, 8)(keras.ops.arange(4))
        model = keras.Model(inputs, layers.Dense(2, name="last")(x))
        model.compile("sgd", "mse")
        return model

    with abstract():
        planned = built()
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    batch = shapes(16, 4, 8), shapes(16, 4, 2)
    report = dry_run(planned, batch, strategy=strategy, target="cpu:8")
    assert report.parameter_bytes == 4 * (8 * 2 + 2)
    strategy.place(planned)
    rows = np.ones([8, 4, 8], "float32")
    np.testing.assert_allclose(
        strategy.predict(planned, rows, verbose=0), built().predict(rows, verbose=0), rtol=1e-5
    )


@pytest.mark.full_for("0")
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.full)])
def test_bytes_are_those_of_the_arrays_that_a_real_state_has_on_a_device(zero):
    strategy = mw.Sharded(mw.create_mesh(AXES), {"hidden.*kernel": [None, "model"]}, zero=zero)
    with abstract():
        model = net()
    batch = shapes(32, 24), shapes(32, 8)
    report = dry_run(model, batch, strategy=strategy, target="cpu:8")
    with strategy.scope():
        real = net()
    state = strategy.state(real, (np.zeros([32, 24]), np.zeros([32, 8])))

    def state_bytes(part):
        return sum(array.addressable_data(0).nbytes for array in part.values())

    assert report.parameter_bytes == state_bytes(state.params)
    assert report.slot_bytes == state_bytes(state.slots)
    assert report.memory.state_bytes == state_bytes(state.state) + state_bytes(state.metrics)
    assert report.memory.input_bytes == 4 * (8 * 24 + 8 * 8)
    assert report.memory.padding_bytes == 0  # CPUs have no tiles


@pytest.mark.full
def test_an_abstract_model_compiles_to_the_step_of_the_real_one():
    strategy = mw.Sharded(mw.create_mesh(AXES), {"hidden.*kernel": [None, "model"]})
    with strategy.scope():
        real = net()
    with abstract():
        planned = net()
    batch = np.zeros([32, 24], "float32"), np.zeros([32, 8], "float32")

    def figures(step: Compiled):
        return replace(step, text="")

    there = compile_step(strategy, planned, (shapes(32, 24), shapes(32, 8)), "cpu:8")
    here = compile_step(strategy, real, batch, "cpu:8")
    assert figures(there) == figures(here)
    actual, expected = (
        [(c.kind, c.axes, c.arrays, re.sub(r"adam_\d+", "adam", c.path)) for c in step.collectives]
        for step in (there, here)
    )
    assert actual == expected
    strategy.fit(real, *batch, batch_size=32, verbose=0)
    (functions,) = real._meshwright_functions.values()
    stats = functions.train.lower(strategy.state(real), strategy.put(batch)).compile()
    assert here.temporary_bytes == stats.memory_analysis().temp_size_in_bytes


def test_the_peak_on_a_cpu_is_that_of_the_buffers_which_xla_makes():
    report = split()
    compiled = report.compiled
    whole = compiled.argument_bytes + compiled.temporary_bytes
    assert report.peak_bytes == whole + compiled.output_bytes - compiled.donated_bytes
    assert "added up" in report.memory.peak_is
    assert report.alive_bytes == pytest.approx(compiled.temporary_bytes, rel=0.05)


def test_the_tensors_at_the_peak_are_named_after_layers():
    with abstract():
        model = keras.Sequential(
            [keras.Input([64]), layers.Dense(4096, "relu", name="wide"), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}))
    report = dry_run(model, (shapes(4096, 64), shapes(4096, 1)), strategy=strategy, target="cpu:8")
    largest = report.tensors[0]
    assert largest.array.elements == 512 * 4096  # the activations of this device's rows
    assert largest.origin.path == "wide"
    assert report.alive_bytes == pytest.approx(report.memory.temporary_bytes, rel=0.05)


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux' /proc")
def test_ten_billion_parameters_are_planned_in_less_than_a_gigabyte():
    out = mw.testing.run_in_fresh_process(
        """
        import pathlib
        import meshwright as mw
        import jax, keras
        from meshwright.frontends.keras.abstract import abstract
        with abstract():
            model = keras.Sequential([keras.Input([32768])])
            for _ in range(10):
                model.add(keras.layers.Dense(32768, use_bias=False))
            model.compile("adam", "mse")
        strategy = mw.Sharded(mw.Mesh({"batch": 64, "model": 8}), {"kernel": [None, "model"]})
        rows = jax.ShapeDtypeStruct((512, 32768), "float32")
        step = strategy.abstract_step(model, (rows, rows))
        step.train.trace(step.state, step.batch)
        # Linux' ru_maxrss would be the parent's, if that had more
        status = pathlib.Path("/proc/self/status").read_text()
        held = 1024 * int(status.split("VmHWM:")[1].split()[0])
        print(model.count_params(), len(step.state.slots), held)
        """
    )
    parameters, slots, live_bytes = map(int, out.split())
    assert parameters == 10 * 32768**2
    assert slots == 2 + 2 * 10
    assert live_bytes < 10**9


# Models of shapes only


def test_a_planned_model_is_made_as_if_it_had_been_built_in_the_scope():
    strategy = mw.Sharded(mw.create_mesh(AXES), {"hidden.*kernel": [None, "model"]})

    def built(scope):
        keras.utils.set_random_seed(3)
        with scope:
            return net()

    real, planned = built(strategy.scope()), built(abstract())
    strategy.place(planned)
    for one, other in zip(real.weights, planned.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
        assert str(one.layout) == str(other.layout)


def test_a_planned_model_trains_once_a_strategy_fits_it():
    strategy = mw.Sharded(mw.create_mesh(AXES), {"hidden.*kernel": [None, "model"]})
    with abstract(), strategy.scope():
        model = net()
    strategy.abstract_step(model, (shapes(32, 24), shapes(32, 8)))
    x, y = np.ones([64, 24], "float32"), np.ones([64, 8], "float32")
    history = strategy.fit(model, x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.weights[0].numpy(),
        lambda model: model.get_weights(),
        lambda model: model.predict(np.ones([8, 24]), verbose=0),
        lambda model: model.fit(np.ones([8, 24]), np.ones([8, 8]), verbose=0),
    ],
)
def test_the_values_of_a_planned_model_are_an_error_that_says_how_to_make_them(use):
    with abstract():
        model = net()
    with pytest.raises(mw.ModelError, match=r"built as shapes only.*strategy\.place\(model\)"):
        use(model)


def test_a_model_that_is_not_compiled_cannot_be_planned():
    with abstract():
        model = keras.Sequential([keras.Input([4]), layers.Dense(2)])
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}))
    with pytest.raises(mw.ModelError, match="is not compiled"):
        dry_run(model, (shapes(8, 4), shapes(8, 2)), strategy=strategy, target="cpu:8")


def test_another_mesh_takes_the_place_of_the_strategys():
    with abstract():
        model = two_layers(IO, HIDDEN)
    strategy = mw.Sharded(mw.create_mesh({"batch": 8, "model": 1}), SPLIT)
    report = dry_run(model, BATCH, strategy=strategy, target="cpu:4", mesh={"batch": 2, "model": 2})
    assert report.axes == (("batch", 2), ("model", 2))
    assert report.parameter_bytes == 4 * 2 * IO * HIDDEN // 2


# What devices tell each other


def moved(report: DryRun, axis: str) -> int:
    """Values that collectives along an axis reduce in one step, losses and the like left out."""
    sums = [c for c in report.compiled.collectives if c.axes == (axis,) and c.reduces]
    return sum(a.elements * c.count for c in sums for a in c.arrays if a.elements > 1)


@pytest.mark.full_for("model")
@pytest.mark.parametrize(
    ("axes", "along_batch", "along_model"),
    [
        pytest.param({"batch": 8}, 2 * IO * HIDDEN, 0, marks=pytest.mark.full),
        ({"batch": 1, "model": 8}, 0, ROWS * IO),  # dL/dx is not asked for
        ({"batch": 4, "model": 2}, 2 * IO * HIDDEN // 2, ROWS // 4 * IO),
        pytest.param(
            {"batch": 2, "model": 4}, 2 * IO * HIDDEN // 4, ROWS // 2 * IO, marks=pytest.mark.full
        ),
    ],
    ids=["data", "model", "4x2", "2x4"],
)
def test_volumes_are_the_closed_forms_of_the_mesh_tensorflow_paper(axes, along_batch, along_model):
    report = of_two_layers(axes)
    assert moved(report, "batch") == along_batch
    assert moved(report, "model") == along_model
    assert report.unexpected == ()
    assert {c.kind for c in report.collectives} == {"all-reduce"}


def test_collectives_have_the_paths_of_the_model():
    by_axes = {c.axes: c for c in split().collectives if c.bytes_per_device > 64}
    over_model, over_batch = by_axes["model",], by_axes["batch",]
    assert over_model.path == "v"
    assert over_model.phases == ("forward",)
    assert {"w", "v"} <= set(over_batch.paths)
    assert "backward" in over_batch.phases


def test_loops_are_multiplied_out_and_gathers_named_after_their_parameter():
    placement = mw.Placement.of(mw.Mesh({"batch": 8}), zero=3)
    report = dry_run(looped(6, 64), shapes(32, 64), strategy=placement, target="cpu:8")
    gathers = [c for c in report.collectives if c.kind == "all-gather"]
    assert gathers
    assert report.parameter_bytes == 4 * 6 * 64 * 64 // 8
    assert sum(c.bytes_per_step for c in gathers) >= 4 * 6 * 64 * 64
    assert {c.path for c in gathers} == {"kernels"}
    assert report.unexpected == ()


@pytest.mark.full
def test_micro_batches_are_those_of_one_step():
    once = of_two_layers()
    twice = of_two_layers(accumulate=2)
    assert twice.memory.input_bytes == 2 * once.memory.input_bytes
    assert twice.parameter_bytes == once.parameter_bytes
    assert twice.flops == pytest.approx(2 * once.flops)


# Collectives that no layout asked for


def remedy_in(report: DryRun) -> dict[str, list]:
    """The layouts that a report proposes."""
    matches = re.findall(r"layouts\['([\w/]+)'\] = (\[[^\]]*\])", str(report))
    return {path: eval(specs) for path, specs in matches}


@pytest.mark.full
def test_what_is_gathered_for_a_whole_weight_is_marked_and_the_remedy_removes_it():
    rules = {"w/kernel": [None, "model"]}
    report = of_two_layers(rules=rules)
    assert report.unexpected
    proposed = remedy_in(report)
    assert proposed == {"v/kernel": ["model", None]}
    assert of_two_layers(rules=rules | proposed).unexpected == ()


@pytest.mark.full
def test_an_activation_that_is_gathered_is_marked():
    def loss(params, x):
        with jax.named_scope("block"):
            hidden = jnp.tanh(x @ params["kernel"])
            return jnp.mean(mw.relayout(hidden, mw.Layout(["batch", None], mesh)) ** 3)

    mesh = mw.Mesh(AXES)
    program = mw.jax_program(loss, {"kernel": shapes(64, 128)}, optax.sgd(0.1))
    placement = mw.Placement.of(mesh, {"kernel": [None, "model"]})
    report = dry_run(program, shapes(32, 64), strategy=placement, target="cpu:8")
    advice, *_ = (gather.remedy for gather in report.unexpected if gather.path == "block")
    assert "an activation of block (float32 8x128, forward) is gathered" in advice
    assert "needed whole along 'model'. Say how it lies: activations={'block': [...]}" in advice
    quiet = mw.Placement.of(
        mesh, {"kernel": [None, "model"]}, activations={"block": ["batch", None]}
    )
    quiet_report = dry_run(program, shapes(32, 64), strategy=quiet, target="cpu:8")
    assert quiet_report.unexpected == ()  # somebody asked for it


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ([None, None], "Split that, too: layouts['block/kernel'] = ['model', None]"),
        ([None, "batch"], "Split that, too: layouts['block/kernel'] = ['model', 'batch']"),
        ([None, "model"], "Say how it lies: activations={'block': [...]}"),
    ],
    ids=str,
)
def test_no_remedy_puts_an_axis_on_two_dims_of_a_weight(layout, says):
    info = ParamInfo("block/kernel", ("block/kernel",), (64, 128), "float32", 4)
    placed = Placed(info, mw.Layout(layout, mw.Mesh(AXES)), "rule")
    array = Array("float32", (8, 64), 32)
    gathered = Collective(
        "all-gather", (array,), ((0, 1),), ("model",), 1, "", 0, 0, gathered_dim=1
    )
    result = remedy(
        gathered,
        Origin("block", "forward"),
        None,
        None,
        [placed],
        mw.Placement.of(mw.Mesh(AXES), {"block/kernel": layout}, batch="batch"),
    )
    assert says in result


def test_a_weight_that_is_gathered_against_its_layout_is_marked():
    def loss(params, x):
        kernel = mw.relayout(params["kernel"], mw.Layout([None, None], mesh))
        return jnp.mean((x @ kernel) ** 2)

    mesh = mw.Mesh(AXES)
    program = mw.jax_program(loss, {"kernel": shapes(64, 64)}, optax.sgd(0.1))
    placement = mw.Placement.of(mesh, {"kernel": [None, "model"]})
    report = dry_run(program, shapes(32, 64), strategy=placement, target="cpu:8")
    marked = [c for c in report.unexpected if c.variables == ("kernel",)]
    assert marked
    assert (
        "kernel lies as [unsharded, model] (layout 'kernel') and is gathered whole along 'model'"
        in (marked[0].remedy)
    )
    assert "!  all-gather" in str(report)


@pytest.mark.parametrize(
    "zero", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3]
)
def test_what_zero_gathers_is_expected(zero):
    with abstract():
        model = keras.Sequential([keras.Input([64]), layers.Dense(64, use_bias=False, name="w")])
        model.compile("adam", "mse")
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}), zero=zero)
    report = dry_run(model, (shapes(64, 64), shapes(64, 64)), strategy=strategy, target="cpu:8")
    assert [c for c in report.collectives if c.kind == "all-gather"]
    assert report.unexpected == ()


# The report


def memory(**more) -> Memory:
    known = {"parameter_bytes": 6, "slot_bytes": 12, "state_bytes": 1, "input_bytes": 1}
    return Memory(**known, gradient_bytes=6, **more)


def report_of(**more) -> DryRun:
    return DryRun("net", Target.of("v5e:2x4"), (("batch", 8),), memory(**more))


def test_whether_a_step_fits_and_by_how_much():
    fits = report_of(peak_bytes=2048, available_bytes=4096)
    assert fits.fits is True
    assert fits.memory.free_bytes == 2048
    assert "fits, with 2 KiB to spare" in str(fits)
    small = report_of(peak_bytes=5120, available_bytes=4096)
    assert small.fits is False
    assert "does not fit, by 1 KiB" in str(small)
    unknown = report_of(peak_bytes=5120)
    assert unknown.fits is None
    assert "fit unknown: device memory not known" in str(unknown)


def test_a_refusal_of_the_compiler_is_shown():
    refused = replace(report_of(), refusal="RESOURCE_EXHAUSTED: 40G of 16G")
    assert refused.fits is False
    assert "RESOURCE_EXHAUSTED: 40G of 16G" in str(refused)
    assert "padding" not in str(refused)  # which is unknown


def test_the_report_prints_every_figure_and_says_whose_it_is():
    text = str(split())
    for word in (
        "two on cpu:8 (batch=4, model=2)",
        "parameters",
        "added up",
        "collectives of one step",
        "all-reduce",
        "time of one step, estimated",
        "note: compiled by XLA for CPU",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) < 200


def test_reports_are_values():
    again = replace(split(), compiled=None)  # which is kept beside, for a deeper look
    assert again == split()
    assert hash(again) == hash(split())
    assert report_of(peak_bytes=1) != report_of(peak_bytes=2)


def test_the_time_follows_the_hardware_that_is_given():
    with abstract():
        model = two_layers(IO, HIDDEN)
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}))
    mine = Hardware("mine", (("float32", 1e9),), memory_bytes=10**9)
    report = dry_run(model, BATCH, strategy=strategy, target="cpu:8", hardware=mine)
    assert report.fits is True
    # Three products of the second layer and two of the first, whose inputs need no gradient.
    assert report.flops == 5 * 2 * (ROWS // 8) * IO * HIDDEN
    assert report.estimate.compute_s >= report.flops / 1e9
    assert report.step_time_s is None
    assert "memory_bandwidth_bytes_per_s" in str(report)


# What goes wrong


def test_a_mesh_of_another_size_than_the_target_is_an_error():
    with abstract():
        model = two_layers(IO, HIDDEN)
    strategy = mw.Sharded(mw.Mesh(AXES), SPLIT)
    with pytest.raises(mw.TargetError, match=r"over 8 devices .* the target v5e:4x4 has 16"):
        dry_run(model, BATCH, strategy=strategy, target="v5e:4x4")


def test_a_batch_that_does_not_divide_is_an_error():
    with abstract():
        model = two_layers(IO, HIDDEN)
    with pytest.raises(mw.BatchError, match="a batch of 6 does not divide over axis 'batch'"):
        dry_run(
            model,
            (shapes(6, IO), shapes(6, IO)),
            strategy=mw.Sharded(mw.Mesh(AXES), SPLIT),
            target="cpu:8",
        )


def test_parameters_of_shapes_only_cannot_be_made():
    program = mw.jax_program(lambda p, x: jnp.sum(p["w"] * x), {"w": shapes(4)}, optax.sgd(0.1))
    with pytest.raises(mw.ModelError, match="parameters are shapes only"):
        program.initial()
