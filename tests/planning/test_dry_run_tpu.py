"""Dry runs for absent TPUs: what fits, what does not, and models larger than this machine."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import keras
import pytest
from keras import layers
from models import shapes
from optax import adam

import meshwright as mw
from meshwright.frontends.dry_runs import dry_run
from meshwright.frontends.keras.abstract import abstract
from meshwright.planning.dry_run import DryRun

pytestmark = pytest.mark.targets


def report(width: int, depth: int, rows: int, target: str, strategy: mw.Sharded) -> DryRun:
    with abstract():
        model = keras.Sequential([keras.Input([width])])
        for _ in range(depth):
            model.add(layers.Dense(4 * width, activation="relu", use_bias=False))
            model.add(layers.Dense(width, use_bias=False))
        model.compile("adam", "mse")
    taken = (shapes(rows, width),) * 2
    return dry_run(model, taken, strategy=strategy, target=target, blocks="whole")


SPLIT = {
    "dense(_[0-9]*[02468])?/kernel": [None, "model"],
    "dense_[0-9]*[13579]/kernel": ["model", None],
}


def split(mesh) -> mw.Sharded:
    """Columns of every first kernel over ``model``, rows of every second."""
    return mw.Sharded(mw.Mesh(mesh), SPLIT)


@pytest.fixture(autouse=True)
def _names_from_the_start():
    keras.backend.clear_session()


def test_a_model_of_five_billion_parameters_that_fits_nowhere_here():
    result = report(8192, 10, 512, "v5p:2x2x2", split({"batch": 2, "model": 4}))
    weights = 10 * 2 * 8192 * 4 * 8192
    assert weights > 5e9
    assert result.parameter_bytes == 4 * weights // 4
    assert result.slot_bytes == 2 * result.parameter_bytes + 8  # and two scalars
    assert result.fits is True
    assert result.memory.padding_bytes < result.memory.argument_bytes / 5000
    state_bytes = result.memory.argument_bytes + result.memory.padding_bytes
    assert state_bytes < result.peak_bytes == result.compiled.peak_bytes
    assert result.alive_bytes == pytest.approx(result.peak_bytes - state_bytes, rel=0.02)
    assert result.step_time_s > 0
    assert result.bound_by in ("compute", "memory", "communication", "instructions")


def test_a_step_that_does_not_fit_gives_a_report_that_says_by_how_much():
    result = report(8192, 14, 512, "v5e:2x4", split({"batch": 2, "model": 4}))
    assert result.fits is False
    assert result.memory.available_bytes < 1 << 34
    assert result.memory.free_bytes == result.memory.available_bytes - result.peak_bytes < 0
    assert "does not fit, by" in str(result)
    assert "RESOURCE_EXHAUSTED" in str(result)
    assert result.parameter_bytes == 14 * 2 * 8192 * 4 * 8192


def test_tiles_pad_small_arrays_and_the_report_shows_it_apart():
    result = report(64, 1, 16, "v5e:2x4", split({"batch": 8, "model": 1}))
    assert result.parameter_bytes == 4 * 2 * 64 * 256
    assert result.memory.padding_bytes > 0
    whole = result.memory.argument_bytes + result.memory.padding_bytes
    assert whole == result.compiled.argument_bytes


def test_gathers_of_zero_are_named_after_their_parameters():
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}), zero=3)
    result = report(1024, 2, 64, "v5p:2x2x2", strategy)
    gathers = [collective for collective in result.collectives if collective.kind == "all-gather"]
    named = {path for gather in gathers for path in gather.variables}
    assert named == {f"dense{number}/kernel" for number in ("", "_1", "_2", "_3")}
    assert result.unexpected == ()


def test_products_that_go_around_a_ring_count_in_full():
    """XLA:TPU spreads the gathers of ZeRO over products in loops that count by 2."""
    width, rows = 512, 16384
    with abstract():
        model = keras.Sequential([keras.Input([width])])
        for _ in range(2):
            model.add(layers.Dense(width, activation="relu", use_bias=False))
        model.compile("adam", "mse")
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}), zero=3)
    taken = (shapes(rows, width),) * 2
    result = dry_run(model, taken, strategy=strategy, target="v5e:2x4", blocks="whole")
    assert "windowed_dot_general" in result.compiled.text
    products = 2 + 3  # the gradient of the data is not needed
    assert 8 * result.flops == products * 2 * rows * width**2
    assert result.replicated_share == 0.0
    assert all(collective.count is not None for collective in result.collectives)
    assert result.errors == ()


@pytest.mark.parametrize("zero", [1, 3])
def test_a_loop_over_layers_sends_what_the_planner_expects(zero):
    """Gradients of one layer are summed to pieces in the loop, and weights gathered there."""
    width, depth = 512, 8

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.mean(x**2)

    program = mw.jax_program(loss, {"layers": shapes(depth, width, width)}, adam(0.1))
    strategy = mw.Sharded(mw.Mesh({"batch": 8}), {}, batch="batch", zero=zero)

    def sent(compile: bool) -> dict[str, float]:
        result = mw.dry_run(
            program, shapes(4096, width), strategy=strategy, target="v5e:2x4", compile=compile
        )
        sums: Counter[str] = Counter()
        for collective in result.collectives:
            sums[collective.kind] += collective.bytes_per_step
        return {kind: sums[kind] for kind in ("all-reduce", "all-gather", "reduce-scatter")}

    numbers = depth * width**2
    expected = {"all-reduce": 4, "all-gather": 4 * numbers, "reduce-scatter": 4 * numbers}
    assert sent(compile=True) == pytest.approx(expected, rel=0.01)
    assert sent(compile=False) == pytest.approx(expected, rel=0.01, abs=4)


@pytest.mark.parametrize(
    ("target", "rows", "how"),
    [
        ("v5e:2x4", 1024, {"zero": 3, "remat": "block"}),
        pytest.param("v5p:2x2x2", 8192, {"zero": 1}, marks=pytest.mark.full),
    ],
)
def test_the_time_of_a_loop_is_estimated_near_the_compilers(target, rows, how):
    """Most of what one layer computes stays in the chip; it was taken to be written and read."""
    width, depth = 1024, 8

    def block(x, w):
        hidden = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(hidden @ w["up"]) @ w["down"], None

    def loss(params, x):
        return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)

    weights = {"up": shapes(depth, width, 4 * width), "down": shapes(depth, 4 * width, width)}
    program = mw.jax_program(loss, weights, adam(0.1))
    strategy = mw.Sharded(mw.Mesh({"batch": 8}), {}, batch="batch", **how)

    def step_s(compile: bool) -> float | None:
        batch = shapes(8 * rows, width)
        return mw.dry_run(
            program, batch, strategy=strategy, target=target, compile=compile
        ).step_time_s

    assert step_s(compile=False) == pytest.approx(step_s(compile=True), rel=0.45)


# Attention, of which a block holds far more inside than it hands on

WIDTH, HEADS, LENGTH, ROWS = 128, 2, 512, 4096


def attention_net(depth: int) -> mw.Program:
    def block(own, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, own[name]) for name in "qkv")
        actual = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        return x + jnp.einsum("bhts,bshk,hkd->btd", actual, v, own["o"])

    def loss(params, x):
        for own in params["blocks"]:
            x = mw.block_output(block(own, x))
        return jnp.mean((x @ params["head"]) ** 2)

    head = WIDTH // HEADS
    own = dict.fromkeys("qkv", shapes(WIDTH, HEADS, head)) | {"o": shapes(HEADS, head, WIDTH)}
    params = {"head": shapes(WIDTH, WIDTH), "blocks": [own] * depth}
    return mw.jax_program(loss, params, adam(0.1))


def test_few_blocks_that_are_computed_again_hold_as_much_as_the_whole():
    """Their inputs alone, though each holds far more while it is computed again."""
    few, whole = (
        dry_run(
            attention_net(5),
            shapes(ROWS, LENGTH, WIDTH),
            strategy=mw.DataParallel(mw.Mesh({"batch": 8}), zero=3, remat="block"),
            target="v5e:2x4",
            blocks=blocks,
        )
        for blocks in ("few", "whole")
    )
    assert few.blocks.count == 5
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    scores = ROWS * HEADS * LENGTH * LENGTH * 4 // 8
    assert whole.peak_bytes < 4 * scores
