"""Dry runs for absent TPUs: what fits, what does not, and models larger than this machine."""

from __future__ import annotations

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
    found = report(8192, 10, 512, "v5p:2x2x2", split({"batch": 2, "model": 4}))
    weights = 10 * 2 * 8192 * 4 * 8192
    assert weights > 5e9
    assert found.parameter_bytes == 4 * weights // 4
    assert found.slot_bytes == 2 * found.parameter_bytes + 8  # and two scalars
    assert found.fits is True
    assert found.memory.padding_bytes < found.memory.argument_bytes / 5000
    held = found.memory.argument_bytes + found.memory.padding_bytes
    assert held < found.peak_bytes == found.compiled.peak_bytes
    assert found.alive_bytes == pytest.approx(found.peak_bytes - held, rel=0.02)
    assert found.step_time_s > 0
    assert found.bound_by in ("compute", "memory", "communication", "instructions")


def test_a_step_that_does_not_fit_gives_a_report_that_says_by_how_much():
    found = report(8192, 14, 512, "v5e:2x4", split({"batch": 2, "model": 4}))
    assert found.fits is False
    assert found.memory.available_bytes < 1 << 34
    assert found.memory.free_bytes == found.memory.available_bytes - found.peak_bytes < 0
    assert "does not fit, by" in str(found)
    assert "RESOURCE_EXHAUSTED" in str(found)
    assert found.parameter_bytes == 14 * 2 * 8192 * 4 * 8192


def test_tiles_pad_small_arrays_and_the_report_shows_it_apart():
    found = report(64, 1, 16, "v5e:2x4", split({"batch": 8, "model": 1}))
    assert found.parameter_bytes == 4 * 2 * 64 * 256
    assert found.memory.padding_bytes > 0
    whole = found.memory.argument_bytes + found.memory.padding_bytes
    assert whole == found.compiled.argument_bytes


def test_gathers_of_zero_are_named_after_their_parameters():
    strategy = mw.DataParallel(mw.Mesh({"batch": 8}), zero=3)
    found = report(1024, 2, 64, "v5p:2x2x2", strategy)
    gathers = [each for each in found.collectives if each.kind == "all-gather"]
    named = {path for each in gathers for path in each.variables}
    assert named == {f"dense{number}/kernel" for number in ("", "_1", "_2", "_3")}
    assert found.unexpected == ()


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
    found = dry_run(model, taken, strategy=strategy, target="v5e:2x4", blocks="whole")
    assert "windowed_dot_general" in found.compiled.text
    products = 2 + 3  # the gradient of the data is not needed
    assert 8 * found.flops == products * 2 * rows * width**2
    assert found.replicated_share == 0.0
    assert all(each.count is not None for each in found.collectives)
    assert found.errors == ()


# Attention, of which a block holds far more inside than it hands on

WIDTH, HEADS, LENGTH, ROWS = 256, 2, 1024, 2048


def attention_net(depth: int) -> mw.Program:
    def block(own, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, own[name]) for name in "qkv")
        seen = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        return x + jnp.einsum("bhts,bshk,hkd->btd", seen, v, own["o"])

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
            attention_net(8),
            shapes(ROWS, LENGTH, WIDTH),
            strategy=mw.DataParallel(mw.Mesh({"batch": 8}), zero=3, remat="block"),
            target="v5e:2x4",
            blocks=blocks,
        )
        for blocks in ("few", "whole")
    )
    assert few.blocks.count == 8
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    scores = ROWS * HEADS * LENGTH * LENGTH * 4 // 8
    assert whole.peak_bytes < 4 * scores
