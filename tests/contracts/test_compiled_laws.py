"""Proof from the compiled program and from live arrays: what travels, and what is ever whole."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers
from oracle import compiled, made
from strategies import BATCH, STRATEGIES, Row, rows

import meshwright as mw
from meshwright.step.accumulate import accumulating_in


def step_text(row: Row) -> str:
    """The compiled training step of a row; 24 rows, so that no activation has a kernel's dims."""
    strategy, (x, y) = row.strategy(), row.of.data()
    model = made(strategy, compiled(row.of.build, lambda: keras.optimizers.Adam(1e-3)))
    batch = x[:24], y[:24]
    step = jax.jit(strategy.train_step(model, batch))
    return step.lower(strategy.state(model), strategy.put(batch)).compile().as_text()


def shapes(text: str, operation: str) -> list[tuple[int, ...]]:
    """The dims of every result of an operation, also of those inside tuples and started apart."""
    results = []
    for line in text.splitlines():
        head = re.search(rf"= (.*?) {operation}(-start)?\(", line)
        if head:
            dims = re.findall(r"\w+\[([\d,]*)\]", head[1])
            results += [tuple(int(d) for d in dim.split(",") if d) for dim in dims]
    return results


def _by_name(name: str) -> Row:
    return next(row for row in STRATEGIES if row.name == name)


def _kernels(row: Row) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in row.of.build().weights if len(weight.shape) > 1]


@pytest.mark.full
def test_the_step_with_dense_layers_over_model_gathers_no_kernel() -> None:
    row = _by_name("model-dense")
    gathered = {math.prod(dims) for dims in shapes(step_text(row), "all-gather")}
    assert not gathered & {math.prod(dims) for dims in _kernels(row)}  # however it is turned


@pytest.mark.full
def test_the_step_with_kernels_over_the_batch_axis_gathers_them() -> None:
    """What the test above looks for is found where it must be: FSDP gathers before it computes."""
    row = _by_name("fsdp-dense")
    gathered = {math.prod(dims) for dims in shapes(step_text(row), "all-gather")}
    assert gathered & {math.prod(dims) for dims in _kernels(row)}


def convolutions() -> keras.Model:
    """What an image classifier usually is; its maps divide everywhere."""
    same = {"padding": "same", "activation": "relu"}
    return keras.Sequential(
        [
            keras.Input([16, 16, 1]),
            layers.Conv2D(8, 3, **same),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, **same),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


@pytest.mark.full
def test_the_spatial_step_exchanges_borders_and_gathers_no_image() -> None:
    strategy = _by_name("spatial-images").strategy()
    model = made(strategy, compiled(convolutions, lambda: keras.optimizers.Adam(1e-3)))
    batch = np.zeros([8, 16, 16, 1], "float32"), np.zeros([8], "int32")
    step = jax.jit(strategy.train_step(model, batch))
    text = step.lower(strategy.state(model), strategy.put(batch)).compile().as_text()
    assert shapes(text, "collective-permute")
    gathered = [dims for dims in shapes(text, "all-gather") if len(dims) == 4]
    assert not [dims for dims in gathered if max(dims[1:3]) >= 8], gathered


@pytest.mark.full
def test_the_data_parallel_step_only_sums() -> None:
    text = step_text(_by_name("dp8-dense"))
    assert shapes(text, "all-reduce")
    assert not shapes(text, "all-gather")
    assert not shapes(text, "collective-permute")


@pytest.mark.full_for("0-1", "0-3", "1-1", "1-3", "2-3")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_with_zero_gradients_are_summed_to_the_pieces_that_are_updated(
    zero: int, accumulate: int
) -> None:
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}), zero=zero, accumulate=accumulate)
    with strategy.scope():
        model = keras.Sequential([keras.Input([64]), layers.Dense(256), layers.Dense(8)])
        model.compile("adam", "mse")
    batch = np.zeros([16, 64], "float32"), np.zeros([16, 8], "float32")
    step = jax.jit(strategy.train_step(model, batch))
    laid = strategy.put(batch)
    with accumulating_in("written out"):
        lowered = step.lower(strategy.state(model), laid if accumulate == 1 else (laid,) * 3)
    text = lowered.compile().as_text()
    scattered, summed = shapes(text, "reduce-scatter"), shapes(text, "all-reduce")
    times = accumulate if zero == 2 else 1  # level 2 keeps pieces only
    assert scattered == ([(8, 256)] * times if zero else [])
    assert summed.count((64, 256)) == (not zero)


@pytest.mark.full_for("zero3-model-wide")
@pytest.mark.parametrize("row", rows())
def test_live_shards_hold_the_bytes_that_explain_says(row: Row) -> None:
    strategy, (x, y) = row.strategy(), row.of.data()
    model = made(strategy, compiled(row.of.build, lambda: keras.optimizers.Adam(1e-3)))
    strategy.train_step(model, (x[:BATCH], y[:BATCH]))  # whatever builds late is built now
    explained = strategy.explain(model)
    state = strategy.state(model)
    bytes_on = dict.fromkeys(strategy.mesh.bound_devices(), 0)
    parameters = dict(bytes_on)
    for part in state:
        for array in part.values():
            for shard in array.addressable_shards:
                bytes_on[shard.device] += shard.data.nbytes
                parameters[shard.device] += shard.data.nbytes if part is state.params else 0
    assert set(bytes_on.values()) == {explained.bytes_per_device}
    assert set(parameters.values()) == {explained.parameter_bytes_per_device}


WIDE = 4096  # a kernel of 64 MiB, each of 8 devices holding 8 MiB


class Watch:
    """The largest piece that any device held of any array, seen while variables are made."""

    def __init__(self) -> None:
        self.largest = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self.look()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.look()

    def look(self) -> None:
        for array in jax.live_arrays():
            piece = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            self.largest = max(self.largest, piece)


def wide_model() -> keras.Model:
    model = keras.Sequential([keras.Input([WIDE]), layers.Dense(WIDE, name="wide")], name="wide")
    model.compile("adam", "mse")
    return model


@pytest.fixture
def split() -> Iterator[mw.Sharded]:
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    yield mw.Sharded(mesh, {"wide.*kernel": ["batch", "model"]})
    keras.backend.clear_session()


@pytest.mark.full
def test_no_parameter_and_no_slot_is_ever_whole_on_a_device(split: mw.Sharded) -> None:
    """Neither as a live array, nor as a temporary of the program that makes it."""
    with Watch() as watch, split.scope():
        model = wide_model()
    batch = np.zeros([8, WIDE], "float32")
    with Watch() as slots:
        split.train_step(model, (batch, batch))
    whole = WIDE * WIDE * 4
    kernel = model.layers[0].kernel.value
    assert {shard.data.nbytes for shard in kernel.addressable_shards} == {whole // 8}
    assert watch.largest == slots.largest == whole // 8
    by_role = [placed for placed in split.explain(model).placed if placed.info.dims == (WIDE, WIDE)]
    assert len(by_role) == 3  # the kernel and Adam's two slots
    for variable in [v for v in model.optimizer.variables if tuple(v.shape) == (WIDE, WIDE)]:
        assert {s.data.nbytes for s in variable.value.addressable_shards} == {whole // 8}


def test_the_program_that_makes_a_kernel_needs_no_more_than_pieces_of_it(
    split: mw.Sharded,
) -> None:
    sharding = mw.Layout(["batch", "model"], split.mesh).sharding
    make = keras.initializers.GlorotUniform(seed=1)
    program = jax.jit(lambda: make([WIDE, WIDE]), out_shardings=sharding)
    memory = program.lower().compile().memory_analysis()
    pieces = (memory.temp_size_in_bytes + memory.output_size_in_bytes) / (WIDE * WIDE * 4 / 8)
    assert pieces < 4.1  # of eight; the random bits and the piece itself, twice


def test_the_watch_sees_a_whole_kernel() -> None:
    with Watch() as watch:
        array = jax.numpy.zeros([WIDE, WIDE])
    assert watch.largest == array.nbytes


def test_batches_lie_as_they_are_told() -> None:
    row = _by_name("spatial-images")
    x, y = row.of.data()
    images, labels = row.strategy().put((x[:BATCH], y[:BATCH]))
    assert {shard.data.shape for shard in images.addressable_shards} == {(8, 4, 4, 3)}
    assert {shard.data.shape for shard in labels.addressable_shards} == {(8,)}
    np.testing.assert_array_equal(np.asarray(images), x[:BATCH])
