"""Compiled for TPUs that are not there: memory, collectives, parameters gathered layer by layer."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from models import laid_out

import meshwright as mw
from meshwright import topology
from meshwright.planning import (
    Compiled,
    Target,
    compile_ahead,
    compile_step,
    compiler_process,
    most_bytes_at_once,
)
from meshwright.testing import run_in_fresh_process

# One process has them all, and compiles each step once.
pytestmark = [pytest.mark.targets, pytest.mark.xdist_group("ahead_tpu")]
pytest.importorskip("libtpu", reason="pip install 'meshwright[tpu]'")

BOTH = ["v5e:2x4", "v5p:2x2x2"]
LAYERS, WIDTH, ROWS = 5, 2048, 4096


def test_topologies_have_as_many_devices_as_targets_say():
    names = "v2:2x2 v3:2x2 v4:2x2x2 v5e:2x4 v5e:16x16 v5p:2x2x2 v6e:2x4 tpu7x:2x2x1"
    out = run_in_fresh_process(
        f"""
        from jax.experimental import topologies
        for name in {names.split()}:
            how = {{"chip_config_name": "megacore"}} if name.startswith("v4") else {{}}
            print(len(topologies.get_topology_desc(name, platform="tpu", **how).devices))
        """,
        env={
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        },
    )
    assert out.split() == [str(Target.from_string(name).num_devices) for name in names.split()]


@pytest.mark.parametrize("target", ["v5e:1x1", "v5p:1x2x2"])
def test_a_slice_that_is_less_than_the_usual_host_compiles(target):
    mesh = mw.Mesh({"batch": Target.of(target).num_devices})
    rows = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=mw.Layout(["batch"], mesh).sharding)
    compiled = compile_ahead(jax.jit(lambda x: x.sum()), [rows], target)
    assert len(compiled.collectives) == (mesh.size > 1)


def test_a_mesh_of_two_axes_compiles_for_v4():
    """Its two cores are one device, as JAX wants them for such a mesh."""
    mesh = mw.Mesh({"batch": 2, "model": 2})
    rows = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=mw.Layout(["batch"], mesh).sharding)
    compiled = compile_ahead(jax.jit(lambda x: x.sum()), [rows], "v4:2x2x1")
    assert [collective.axes for collective in compiled.collectives] == [("batch",)]


def test_several_slices_compile_with_the_first_axis_between_them():
    mesh = mw.Mesh({"dcn": 2, "batch": 4, "model": 2})
    rows = mw.Layout([("dcn", "batch"), None], mesh).sharding
    kernel = mw.Layout([None, "model"], mesh).sharding
    args = [
        jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=rows),
        jax.ShapeDtypeStruct((128, 256), jnp.float32, sharding=kernel),
    ]
    step = jax.jit(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), out_shardings=kernel)
    compiled = compile_ahead(step, args[::-1], "v5e:2x(2x4)")
    moved = [(c.kind, c.axes, c.group_size, c.bytes_per_device) for c in compiled.collectives]
    whole = 128 * 256 // 2 * 4
    assert moved == [  # what is summed within a slice is all that its devices send to the other
        ("reduce-scatter", ("batch",), 4, whole),
        ("all-reduce", ("dcn",), 2, whole // 4),
        ("all-gather", ("batch",), 4, whole),
    ]


# Data parallel: one dense layer, every parameter in every device


def replicated_step(state, batch):
    def loss(state):
        return jnp.mean((batch @ state["kernel"] + state["bias"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, g: a - 0.1 * g, state, grads), value


@pytest.mark.parametrize("target", BOTH)
def test_data_parallel_reduces_each_gradient_once_in_float32(target):
    mesh = mw.Mesh({"batch": 8})
    state = {
        "kernel": laid_out(mesh, (1024, 2048), [None, None]),
        "bias": laid_out(mesh, (2048,), [None]),
    }
    batch = laid_out(mesh, (512, 1024), ["batch", None])
    step = compile_ahead(jax.jit(replicated_step, donate_argnums=0), (state, batch), target)
    state_bytes = 4 * (1024 * 2048 + 2048)
    assert step.argument_bytes == state_bytes + 4 * 64 * 1024
    assert step.donated_bytes == state_bytes
    assert {c.kind for c in step.collectives} == {"all-reduce"}
    assert {c.axes for c in step.collectives} == {("batch",)}
    assert {c.dtypes for c in step.collectives} == {("float32",)}
    moved = sum(c.elements for c in step.collectives)
    assert moved == 1024 * 2048 + 2048 + 1  # both gradients and the loss


# Parameters shared out over the axis of the batch (ZeRO 3, FSDP): gathered where a layer needs them


@functools.cache
def mlp(target: str, zero: int) -> Compiled:
    """A step of dense layers; with enough rows that parameters are cheaper to move than they."""
    rules = {} if zero else {".*kernel": ["batch", None]}
    strategy = mw.Sharded(mw.create_mesh({"batch": 8}), rules, zero=zero, unmatched="replicate")
    with strategy.scope():
        zeros = {"kernel_initializer": "zeros"}  # random numbers would only take time
        layers = [keras.layers.Dense(WIDTH, activation="relu", **zeros) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input([WIDTH]), *layers])
        model.compile("sgd", "mse")
    batch = np.zeros([ROWS, WIDTH], "float32"), np.zeros([ROWS, WIDTH], "float32")
    return compile_step(strategy, model, batch, target)


def gathers_of_kernels(step: Compiled):
    return [c for c in step.of_kind("all-gather") if c.elements >= WIDTH * WIDTH]


def kernels_at_once(step: Compiled) -> float:
    gathers = gathers_of_kernels(step)
    return most_bytes_at_once(gathers) / gathers[0].bytes_per_device


@pytest.mark.parametrize("target", BOTH)
def test_zero_3_gathers_each_layer_by_itself_forwards_and_again_backwards(target):
    gathers = gathers_of_kernels(mlp(target, zero=3))
    assert {c.elements for c in gathers} == {WIDTH * WIDTH}  # never two layers in one
    assert {c.axes for c in gathers} == {("batch",)}
    assert len(gathers) == 2 * LAYERS - 1  # the first layer has no gradient to pass on
    # TPU multiplies float32 as bfloat16 by default, and XLA gathers what will be multiplied.
    assert {c.dtypes for c in gathers} <= {("bfloat16",), ("float32",)}


# v5p gathers, multiplies, forgets. v5e has the gathers run beside the layers before, some ahead.
@pytest.mark.parametrize(("target", "most"), [("v5p:2x2x2", 1), ("v5e:2x4", 0.75 * LAYERS)])
def test_zero_3_never_holds_all_gathered_parameters(target, most):
    step = mlp(target, zero=3)
    assert "is_scheduled=true" in step.text.partition("\n")[0]
    positions = [c.position for c in gathers_of_kernels(step)]
    assert positions == sorted(set(positions))
    assert kernels_at_once(step) <= most


def test_rules_alone_gather_everything_at_once():
    # What ZeRO 3 is for: XLA gathers all parameters before the first layer and keeps them.
    assert kernels_at_once(mlp("v5p:2x2x2", zero=0)) == LAYERS


@pytest.mark.parametrize("target", BOTH)
def test_each_device_holds_its_share_of_the_parameters(target):
    step = mlp(target, zero=3)
    kernels = LAYERS * WIDTH * WIDTH * 4 // 8
    biases = LAYERS * WIDTH * 4
    batch = 2 * ROWS * WIDTH * 4 // 8
    assert kernels + batch <= step.argument_bytes <= 1.001 * (kernels + biases + batch)
    assert {c.dtypes for c in step.collectives if c.reduces} == {("float32",)}


def test_attention_compiles_for_tpu_without_the_kernel_that_cannot_be_split():
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with strategy.scope():
        x = keras.Input([128, 256])
        y = keras.layers.MultiHeadAttention(2, 128)(x, x)
        model = keras.Model(x, y)
        model.compile("sgd", "mse")
    batch = np.zeros([16, 128, 256], "float32"), np.zeros([16, 128, 256], "float32")
    step = compile_step(strategy, model, batch, "v5e:2x4")
    assert "tpu_custom_call" not in step.text
    assert {c.kind for c in step.collectives} == {"all-reduce"}


# What the compiler says where it does not fit, and where it cannot print


def test_a_step_that_does_not_fit_says_how_much_is_needed_and_there():
    mesh = mw.Mesh({"batch": 8})
    x = laid_out(mesh, (1 << 17, 1 << 16), [None, None])
    with pytest.raises(mw.DoesNotFitError, match="does not fit into a device of v5e:2x4") as info:
        compile_ahead(jax.jit(jnp.sum), [x], "v5e:2x4")
    assert info.value.needed_bytes == 1 << 35
    assert 15 << 30 < (info.value.available_bytes or 0) < 1 << 34
    assert "RESOURCE_EXHAUSTED" in info.value.breakdown


def test_the_dump_serves_where_the_executable_cannot_be_printed(monkeypatch):
    mesh = mw.Mesh({"batch": 4, "model": 2})
    state = {
        "kernel": laid_out(mesh, (512, 512), [None, "model"]),
        "bias": laid_out(mesh, (512,), ["model"]),
    }
    args = state, laid_out(mesh, (64, 512), ["batch", None])
    printed = compile_ahead(jax.jit(replicated_step), args, "v5p:2x2x2")
    run = compiler_process._run

    def cannot_print(folder, target, timeout_s, dump):
        return run(folder, target, timeout_s, dump=True) if dump else {"no_text": True}

    monkeypatch.setattr(compiler_process, "_run", cannot_print)
    dumped = compile_ahead(jax.jit(replicated_step), args, "v5p:2x2x2")
    # Newer dumps have no line, and so no name, for an item of a tuple.
    nameless = [[replace(c, op_names=()) for c in e.collectives] for e in (dumped, printed)]
    assert nameless[0] == nameless[1]
    assert len(dumped.collectives) > 0
    assert dumped.peak_bytes == printed.peak_bytes


def test_loops_are_counted_though_tpu_programs_do_not_note_it():
    mesh = mw.Mesh({"batch": 8})

    def loss(kernels, x):
        x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)
        return jnp.sum(x)

    kernels = laid_out(mesh, (12, 512, 512), [None, "batch", None])
    x = laid_out(mesh, (64, 512), ["batch", None])
    step = compile_ahead(jax.jit(jax.grad(loss)), [kernels, x], "v5e:2x4")
    assert "known_trip_count" not in step.text
    gathers = step.of_kind("all-gather")
    assert gathers
    assert {c.count for c in gathers} == {12}


def test_the_library_of_the_tpu_says_nothing_where_there_is_no_tpu():
    code = "import meshwright, jax; print(jax.devices('cpu')[0].platform)"
    silent = {"JAX_PLATFORMS", *topology._TPU_MACHINE}
    environment = {name: value for name, value in os.environ.items() if name not in silent}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (result.stdout, result.stderr) == ("cpu\n", "")


def test_what_a_user_says_of_the_tpu_stays(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name in topology._TPU_MACHINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host-0")
    topology.settle_tpu_library()
    assert "TPU_ACCELERATOR_TYPE" not in os.environ
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES")
    monkeypatch.setattr(topology, "_may_have_a_tpu", lambda: True)
    topology.settle_tpu_library()
    assert not {*topology._TPU_MACHINE} & {*os.environ}
