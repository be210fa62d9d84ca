"""Names in checkpoints are those of the model, however often it was built in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import meshwright as mw
from meshwright.frontends.keras.checkpoint_names import LastingNames
from meshwright.testing import run_in_fresh_process


class Branch(layers.Layer):
    """Its layers have names by attributes and names by Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_1 = layers.Dense(8)
        self.parts = [layers.Dense(8), layers.Dropout(0.1)]

    def build(self, shape: Any) -> None:
        self.dense_1.build(shape)
        self.parts[0].build(shape)

    def call(self, x: Any) -> Any:
        return self.parts[1](self.parts[0](x) + self.dense_1(x))


def build(strategy: mw.Sharded) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs = keras.Input([8])
        x = layers.Dense(8, activation="tanh")(inputs)
        x = layers.BatchNormalization()(x)
        x = keras.Sequential([keras.Input([8]), layers.Dense(8), layers.Dense(8)])(x)
        x = layers.Dense(8, name="head_9")(Branch()(x))
        model = keras.Model(inputs, layers.Dense(2)(x))
        model.compile("adam", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    return model


X = np.random.default_rng(0).normal(size=[32, 8]).astype("float32")
Y = X[:, :2] ** 2
STRATEGY = mw.DataParallel(mw.create_mesh({"batch": 8}))


def names(model: keras.Model) -> list[list[str]]:
    STRATEGY.fit(model, X, Y, verbose=0)
    result = LastingNames.of(model, STRATEGY.prepare(model))
    return [list(part.values()) for part in result.of_parts]


@pytest.mark.full
def test_every_copy_has_the_same_names() -> None:
    first = names(build(STRATEGY))
    assert names(build(STRATEGY)) == first
    assert len({name for part in first for name in part}) == sum(map(len, first))
    params, _, slots, _ = first
    assert params[0] == "dense/kernel"
    assert "sequential/dense_1/kernel" in params
    assert "branch/dense_1/kernel" in params
    assert "branch/parts/0/kernel" in params
    assert "head_9/kernel" in params
    assert "adam/dense/kernel/momentum" in slots


@pytest.mark.full
def test_a_copy_goes_on_in_the_same_process(tmp_path: Path) -> None:
    options = {"batch_size": 8, "verbose": 0}
    whole = STRATEGY.fit(build(STRATEGY), X, Y, epochs=4, **options)
    STRATEGY.fit(build(STRATEGY), X, Y, epochs=2, checkpoint=tmp_path, **options)
    parts = STRATEGY.fit(build(STRATEGY), X, Y, epochs=4, checkpoint=tmp_path, **options)
    assert parts.history == whole.history


@pytest.mark.full
def test_slots_made_before_any_strategy_are_known_too() -> None:
    """A model that plain Keras has trained in a process where no strategy was ever used."""
    code = """
    import meshwright as mw
    mw.virtual_devices(8)
    import keras, numpy as np
    stack = [keras.layers.Dense(64, name="hidden"), keras.layers.Dense(2, name="output")]
    model = keras.Sequential([keras.Input([32]), *stack])
    model.compile("adam", "mse")
    model.fit(np.ones([8, 32]), np.ones([8, 2]), verbose=0)
    rules = {"hidden/kernel": [None, "model"]}
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), rules)
    strategy.place(model)
    print(strategy.explain(model)["adam/hidden/kernel/momentum"].layout.unbound())
    strategy.fit(model, np.ones([8, 32]), np.ones([8, 2]), verbose=0)
    """
    assert run_in_fresh_process(code) == "[unsharded, model]\n"
