"""Dry runs of which nothing is compiled: the planner's model beside closed forms and compilers."""

from __future__ import annotations

import sys
from collections import Counter

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from models import shapes as shape

import meshwright as mw
from meshwright.cli import main
from meshwright.frontends.keras.abstract import abstract
from meshwright.planning.measurement import Measured
from meshwright.targets import gpu
from meshwright.targets.hardware import Hardware, Link

ROWS, IO, HIDDEN = 64, 16, 32
BOTH = {"batch": 4, "model": 2}
EXACT = ("parameter_bytes", "slot_bytes", "state_bytes", "input_bytes", "gradient_bytes")


@pytest.fixture(autouse=True)
def without_the_compiler(monkeypatch):
    monkeypatch.setattr(gpu, "_PLUGINS", ("no-such-plugin",))


def two_layers(optimizer=None):
    """y = relu(x w) v, as in the paper."""

    def loss(params, x):
        return jnp.sum((jax.nn.relu(x @ params["w"]) @ params["v"] - x) ** 2)

    params = {"w": shape(IO, HIDDEN), "v": shape(HIDDEN, IO)}
    return mw.jax_program(loss, params, optimizer or optax.sgd(0.1), name="two"), shape(ROWS, IO)


def perceptron(rows=4096, width=1024):
    with abstract():
        model = keras.Sequential(
            [
                keras.Input([128]),
                keras.layers.Dense(width, activation="relu", name="up"),
                keras.layers.Dense(width, activation="relu", name="mid"),
                keras.layers.Dense(64, name="down"),
            ],
            name="net",
        )
        model.compile("adam", "mse")
    return model, (shape(rows, 128), shape(rows, 64))


def asked(built, axes, layouts=None, target="h100:8", **more):
    ways = {name: more.pop(name) for name in ("zero", "accumulate", "activations") if name in more}
    strategy = mw.Sharded(mw.Mesh(axes), layouts or {}, unmatched="replicate", **ways)
    return mw.dry_run(*built, strategy=strategy, target=target, **more)


def moved(report):
    """Elements of one device by axes, of float32; a loss, which is one element, apart."""
    result: Counter = Counter()
    for collective in report.collectives:
        if collective.bytes_per_device > 4:
            result[collective.kind, *collective.axes] += collective.bytes_per_step // 4
    return result


SPLIT = {"w": [None, "model"], "v": ["model", None]}
CLOSED = {  # elements that one device sums in a training step, which wants no gradient of x
    "data": ({"batch": 8}, {}, {"batch": 2 * IO * HIDDEN}),
    "model": ({"batch": 1, "model": 8}, SPLIT, {"model": ROWS * IO}),
    "both": (BOTH, SPLIT, {"model": ROWS * IO // 4, "batch": 2 * IO * HIDDEN // 2}),
}


@pytest.mark.parametrize("name", CLOSED)
def test_collectives_are_those_of_the_paper(name):
    axes, layouts, sums = CLOSED[name]
    report = asked(two_layers(), axes, layouts)
    assert moved(report) == {("all-reduce", axis): count for axis, count in sums.items()}
    assert report.flops == 10 * ROWS * IO * HIDDEN / 8  # five products
    assert report.is_analytic
    assert report.compiled is None


@pytest.mark.parametrize(
    ("target", "dtype", "itemsize"),
    [
        ("h100:8", "bfloat16", 2),
        ("v5e:2x4", "bfloat16", 2),
        ("cpu:8", "bfloat16", 4),
        ("h100:8", "float32", 4),
        ("v5e:2x4", "float32", 2),  # TPUs multiply float32 as bfloat16
    ],
)
def test_level_3_gathers_in_the_type_that_products_take(target, dtype, itemsize):
    def loss(params, x):
        h = jax.nn.relu(x.astype(dtype) @ params["w"].astype(dtype))
        return jnp.sum((h @ params["v"].astype(dtype)).astype("float32") ** 2)

    params = {"w": shape(128, 512), "v": shape(512, 128)}
    program = mw.jax_program(loss, params, optax.sgd(0.1), name="two")
    report = asked((program, shape(ROWS, 128)), {"batch": 8}, target=target, compile=False, zero=3)
    gathers = [collective for collective in report.collectives if collective.kind == "all-gather"]
    assert {gather.bytes_per_device for gather in gathers} == {128 * 512 * itemsize}


MEGATRON = {
    "up/kernel": [None, "model"],
    "up/bias": ["model"],
    "mid/kernel": ["model", None],
}
CASES = {  # how far the peak may be off; XLA for CPU writes a sum over devices anew
    "data": ({"batch": 8}, {}, {}, 0.02),
    "split": (BOTH, MEGATRON, {}, 0.2),
    "kept whole": (BOTH, {"mid/kernel": [None, "model"]}, {}, 0.2),
    "micro-batches": ({"batch": 8}, {}, {"accumulate": 2}, 0.05),
    "zero 1": ({"batch": 8}, {}, {"zero": 1}, 0.02),
    "zero 1, micro-batches": ({"batch": 8}, {}, {"zero": 1, "accumulate": 2}, 0.05),
    "zero 2": ({"batch": 8}, {}, {"zero": 2}, 0.02),
}
QUICK = ("data", "zero 1", "kept whole")
FULL = [pytest.param(name, marks=pytest.mark.full) for name in CASES if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *FULL])
def test_what_it_says_is_what_the_compiler_says(name):
    axes, layouts, how, off = CASES[name]
    model = perceptron()
    predicted = asked(model, axes, layouts, target="cpu:8", compile=False, **how)
    compiled = asked(model, axes, layouts, target="cpu:8", **how)
    assert not compiled.is_analytic
    for line in EXACT:
        assert getattr(predicted.memory, line) == getattr(compiled.memory, line)
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=off)
    found = moved(predicted)
    if name == "kept whole" and jax.__version_info__ >= (0, 11):
        # Of a parameter and its two slots, which are updated in pieces, XLA of JAX 0.11 gathers
        # the slots alone, and computes the parameter anew of them on every device.
        found["all-gather", "model"] = found["all-gather", "model"] * 2 // 3
    assert found == pytest.approx(moved(compiled), rel=0.002)  # the loss among others
    assert predicted.flops == compiled.flops
    remedies = [
        {collective.remedy for collective in report.unexpected} for report in (predicted, compiled)
    ]
    assert remedies[0] == remedies[1]


def test_of_a_plan_it_says_what_the_plan_says():
    model, batch = perceptron(rows=8192)
    plan = mw.plan(model, batch, target="h100:8", axes={"batch": 4, "model": 2})
    report = mw.dry_run(model, batch, strategy=plan.strategy(plan.mesh), target="h100:8")
    assert report.step_time_s == pytest.approx(plan.chosen.time_s)
    assert report.peak_bytes == pytest.approx(plan.chosen.peak_bytes, rel=0.001)
    assert 0 < report.mfu < 1
    assert report.bound_by in ("compute", "memory", "communication")


def test_rows_of_two_inputs_are_one_dim_where_all_rows_of_one_meet_all_of_the_other():
    """A contrastive loss scores every image with every text: the rows of one tower are gathered."""

    def loss(params, batch):
        images, texts = (batch[name] @ params[name] for name in ("images", "texts"))
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(images @ texts.T)))

    names = ("images", "texts")
    program = mw.jax_program(loss, dict.fromkeys(names, shape(IO, HIDDEN)), optax.sgd(0.1))
    batch = dict.fromkeys(names, shape(ROWS, IO))
    found = moved(asked((program, batch), {"batch": 8}, target="h100:8"))
    assert found["all-gather", "batch"] >= ROWS * HIDDEN


def test_report_and_page_say_that_nothing_was_compiled():
    report = asked(two_layers(), {"batch": 8})
    assert report.fits
    assert report.memory.temporary_bytes is None
    note = "analytic model alone, nothing was compiled: steps for h100:8 are compiled by XLA for"
    for text in (str(report), report.to_html()):
        assert note in text
        assert "pip install" in text
        assert "meshwright[cuda]" in text
    one = asked(two_layers(), {"batch": 8}, target="v5e:2x4", compile=False)
    assert "compile=False (--no-compile) was given; leave it out" in str(one)


@pytest.mark.parametrize(
    ("layouts", "more", "says"),
    [
        (
            SPLIT,
            {"activations": {"up": [None, "model"]}},
            "activation 'up' has a layout",
        ),
        (
            SPLIT,
            {"activations": {name: [None, "model"] for name in "abcdef"}},
            r"activation 'd' has a layout of its own\.\nand 2 more\.$",
        ),
    ],
)
def test_what_the_model_does_not_know_takes_a_compiler(layouts, more, says):
    with pytest.raises(mw.TargetError, match=says) as info:
        asked(two_layers(), layouts=layouts, **{"axes": BOTH, **more})
    assert "pip install 'meshwright[cuda]' adds it" in str(info.value)


def test_rules_that_split_variables_along_the_rows_axis_are_gathered_as_by_zero_3():
    """As ``get_layout_map`` of Keras Hub's models: every weight is split along both axes."""
    devices = [f"cpu:{number}" for number in range(8)]
    mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"), devices)
    rules = keras.distribution.LayoutMap(mesh)
    rules["(up|down)/kernel"] = ("batch", "model")
    rules["mid/kernel"] = ("model", "batch")
    model, batch = perceptron(rows=64, width=128)
    strategy = mw.Sharded(mw.Mesh(BOTH), rules, unmatched="replicate")
    report = mw.dry_run(model, batch, strategy=strategy, target="v5e:2x4", compile=False)
    assert report.parameter_bytes == 4 * ((2 * 128 * 128 + 128 * 64) // 8 + 2 * 128 + 64)
    gathers = [collective for collective in report.collectives if collective.kind == "all-gather"]
    assert {gather.variables for gather in gathers if gather.axes == ("batch",)} == {
        ("up/kernel",), ("mid/kernel",), ("down/kernel",)
    }  # fmt: skip
    assert "taken to be gathered before they are used" in str(report)
    theirs = keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="batch")
    same = mw.dry_run(model, batch, strategy=theirs, target="v5e:2x4", compile=False)
    assert (same.parameter_bytes, same.collectives) == (report.parameter_bytes, report.collectives)
    with pytest.raises(mw.DataError, match="received a dict"):
        mw.dry_run(model, batch, strategy={}, target="v5e:2x4", compile=False)


def residual(width=128):
    """A block of a Transformer without its attention, for rules that name its weights."""
    with abstract():
        x = inputs = keras.Input([width])
        for first, second, wide in (("query", "out", 1), ("up", "down", 2)):
            hidden = keras.layers.Dense(wide * width, activation="relu", name=first)(x)
            x = x + keras.layers.Dense(width, name=second)(hidden)
        model = keras.Model(inputs, x)
        model.compile("adam", "mse")
    return model, (shape(512, width), shape(512, width))


@pytest.mark.parametrize(
    ("layouts", "gathered"),
    [
        # As get_layout_map of Keras Hub's Llama: the projections' inputs lie along "model", which
        # is the axis of the wide dims that they meet.
        (
            {"(query|out|down)/kernel": ["model", "batch"], "up/kernel": ["batch", "model"]},
            {"query/kernel"},
        ),
        ({"kernel": ["batch", "model"]}, {"query/kernel", "up/kernel"}),  # a chain
    ],
)
def test_weights_that_rules_lay_along_an_axis_of_other_dims_are_gathered(layouts, gathered):
    report = asked(residual(), BOTH, layouts, target="cpu:8", compile=False)
    compiled = asked(residual(), BOTH, layouts, target="cpu:8")
    for name in EXACT:
        assert getattr(report.memory, name) == getattr(compiled.memory, name)
    assert report.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.25)
    assert report.estimate.flops == pytest.approx(compiled.estimate.flops, rel=0.05)
    theirs, ours = moved(compiled), moved(report)
    sums = [s["all-reduce", "batch"] + s["reduce-scatter", "batch"] for s in (theirs, ours)]
    assert sums[1] == pytest.approx(sums[0], rel=0.05)
    assert ours["all-reduce", "model"] == pytest.approx(theirs["all-reduce", "model"], rel=0.5)
    sent = [c for c in report.collectives if c.kind == "all-to-all"]
    assert {c.variables[0] for c in sent} == gathered
    assert all(c.axes == ("model",) and c.count == 3 for c in sent)
    assert "are taken to be gathered before they are used (" in str(report)


@pytest.mark.parametrize(
    ("axes", "layouts", "kind", "times"),
    [
        (BOTH, {"w": ["model", None], "v": ["model", None]}, "all-to-all", 3),
        (
            {"batch": 2, "model": 2, "other": 2},
            {"w": [None, "other"], "v": ["model", None]},
            "all-gather",
            2,
        ),
    ],
)
def test_where_no_rows_are_concerned_one_of_two_weights_is_gathered(axes, layouts, kind, times):
    """Forward and again backward; what changes its dim, and so its gradient, three times."""
    report = asked(two_layers(), axes, layouts)
    (sent,) = [c for c in report.collectives if c.kind == kind and "forward" in c.phases]
    assert (sent.variables, sent.count) == (("w",), times)


@pytest.mark.full
def test_a_network_of_keras_applications_is_built_and_planned_as_shapes():
    with abstract():
        model = keras.applications.EfficientNetB0(weights=None)
        model.compile("adam", "sparse_categorical_crossentropy")
    assert model.count_params() == 5_330_571
    batch = shape(64, 224, 224, 3), shape(64, dtype="int32")
    result = asked((model, batch), {"batch": 8})
    assert result.errors == ()
    assert 3 * 0.75e9 < 8 * result.flops / 64 < 3 * 0.82e9  # 0.39e9 multiply-adds forward


def test_the_gradient_by_a_depthwise_filter_costs_what_xla_for_cpu_does_for_it():
    """It convolves every channel with every other one, and keeps those of a channel with itself."""
    kernel, image = 2 * 3 * 3, (2, 14, 14, 8)  # without padding, so that all windows are full

    def loss(params, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, params["w"], (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=8
        )
        return jnp.sum(y**2)

    program = mw.jax_program(loss, {"w": shape(3, 3, 1, 8)}, optax.sgd(0.1))
    built = program, shape(16, *image[1:])
    forward = kernel * 2 * 12 * 12 * 8
    for target, times in (("cpu:8", 1 + 8), ("h100:8", 1 + 1)):
        by_model = asked(built, {"batch": 8}, target=target, compile=False)
        assert by_model.estimate.flops == times * forward, target
    assert asked(built, {"batch": 8}, target="cpu:8").estimate.flops == 9 * forward


def layers_of_512(rows=256):
    def loss(params, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)

    params = {"w": shape(128, 512), "v": shape(512, 512)}
    return mw.jax_program(loss, params, optax.sgd(0.1)), shape(rows, 128)


def with_rates(**rates):
    """Products take nearly all the time of a step."""
    points = tuple((name, ((1.0, rate),)) for name, rate in rates.items())
    links = (Link("shared", "shared", 1e15, 0.0),)
    return Hardware("mine", (("float32", 1e12),), None, 1e15, links, rates=points)


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.full)])
def test_products_of_few_rows_and_those_of_gradients_cost_what_the_compiler_says(accumulate):
    """A device has 32 of 256 rows. Micro-batches are taken side by side, and add up to these."""
    hardware = with_rates(product=5e9, product_skinny=1e9, product_transposed=3e9)
    program, rows = layers_of_512(256 // accumulate)
    more = {"target": "cpu:8", "hardware": hardware, "accumulate": accumulate}
    analytic, compiled = (
        asked((program, rows), {"batch": 8}, compile=how, **more).estimate for how in (False, True)
    )
    assert analytic.compute_s == pytest.approx(compiled.compute_s, rel=1e-6)
    forward, gradients = 256 / 8 * 2 * 512 * np.array([128 + 512 + 512, 128 + 512])
    rate = 3e9 if accumulate == 1 else 5e9
    assert analytic.compute_s == pytest.approx(forward / 1e9 + gradients / rate, rel=1e-3)


def test_a_plan_leaves_a_device_as_many_rows_as_products_are_fast_with():
    """Where the number of rows does not matter, layouts differ by nanoseconds: JAX 0.10 leads to 64
    rows, and 0.11 to 128."""
    hardware = with_rates(product=5e9, product_skinny=1e9)
    plan = mw.plan(*layers_of_512(), target="cpu:8", hardware=hardware)
    assert 256 // dict(plan.mesh.axes)["batch"] > 64


def test_it_is_compared_and_the_comparison_says_so():
    report = asked(two_layers(optax.adam(0.1)), {"batch": 8})
    actual = Measured("two", "cpu", "cpu", report.axes, 4096, 8192, 0, 512, 40, "seen", (0.25,))
    compared = report.beside(actual)
    assert compared.row("parameters").ratio == 1.0
    assert any("analytic model alone" in note for note in compared.notes)


def test_a_plan_that_cannot_be_verified_says_so():
    plan = mw.plan(*two_layers(), target="h100:8", verify=2)
    assert plan.chosen.dry_run_time_s is None
    assert "nothing was compiled to verify it" in plan.notes[-1]


JOB = """
import jax.numpy as jnp, numpy as np, optax
import meshwright as mw


def build():
    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    return mw.jax_program(loss, {"w": np.ones([8, 4])}, optax.adam(0.1)), {"x": np.eye(16, 8)}
"""


def test_the_command_takes_the_model_and_keeps_it_apart_from_compilers(tmp_path, monkeypatch):
    mw.create_mesh({"batch": 8})  # started before the command can ask for one alone
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "analytic_job.py").write_text(JOB)

    def run(target, *arguments):
        words = ["dry-run", "analytic_job:build", "--target", target, *arguments]
        return CliRunner().invoke(main, words)

    output = run("h100:8", "--html", "page.html")
    assert output.exit_code == 0, output.output
    assert "analytic model alone" in output.stdout
    assert "compiling" not in output.stderr
    assert "analytic model alone" in (tmp_path / "page.html").read_text()
    assert run("cpu:8", "--no-compile", "--save", "model.json").exit_code == 0
    assert '"analytic": true' in (tmp_path / "model.json").read_text()
    again = run("cpu:8", "--no-compile", "--check", "model.json")
    assert "nothing got worse" in again.stdout
    assert "not compared" not in again.stdout
    compiled = run("cpu:8", "--check", "model.json")
    assert compiled.exit_code == 0, compiled.output
    assert "written by the analytic model alone, this is of a compiled step" in compiled.stdout


def test_what_nothing_reads_of_a_derivative_holds_nothing_where_blocks_are_computed_again():
    """Those of a softmax's maximum: taken to run last, they held the scores of all blocks."""

    def loss(params, x):
        for number, w in enumerate(params):
            with jax.named_scope(f"block_{number}"):
                x = mw.block_output(x + jax.nn.softmax(x @ w) @ w.T)
        return jnp.sum(x.astype("float32"))

    built = mw.jax_program(loss, [shape(256, 2048)] * 6, optax.sgd(0.1)), shape(4096, 256)
    peaks = {
        remat: mw.dry_run(
            *built,
            strategy=mw.Sharded.from_placement(
                mw.Placement.of(mw.Mesh({"batch": 4})), mw.StepOptions(remat=remat)
            ),
            target="v5e:2x2",
            compile=False,
        ).memory.peak_bytes
        for remat in ("none", "block")
    }
    scores = 4096 // 4 * 2048 * 4
    assert peaks["block"] < peaks["none"] - scores
