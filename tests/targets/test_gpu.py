"""Compiled for GPUs that are not there: what XLA is told of them, and what its answer is worth."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import keras
import models
import optax
import pytest
from keras import layers
from models import shapes

import meshwright as mw
from meshwright.frontends.dry_runs import dry_run
from meshwright.frontends.keras.abstract import abstract
from meshwright.hlo.costs import Costs, Operation, read_costs
from meshwright.hlo.text import parse
from meshwright.planning import Target, compile_ahead, compiler_process
from meshwright.planning.dry_run import DryRun
from meshwright.targets import gpu
from meshwright.targets.hardware import hardware_of

CHIPS = ["a100", "h100", "h200", "b200"]
TARGETS = ["a100:8", "h100:8", "h200:2x8", "b200:8"]

# What XLA is told


@pytest.mark.parametrize(
    ("text", "devices", "topology"),
    [
        ("h100:8", 8, "1x1x8"),
        ("h100:4", 4, "1x1x4"),
        ("h200:2x8", 16, "2x1x8"),
        ("h200:8x8", 64, "8x1x8"),
        ("a100:2x4", 8, "2x1x4"),
        ("b200:32", 32, "4x1x8"),  # full nodes
    ],
)
def test_nodes_of_gpus(text, devices, topology):
    target = Target.of(text)
    assert str(target) == text
    assert target.num_devices == devices
    assert gpu.topology_of(target) == topology


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100:2x2x2", "such as 'h100:2' or, for two nodes, 'h100:2x8'; received '2x2x2'"),
        ("h100:0x8", "received '0x8'"),
        ("cpu:2x8", "'cpu' has 1 number"),
    ],
)
def test_what_is_no_node_of_gpus(text, message):
    with pytest.raises(mw.TargetError, match=message):
        Target.of(text)


def test_no_node_is_half_full():
    with pytest.raises(mw.TargetError, match=r"12 GPUs do not make nodes of 8.* 'h100:2x8'"):
        gpu.topology_of(Target.of("h100:12"))


@pytest.mark.parametrize("chip", CHIPS)
def test_a_description_has_the_numbers_of_the_table_of_chips(chip):
    text = gpu.config_of(Target.of(f"{chip}:8"))
    numbers = {name: float(value) for name, value in re.findall(r"(\w+): ([\d.]+)", text)}
    hardware = hardware_of(chip)
    assert numbers["device_memory_size"] == hardware.memory_bytes
    assert numbers["memory_bandwidth"] == hardware.memory_bandwidth_bytes_per_s
    shared = numbers["shared_memory_per_core"]
    assert numbers["shared_memory_per_block_optin"] == shared - 1024
    # The published peak of float32 without tensor cores: two operations a unit and clock.
    peak = 2 * numbers["core_count"] * numbers["fpus_per_core"] * numbers["clock_rate_ghz"] * 1e9
    if published := hardware.peak("float32"):
        assert peak == pytest.approx(published, rel=0.01)
    assert text.count("{") == text.count("}") > 0


def test_without_the_compiler_the_error_has_the_one_command(monkeypatch):
    monkeypatch.setattr(gpu, "_PLUGINS", ("no-such-plugin",))
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=mw.Layout(["b"], mw.Mesh({"b": 8})).sharding)
    with pytest.raises(mw.TargetError, match=r"pip install 'meshwright\[cuda\]'") as info:
        compile_ahead(jax.jit(jnp.sum), [x], "h100:8")
    assert "no GPU is needed" in str(info.value)


# Kernels of cuBLAS and cuDNN, as XLA 0.10.2 spells them for GPUs


def program(call: str, *arguments: str) -> str:
    params = "\n".join(f"  %p{i} = {a} parameter({i})" for i, a in enumerate(arguments))
    return f"HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[] {{\n{params}\n  {call}\n}}\n"


GEMM = (
    '"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":'
    '["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],'
    '"rhs_batch_dimensions":["0"]},"precision_config":{"operand_precision":["HIGHEST","DEFAULT"]}}'
)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_products_of_cublas_count_as_products(target):
    call = (
        "ROOT %gemm = (f32[4,16,32]{2,1,0}, s8[4194304]{0}) custom-call(%p0, %p1), "
        f'custom_call_target="{target}", backend_config={{{GEMM}}}'
    )
    plain = (
        "ROOT %dot = f32[4,16,32]{2,1,0} dot(%p0, %p1), lhs_batch_dims={0}, rhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_contracting_dims={1}, operand_precision={highest,default}"
    )
    arguments = "f32[4,16,64]{2,1,0}", "f32[4,64,32]{2,1,0}"
    library, own = (read_costs(program(function, *arguments)) for function in (call, plain))
    assert library.flops == own.flops == 2 * 4 * 16 * 64 * 32
    assert library.bytes == own.bytes  # what cuBLAS works in is not moved
    assert [operation.precision for operation in library.operations] == ["highest"]
    assert library.uncounted == ()


IMAGE, KERNEL, MADE = (
    "f32[8,64,64,16]{3,2,1,0}",
    "f32[32,3,3,16]{3,2,1,0}",
    "f32[8,31,31,32]{3,2,1,0}",
)


@pytest.mark.parametrize(
    ("name", "result", "operands"),
    [
        ("Forward", MADE, (IMAGE, KERNEL)),
        ("BiasActivationForward", MADE, (IMAGE, KERNEL, "f32[32]{0}")),
        ("BackwardInput", IMAGE, (MADE, KERNEL)),
        ("BackwardFilter", KERNEL, (IMAGE, MADE)),
    ],
)
def test_convolutions_of_cudnn_and_their_gradients_count_alike(name, result, operands):
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    call = (
        f"ROOT %conv = ({result}, u8[0]{{0}}) custom-call({names}), "
        "window={size=3x3 stride=2x2}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{name}"'
    )
    costs = read_costs(program(call, *operands))
    assert costs.flops == 2 * (8 * 31 * 31 * 32) * (3 * 3 * 16)
    assert costs.uncounted == ()


def test_of_other_kernels_nothing_is_made_up():
    call = 'ROOT %c = (f32[8,8]{1,0}, s32[]) custom-call(%p0), custom_call_target="cusolver_potrf"'
    costs = read_costs(program(call, "f32[8,8]{1,0}"))
    assert (costs.flops, costs.uncounted) == (0, ("cusolver_potrf",))


def test_what_the_compiler_runs_again_is_no_replicated_work():
    def dot(name):
        return f"%{name} = f32[8,8]{{1,0}} dot(%p0, %p0), lhs_contracting_dims={{1}}"

    once, again = "dot.1.remat", "dot.1.remat2"
    costs = read_costs(program(f"{dot(once)}\n  ROOT {dot(again)}", "f32[8,8]{1,0}"))
    assert [operation.again for operation in costs.operations] == [False, True]
    assert costs.flops == 2 * 2 * 8**3
    assert costs.replicated_share(8 * 2 * 8**3, 8) == 0
    assert Costs((Operation("a", "dot", "", flops=2.0),)).replicated_share(2.0, 2) == 0.5


# What it answers

needs_compiler = pytest.mark.targets


@pytest.fixture
def compiler():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="pip install 'meshwright[cuda]'")


ROWS, IO, HIDDEN = 512, 1024, 4096
SPLIT = {"w/kernel": [None, "model"], "v/kernel": ["model", None]}


@functools.cache
def two_layers(target: str) -> DryRun:
    """The example of the paper on Mesh-TensorFlow: y = relu(x w) v, over both axes."""
    with abstract():
        model = models.two_layers(IO, HIDDEN)
    mesh = mw.Mesh({"batch": Target.of(target).num_devices // 4, "model": 4})
    batch = shapes(ROWS, IO), shapes(ROWS, IO)
    return dry_run(model, batch, strategy=mw.Sharded(mesh, SPLIT), target=target)


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_collectives_are_those_of_the_closed_forms(compiler, target):
    report = two_layers(target)
    batch = dict(report.axes)["batch"]
    moved = dict.fromkeys((("batch",), ("model",)), 0)
    for collective in report.collectives:
        assert collective.kind == "all-reduce"
        assert collective.count == 1
        moved[collective.axes] += collective.bytes_per_step
    assert moved[("model",)] == 4 * ROWS // batch * IO  # the output, summed over the hidden dim
    assert moved[("batch",)] == 4 * (2 * IO * HIDDEN // 4 + 1)  # both gradients and the loss
    # XLA for GPUs puts the gradients together from end to end before it sums them.
    named = {
        name
        for collective in report.collectives
        for name in (*collective.paths, *collective.variables)
    }
    assert {"w", "v"} <= {name.partition("/")[0] for name in named}
    assert report.unexpected == ()


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_memory_is_exact_where_it_can_be(compiler, target):
    report = two_layers(target)
    batch = dict(report.axes)["batch"]
    assert report.parameter_bytes == 4 * 2 * IO * HIDDEN // 4
    assert report.slot_bytes == report.parameter_bytes + 8
    assert report.memory.input_bytes == 2 * 4 * ROWS // batch * IO
    assert report.memory.padding_bytes == 0
    assert report.memory.argument_bytes == report.compiled.argument_bytes
    assert report.memory.argument_bytes < report.peak_bytes
    total_bytes = report.compiled.argument_bytes + report.compiled.temporary_bytes
    assert (
        report.peak_bytes
        <= total_bytes + report.compiled.output_bytes - report.compiled.donated_bytes
    )
    assert report.alive_bytes == pytest.approx(report.memory.temporary_bytes, rel=0.05)
    assert report.fits is True


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_the_report_is_printed_and_its_times_are_possible(compiler, target):
    report = two_layers(target)
    hardware = hardware_of(target)
    assert report.flops == (3 + 2) * 2 * ROWS * IO * HIDDEN / Target.of(target).num_devices
    assert report.compiled.text.startswith("HloModule")
    assert parse(report.compiled.text).is_scheduled
    assert report.notes == (gpu.NOT_TUNED,)
    text = str(report)
    assert "could not autotune" in text
    assert text.startswith(f"two on {target} (batch=")
    assert f"{hardware.memory_bytes:,}" in text
    assert report.estimate.missing == ()
    assert report.step_time_s >= report.flops / hardware.peak("tensorfloat32")
    assert 0 < report.mfu < 1
    assert report.estimate.replicated_share == pytest.approx(0, abs=1e-9)


@needs_compiler
def test_zero_3_gathers_parameters_and_scatters_gradients(compiler):
    with abstract():
        hidden = [layers.Dense(1024, name=f"dense_{i}", use_bias=False) for i in range(3)]
        model = keras.Sequential([keras.Input([1024]), *hidden])
        model.compile("adam", "mse")
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}), zero=3)
    report = dry_run(model, (shapes(64, 1024),) * 2, strategy=strategy, target="h100:8")
    kernels = {f"dense_{i}/kernel" for i in range(3)}
    gathers = [collective for collective in report.collectives if collective.kind == "all-gather"]
    assert {name for gather in gathers for name in gather.variables} == kernels
    scatters = [
        collective for collective in report.collectives if collective.kind == "reduce-scatter"
    ]
    assert sum(scatter.bytes_per_step for scatter in scatters) == 3 * 4 * 1024 * 1024
    assert report.parameter_bytes == 3 * 4 * 1024 * 1024 // 8
    assert report.unexpected == ()


@needs_compiler
@pytest.mark.parametrize("target", ["a100:8", "h100:8"])
def test_loops_are_multiplied_out(compiler, target):
    mesh = mw.Mesh({"batch": 8})

    def loss(kernels, x):
        x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)
        return jnp.sum(x)

    def lies(dims, specs):
        return jax.ShapeDtypeStruct(dims, "float32", sharding=mw.Layout(specs, mesh).sharding)

    args = lies((12, 512, 512), [None, "batch", None]), lies((64, 512), ["batch", None])
    step = compile_ahead(jax.jit(jax.grad(loss)), args, target)
    assert read_costs(step.text).unknown_loops == ()
    gathers = step.of_kind("all-gather")
    assert gathers
    assert {gather.count for gather in gathers} == {12}


@needs_compiler
@pytest.mark.parametrize("zero", [0, 3])
def test_a_block_that_is_computed_again_is_left_with_its_gradients(compiler, zero):
    """Else what the products for gradients read of every block is held to the end of the step."""
    depth, width, rows = 6, 256, 65536

    def loss(weights, x):
        for one in weights:
            x = mw.block_output(x + jax.nn.gelu(x @ one["up"]) @ one["down"])
        return jnp.mean(x * x)

    weights = [{"up": shapes(width, 4 * width), "down": shapes(4 * width, width)}] * depth
    program = mw.jax_program(loss, weights, optax.sgd(0.1))
    placement = mw.Placement.of(mw.Mesh({"batch": 8}), zero=zero)
    step = mw.Sharded.from_placement(placement, mw.StepOptions(remat="block"))
    report = dry_run(program, shapes(rows, width), strategy=step, target="h100:8")
    block_bytes = (
        4 * rows // 8 * width
    )  # of each block, on a device; a hidden layer is four of them
    assert report.memory.temporary_bytes < (depth + 14) * block_bytes  # 41 and 25 without


@needs_compiler
def test_convolutions_count_as_in_the_step_that_was_written(compiler):
    with abstract():
        model = keras.Sequential(
            [
                keras.Input([64, 64, 32]),
                layers.Conv2D(64, 3, activation="relu"),
                layers.Conv2D(64, 3, strides=2),
                layers.GlobalAveragePooling2D(),
            ]
        )
        model.compile("sgd", "mse")
    batch = shapes(64, 64, 64, 32), shapes(64, 64)
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}))
    report = dry_run(model, batch, strategy=strategy, target="h100:8")
    assert "__cudnn$conv" in report.compiled.text
    first, second = 2 * 8 * 62 * 62 * 64 * 9 * 32, 2 * 8 * 30 * 30 * 64 * 9 * 64
    assert report.flops == pytest.approx(2 * first + 3 * second, rel=0.02)
    assert report.estimate.replicated_share == pytest.approx(0, abs=0.02)


@needs_compiler
def test_a_step_too_large_for_a_gpu_is_told_by_the_figures(compiler):
    x = jax.ShapeDtypeStruct((1 << 18, 1 << 17), "float32")
    program = mw.jax_program(lambda p, x: jnp.sum(p["w"]) * jnp.sum(x), {"w": x}, _sgd())
    placement = mw.Placement.of(mw.Mesh({"batch": 8}), unmatched="replicate")
    small = jax.ShapeDtypeStruct((8, 1), "float32")
    report = dry_run(program, small, strategy=placement, target="h100:8")
    assert report.fits is False
    assert report.memory.free_bytes < 0
    assert "does not fit, by" in str(report)


def _sgd():
    return pytest.importorskip("optax", reason="pip install 'meshwright[optax]'").sgd(0.1)


@needs_compiler
def test_what_was_compiled_is_kept_by_content(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    lies = mw.Layout(["batch", None], mw.Mesh({"batch": 8})).sharding
    args = [jax.ShapeDtypeStruct((64, 128), "float32", sharding=lies)]
    first = compile_ahead(jax.jit(jnp.sum), args, "h100:8")
    options = []
    monkeypatch.setattr(
        compiler_process, "_ask", lambda *which: options.append(which) or {"error": "asked"}
    )
    assert compile_ahead(jax.jit(jnp.sum), args, "h100:8") == first
    assert options == []
    with pytest.raises(mw.CompileError, match="asked"):
        compile_ahead(jax.jit(jnp.sum), args, "a100:8")
    assert len(options) == 1


# A Transformer

BLOCKS, WIDTH, HEADS, LENGTH, VOCAB = 2, 512, 8, 128, 4096


def transformer() -> keras.Model:
    ids = keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(VOCAB, WIDTH, name="embed")(ids)
    for i in range(BLOCKS):
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attend_{i}")(x, x)
        hidden = layers.Dense(4 * WIDTH, activation="gelu", name=f"up_{i}")(x)
        x = x + layers.Dense(WIDTH, name=f"down_{i}")(hidden)
    model = keras.Model(ids, layers.Dense(VOCAB, name="head")(x), name="transformer")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


@needs_compiler
@pytest.mark.parametrize("target", ["h100:8", "a100:8"])
def test_the_flops_of_a_transformer_are_those_of_the_formula(compiler, target):
    rows = 32
    with abstract():
        model = transformer()
    batch = shapes(rows, LENGTH, dtype="int32"), shapes(rows, LENGTH, dtype="int32")
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}))
    report = dry_run(model, batch, strategy=strategy, target=target)
    tokens = rows * LENGTH
    weights = BLOCKS * 12 * WIDTH**2 + WIDTH * VOCAB
    whole = 6 * tokens * weights + 12 * tokens * BLOCKS * LENGTH * WIDTH
    assert 8 * report.flops == pytest.approx(whole, rel=0.02)
    assert report.estimate.replicated_share == pytest.approx(0, abs=0.02)
