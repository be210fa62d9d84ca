"""Ahead-of-time compilation for a CPU target says what compiling here would say."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import laid_out

import meshwright as mw
from meshwright import _compat
from meshwright.hlo.collectives import read_collectives
from meshwright.planning import Compiled, compile_ahead, compile_step
from meshwright.planning.compiler_process import watching
from meshwright.targets import gpu
from meshwright.testing import run_in_fresh_process

MESH = {"batch": 4, "model": 2}


class State(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


def train(state, batch):
    def loss(state):
        return jnp.mean((batch["x"] @ state.kernel + state.bias) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, g: a - 0.1 * g, state, grads), value


def arguments(mesh):
    state = State(laid_out(mesh, (64, 32), [None, "model"]), laid_out(mesh, (32,), ["model"]))
    return state, {"x": laid_out(mesh, (16, 64), ["batch", None])}


def figures(compiled: Compiled) -> tuple[int, ...]:
    return (
        compiled.argument_bytes,
        compiled.output_bytes,
        compiled.donated_bytes,
        compiled.temporary_bytes,
        compiled.peak_bytes,
    )


def figures_of_jax(compiled) -> tuple[int, ...]:
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.peak_memory_in_bytes,
    )


@functools.cache
def ahead(donated: bool = True) -> Compiled:
    jitted = jax.jit(train, donate_argnums=0 if donated else ())
    return compile_ahead(jitted, arguments(mw.Mesh(MESH)), "cpu:8")


def test_a_plain_step_on_an_abstract_mesh_is_what_this_process_would_compile():
    direct = jax.jit(train, donate_argnums=0).lower(*arguments(mw.create_mesh(MESH))).compile()
    assert figures(ahead()) == figures_of_jax(direct)
    here = read_collectives(direct.as_text(), tuple(MESH.items()))
    assert [(c.kind, c.axes, c.arrays) for c in ahead().collectives] == [
        (c.kind, c.axes, c.arrays) for c in here
    ]


def test_bytes_and_collectives_are_those_that_the_layouts_ask_for():
    compiled = ahead()
    assert compiled.argument_bytes == 4 * (64 * 16 + 16 + 4 * 64)
    reduced = [array.dims for c in compiled.collectives if "batch" in c.axes for array in c.arrays]
    assert (64, 16) in reduced or (16, 64) in reduced  # the gradient of the kernel's piece
    assert {c.kind for c in compiled.collectives} == {"all-reduce"}
    assert {c.dtypes for c in compiled.collectives if c.reduces} == {("float32",)}
    assert compiled.of_kind("all-gather") == ()


@pytest.mark.full
def test_donation_survives():
    state_bytes = 4 * (64 * 16 + 16)
    assert ahead(donated=True).donated_bytes == state_bytes
    assert ahead(donated=False).donated_bytes == 0
    # XLA for CPU counts no shared buffer in its peak, so the sum is compared.
    without, donating = ahead(donated=False), ahead(donated=True)
    assert (
        without.output_bytes - without.donated_bytes
        >= donating.output_bytes - donating.donated_bytes + (state_bytes)
    )


def test_each_element_type_is_read_as_it_stands():
    def halves(x, y):
        def summed(x, y):
            return jax.lax.psum(x, "batch"), jax.lax.psum(y, "batch")

        return jax.shard_map(
            summed, in_specs=(P("batch"), P("batch")), out_specs=(P(), P()), mesh=mesh.jax_mesh
        )(x, y)

    mesh = mw.create_mesh({"batch": 8})
    args = laid_out(mesh, (16,), ["batch"]), laid_out(mesh, (16,), ["batch"], jnp.int32)
    compiled = compile_ahead(jax.jit(halves), args, "cpu:8")
    arrays = [array for c in compiled.collectives for array in c.arrays]
    assert sorted(array.dtype for array in arrays) == ["float32", "int32"]
    assert {array.dims for array in arrays} == {(2,)}


def keras_model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([16]),
                keras.layers.Dense(32, activation="relu", name="hidden"),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(8, name="last"),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    return model


BATCH = np.ones([16, 16], "float32"), np.ones([16, 8], "float32")


@pytest.mark.full
def test_a_keras_step_is_the_one_that_fit_runs():
    rules = {"hidden.*kernel": [mw.UNSHARDED, "model"]}
    strategy = mw.Sharded(mw.create_mesh(MESH), rules)
    model = keras_model(strategy)
    compiled = compile_step(strategy, model, BATCH, "cpu:8")
    state, batch = strategy.state(model), strategy.put(BATCH)
    assert all(own.train._cache_size() == 0 for own in model._meshwright_functions.values())
    strategy.fit(model, *BATCH, batch_size=16, verbose=0)
    (functions,) = model._meshwright_functions.values()
    direct = functions.train.lower(strategy.state(model), batch).compile()
    assert figures(compiled) == figures_of_jax(direct)
    explained = strategy.explain(model)
    bytes_held = sum(placed.bytes_per_device for placed in explained.placed)
    assert compiled.argument_bytes == bytes_held + 4 * (4 * 16 + 4 * 8)
    assert compiled.donated_bytes == bytes_held
    assert len(jax.tree.leaves(state)) == len(explained.placed)


@pytest.mark.full
def test_a_step_with_a_halo_exchange_compiles():
    strategy = mw.Sharded(
        mw.create_mesh({"rows": 8}), batch=None, inputs=[None, "rows", None, None]
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([16, 4, 1]),
                keras.layers.Conv2D(2, 3, padding="same"),
                keras.layers.GlobalAveragePooling2D(),
            ]
        )
        model.compile("sgd", "mse")
    batch = np.ones([2, 16, 4, 1], "float32"), np.ones([2, 2], "float32")
    compiled = compile_step(strategy, model, batch, "cpu:8")
    halo = compiled.of_kind("collective-permute")
    assert halo
    assert {c.axes for c in halo} == {("rows",)}


# What goes wrong


def test_another_number_of_devices_is_an_error_before_anything_is_compiled():
    with pytest.raises(
        mw.TargetError, match=r"over 8 devices \(batch=4, model=2\), and the target v5e:4x4 has 16"
    ):
        compile_ahead(jax.jit(train), arguments(mw.Mesh(MESH)), "v5e:4x4")


def test_arguments_without_a_mesh_are_an_error():
    with pytest.raises(mw.TargetError, match="no argument lies on a mesh"):
        compile_ahead(jax.jit(jnp.sin), [jnp.ones(8)], "cpu:8")


def test_a_step_that_does_not_compile_is_an_error_in_the_compilers_words():
    def unknown(x):
        call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x)

    x = laid_out(mw.Mesh({"batch": 8}), (16,), ["batch"])
    with pytest.raises(mw.CompileError, match="no_such_target"):
        compile_ahead(jax.jit(unknown), [x], "cpu:8")


def test_a_step_that_calls_back_into_python_is_an_error():
    def noisy(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = laid_out(mw.Mesh({"batch": 8}), (16,), ["batch"])
    with pytest.raises(
        mw.CompileError, match=r"cannot be lowered for cpu:8: .*\. Leave jax.pure_callback"
    ):
        compile_ahead(jax.jit(noisy), [x], "cpu:8")


@pytest.mark.parametrize("donated", [(), (0,)])
def test_what_a_step_prints_costs_nothing_and_stays(donated):
    """Also in branches, in loops, and where the forward pass is computed again."""
    shown = []

    def step_that_calls(call):
        def layer(y, w):
            call(y[0, 0])
            return jnp.tanh(y @ w)

        def loss(w, x):
            y, _ = jax.lax.scan(lambda y, _: (jax.checkpoint(layer)(y, w), None), x, length=2)
            return jax.lax.cond(y[0, 0] > 2, lambda y: layer(y, w), lambda y: y, y).sum()

        return jax.jit(lambda w, x: w - jax.grad(loss)(w, x), donate_argnums=donated)

    def show(value):
        jax.debug.callback(shown.append, value)
        jax.debug.inspect_array_sharding(value, callback=shown.append)

    noisy = step_that_calls(show)
    silent = step_that_calls(lambda value: None)
    mesh = mw.Mesh({"batch": 8})
    args = [laid_out(mesh, (16, 16), [None]), laid_out(mesh, (32, 16), ["batch"])]
    found, expected = (compile_ahead(step, args, "cpu:8") for step in (noisy, silent))
    assert (found.peak_bytes, found.donated_bytes) == (expected.peak_bytes, expected.donated_bytes)
    assert len(found.collectives) == len(expected.collectives) > 0
    assert bool(found.donated_bytes) == bool(donated)
    noisy(jnp.ones((16, 16)), jnp.ones((32, 16)))
    jax.effects_barrier()
    assert shown


def test_without_the_compiler_for_gpus_the_error_names_the_command(monkeypatch):
    monkeypatch.setattr(gpu, "_PLUGINS", ("no-such-plugin",))
    with pytest.raises(mw.TargetError, match=r"pip install 'meshwright\[cuda\]'"):
        compile_ahead(jax.jit(train), arguments(mw.Mesh(MESH)), "h200:8")


def test_a_compilation_that_takes_too_long_is_stopped():
    with pytest.raises(mw.CompileError, match=r"took longer than 0.1 s.*timeout_s="):
        compile_ahead(jax.jit(train), arguments(mw.Mesh(MESH)), "cpu:8", timeout_s=0.1)


def test_the_devices_of_this_process_stay_as_they_are():
    before = jax.devices()
    ahead()
    assert jax.devices() == before
    assert jax.default_backend() == "cpu"


def test_keras_chooses_attention_kernels_for_the_target():
    def attend(x):
        return keras.ops.dot_product_attention(x, x, x)

    x = jax.ShapeDtypeStruct((2, 128, 4, 128), jnp.float32)
    here = str(jax.make_jaxpr(lambda x: attend(x))(x))
    with _compat.keras_sees("tpu"):
        there = str(jax.make_jaxpr(lambda x: attend(x))(x))
    assert "pallas_call" in there
    assert "pallas_call" not in here
    assert "pallas_call" not in str(jax.make_jaxpr(lambda x: attend(x))(x))


def test_the_compiling_process_never_loads_keras():
    out = run_in_fresh_process(
        """
        import sys
        import meshwright.planning.child
        print("keras" in sys.modules, "jax" in sys.modules)
        """
    )
    assert out == "False False\n"


def test_wide_numbers_asked_for_in_code_reach_the_compiler():
    mesh = mw.Mesh(MESH)
    with jax.enable_x64(True):
        x = laid_out(mesh, (16, 4), ["batch", None], "float64")
        step = compile_ahead(jax.jit(lambda x: x.sum()), [x], "cpu:8")
    assert step.argument_bytes == 16 // 4 * 4 * 8
    assert step.collectives[0].dtypes == ("float64",)


def test_whoever_watches_is_told_how_long_it_takes():
    waits_s: list[float] = []
    with watching(waits_s.append):
        x = laid_out(mw.Mesh(MESH), (16, 4), ["batch", None])
        compile_ahead(jax.jit(lambda x: x.sum()), [x], "cpu:8")
    assert waits_s[0] < 1
    assert waits_s == sorted(waits_s)
