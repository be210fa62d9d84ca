"""Equal blocks of Keras models, of layers with their own names and of layers that hold layers."""

from __future__ import annotations

import functools

import jax
import keras
import pytest
from keras import layers

import meshwright as mw
from meshwright.frontends.dry_runs import dry_run
from meshwright.planning.dry_run import DryRun

pytestmark = pytest.mark.usefixtures("compiled_once")

WIDTH, LENGTH, VOCAB = 32, 16, 64
IDS = jax.ShapeDtypeStruct((64, LENGTH), "int32")


def functional(depth: int) -> keras.Model:
    keras.backend.clear_session()
    ids = keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(VOCAB, WIDTH)(ids)
    for _ in range(depth):
        h = layers.LayerNormalization()(x)
        h = layers.MultiHeadAttention(2, WIDTH // 2)(h, h, use_causal_mask=True)
        x = layers.Add()([x, layers.Dropout(0.1)(h)])
        h = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(h)])
    model = keras.Model(ids, layers.Dense(VOCAB)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3, global_clipnorm=1.0), loss, metrics=["accuracy"])
    return model


@functools.cache
def both(**how) -> tuple[DryRun, DryRun]:
    with mw.abstract():
        model = functional(5)
    strategy = mw.Sharded(mw.Mesh({"batch": 8}), **how)
    few, whole = (
        dry_run(model, (IDS, IDS), strategy=strategy, target="cpu:8", blocks=blocks)
        for blocks in ("few", "whole")
    )
    return few, whole


@pytest.mark.full_for("0")
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.full)])
def test_a_functional_model_needs_no_names_for_its_blocks(zero):
    few, whole = both(zero=zero)
    assert few.blocks.count == 5
    assert few.blocks.names[1] == "layer_normalization_2/gamma"
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)
    assert few.flops == whole.flops
    exact = ("parameter_bytes", "slot_bytes", "state_bytes", "input_bytes")
    assert [getattr(few.memory, e) for e in exact] == [getattr(whole.memory, e) for e in exact]


@pytest.mark.full
def test_blocks_that_are_computed_again_are_extended_too():
    few, whole = both(remat="nothing_saveable")
    assert few.flops == whole.flops
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)
