"""What ZeRO, accumulation, recompute and precision do, read from steps compiled for absent TPUs."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import meshwright as mw
from meshwright.planning import Compiled, compile_step
from meshwright.step.accumulate import accumulating_in

# One process has them all, and compiles each step once.
pytestmark = [pytest.mark.targets, pytest.mark.xdist_group("training_targets")]

TARGET = "v5p:2x2x2"
WIDTH, DEPTH, ROWS = 2048, 2, 256
NARROW = 128  # of blocks, whose activations weigh more than their parameters


def dense(width: int, **options: Any) -> layers.Dense:
    """Of zeros, which only have to be there: random numbers took half of the time."""
    return layers.Dense(width, use_bias=False, kernel_initializer="zeros", **options)


@keras.saving.register_keras_serializable("meshwright-tests")
class Block(layers.Layer):
    """Three products with large activations between them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.wide = dense(4 * NARROW, activation="gelu")
        self.deep = dense(4 * NARROW, activation="gelu")
        self.narrow = dense(NARROW)

    def build(self, shape: Any) -> None:
        self.wide.build(shape)
        self.deep.build((*shape[:-1], 4 * NARROW))
        self.narrow.build((*shape[:-1], 4 * NARROW))

    def call(self, x: Any) -> Any:
        return x + self.narrow(self.deep(self.wide(x)))


def dense_net() -> keras.Model:
    stack = [dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    return keras.Sequential([keras.Input([WIDTH]), *stack])


def odd_net() -> keras.Model:
    """Of kernels whose dims do not divide, so that ZeRO shares none of them out."""
    stack = [dense(width) for width in (1033, 1031)]
    return keras.Sequential([keras.Input([1031]), *stack])


def block_net(depth: int = 3) -> keras.Model:
    return keras.Sequential([keras.Input([NARROW]), *[Block() for _ in range(depth)]])


def compiled(build: Any = dense_net, rows: int = ROWS, **how: Any) -> Compiled:
    policy = keras.config.dtype_policy().name
    return _compiled(build, rows, tuple(how.items()), in_turn=False, policy=policy)


def in_a_loop(**how: Any) -> Compiled:
    """Four micro-batches in turn, although these few rows would be taken side by side."""
    how = {"accumulate": 4, **how}
    policy = keras.config.dtype_policy().name
    return _compiled(dense_net, ROWS, tuple(how.items()), in_turn=True, policy=policy)


@functools.cache
def _compiled(
    build: Any, rows: int, how: tuple[tuple[str, Any], ...], *, in_turn: bool, policy: str
) -> Compiled:
    assert keras.config.dtype_policy().name == policy
    strategy = mw.Sharded(mw.create_mesh({"batch": 8}), **dict(how))
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    width = model.inputs[0].shape[-1]
    batch = np.zeros([rows, width], "float32"), np.zeros([rows, width], "float32")
    with accumulating_in("in a loop") if in_turn else contextlib.nullcontext():
        return compile_step(strategy, model, batch, TARGET)


@pytest.fixture
def policy() -> Any:
    with contextlib.ExitStack() as stack:
        stack.callback(keras.config.set_dtype_policy, "float32")
        yield keras.config.set_dtype_policy


def test_fully_sharded_parameters_are_gathered_layer_by_layer() -> None:
    depth, width = 5, 4096  # smaller ones are all gathered early, for there is room
    kernel_bytes = width * width * 4

    def build() -> keras.Model:
        stack = [dense(width, activation="relu") for _ in range(depth)]
        return keras.Sequential([keras.Input([width]), *stack])

    step = compiled(build, zero=3)
    assert step.argument_bytes < 1.05 * (depth * kernel_bytes + 2 * ROWS * width * 4) / 8
    gathers = step.of_kind("all-gather")
    # Once forward and once backward, but for the first layer, whose inputs need no gradient.
    assert len(gathers) == 2 * depth - 1
    places = sorted(gather.position for gather in gathers)
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(places))
    assert step.temporary_bytes < 2 * kernel_bytes


def loop_state(step: Compiled) -> str:
    """What travels around the loop over micro-batches."""
    lines = [line for line in step.text.splitlines() if " while(" in line]
    return max(lines, key=len)


def test_the_accumulator_of_level_2_is_a_piece() -> None:
    whole, piece = f"f32[{WIDTH},{WIDTH}]", f"f32[{WIDTH // 8},{WIDTH}]"
    level_0, level_2 = in_a_loop(), in_a_loop(zero=2)
    assert piece not in loop_state(level_0)
    assert loop_state(level_2).count(piece) >= DEPTH
    assert loop_state(level_2).count(whole) <= DEPTH  # the parameters, no sums
    if jax.__version_info__ < (0, 11):  # newer libraries of the TPU gather through a second array
        assert level_2.temporary_bytes < level_0.temporary_bytes


def test_few_rows_are_taken_side_by_side_in_no_more_memory_than_in_turn() -> None:
    chosen = compiled(accumulate=4)
    assert " while(" not in chosen.text
    assert chosen.temporary_bytes <= in_a_loop().temporary_bytes


def test_many_rows_are_taken_in_turn() -> None:
    one_block = functools.partial(block_net, 1)
    assert " while(" in compiled(one_block, rows=8192, accumulate=4).text


def test_micro_batches_share_one_sum_over_the_devices() -> None:
    """Also in a loop: what travels is as much as for one batch."""
    once, four = compiled(), in_a_loop()
    sums = [collective.elements * collective.count for collective in four.of_kind("all-reduce")]
    assert DEPTH * WIDTH * WIDTH <= sum(sums) <= DEPTH * WIDTH * WIDTH + 64
    assert sum(sums) <= sum(e.elements * e.count for e in once.of_kind("all-reduce")) + 64


def test_recompute_needs_fewer_temporary_bytes() -> None:
    step = compiled(block_net, rows=8192)
    again = compiled(block_net, rows=8192, remat="dots_saveable")
    assert again.temporary_bytes < 0.85 * step.temporary_bytes


def test_a_block_that_is_computed_again_adds_its_input_and_not_what_is_inside() -> None:
    rows = 1 << 15
    few, many = (
        compiled(functools.partial(block_net, depth), rows=rows, remat="block").peak_bytes
        for depth in (2, 4)
    )
    per_block = (many - few) / 2
    block_input = rows * NARROW * 4 // 8
    gradient = 4 * (2 * NARROW * 4 * NARROW + (4 * NARROW) ** 2)  # of a block, beside its weights
    inside = rows * 4 * NARROW * 4 // 8  # one of its arrays
    assert per_block < 1.2 * (block_input + 2 * gradient)
    assert per_block < inside


def types_of(step: Compiled, kind: str, elements: int) -> set[str]:
    return {
        array.dtype
        for collective in step.of_kind(kind)
        for array in collective.arrays
        if np.prod(array.dims) >= elements
    }


def types_of_sums(step: Compiled) -> set[str]:
    """XLA may turn a reduce-scatter into an all-reduce."""
    return types_of(step, "all-reduce", WIDTH) | types_of(step, "reduce-scatter", WIDTH)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_gradients_are_summed_in_the_type_that_is_asked_for(policy: Any, zero: int) -> None:
    policy("mixed_bfloat16")
    usual, wide = compiled(zero=zero), compiled(zero=zero, sums="float32")
    assert types_of_sums(usual) == {"bfloat16"}
    assert types_of_sums(wide) == {"float32"}
    if zero == 3:
        assert types_of(usual, "all-gather", WIDTH) == {"bfloat16"}  # the compute type


def test_what_zero_cannot_share_out_is_summed_in_the_same_type(policy: Any) -> None:
    policy("mixed_bfloat16")
    assert types_of(compiled(odd_net, zero=2), "all-reduce", 1031) == {"bfloat16"}
    wide = compiled(odd_net, zero=2, sums="float32")
    assert types_of(wide, "all-reduce", 1031) == {"float32"}


@pytest.mark.parametrize(("zero", "dtype"), [(0, "float32"), (1, "float32"), (2, "bfloat16")])
def test_micro_batches_are_added_up_before_they_travel_or_after(
    policy: Any, zero: int, dtype: str
) -> None:
    policy("mixed_bfloat16")
    assert types_of_sums(in_a_loop(zero=zero)) == {dtype}
