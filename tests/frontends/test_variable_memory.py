"""No two variables of a model share memory: Keras' own functions donate all of them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.frontends.keras.memory import memory_of, variables_of

X = np.random.default_rng(0).normal(size=[16, 8]).astype("float32")
HOW: dict[str, Any] = {"batch_size": 8, "verbose": 0}


def model_of_averages() -> keras.Model:
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4), keras.layers.Dense(8)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    return model


def swapping() -> list[keras.callbacks.Callback]:
    return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]


def check(model: keras.Model) -> None:
    memories = [memory_of(variable.value) for variable in variables_of(model)]
    assert len(set(memories)) == len(memories)


@pytest.mark.parametrize("how", ["strategy.fit", "model.fit", "parameter servers", "callback"])
def test_averages_that_end_a_fit_have_memory_of_their_own(how: str) -> None:
    """Else the next call of Keras crashes, or deletes the averages in silence."""
    sharded = mw.Sharded(mw.create_mesh({"batch": 8}), zero=1)
    with sharded.scope():
        model = model_of_averages()
        if how == "model.fit":
            model.fit(X, X, **HOW)
    if how == "parameter servers":
        with mw.ParameterServer() as servers:
            model = model_of_averages()
            servers.fit(model, X, X, **HOW)
    elif how != "model.fit":
        sharded.fit(model, X, X, callbacks=swapping() if how == "callback" else None, **HOW)
    check(model)
    first = model.predict(X, verbose=0)
    check(model)
    model.fit(X, X, **HOW)
    check(model)
    assert np.abs(model.predict(X, verbose=0) - first).max() > 1e-6  # it has learned more


def test_variables_that_a_person_assigned_to_each_other_are_separated_before_keras_acts() -> None:
    with mw.Sharded(mw.create_mesh({"batch": 8})).scope():
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8), keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        model.weights[2].assign(model.weights[0])
        model.fit(X, X, **HOW)
        check(model)
