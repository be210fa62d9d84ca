"""Local steps: what the servers get is the way that a worker went."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from training_models import apart, data, dense, ratings, recommender

import meshwright as mw
from meshwright.ps.options import Tables
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training import DiLoCo, LocalSGD, TopK

HOW = {"batch_size": 8, "shuffle": False, "verbose": 0}


@pytest.mark.full_for("2")
@pytest.mark.parametrize("every", [2, pytest.param(3, marks=pytest.mark.full)])
def test_one_worker_that_goes_alone_trains_as_ever(every):
    """Averages over one worker are its own parameters; 5 batches leave a shorter last turn."""
    x, y = data()
    expected, model = (
        dense(keras.optimizers.Adam(0.01), keras.layers.BatchNormalization()) for _ in range(2)
    )
    history = expected.fit(x, y, epochs=2, **HOW).history
    with ParameterServer(consistency="sync") as strategy:
        result = strategy.fit(model, x, y, epochs=2, local=LocalSGD(every), **HOW).history
    assert apart(expected, model) < 1e-6
    assert result["loss"] == pytest.approx(history["loss"], rel=1e-5)


@pytest.mark.full
def test_the_outer_optimizer_goes_the_way_with_nesterov_momentum():
    x, y = data()
    model, inner = dense(keras.optimizers.SGD(0.1)), dense(keras.optimizers.SGD(0.1))
    before = [np.array(w) for w in inner.get_weights()]
    speed = [np.zeros_like(w) for w in before]
    for turn in range(2):  # two turns of two batches, by hand
        rows = slice(16 * turn, 16 * turn + 16)
        inner.set_weights(before)
        inner.fit(x[rows], y[rows], **HOW)
        ways = [was - now for was, now in zip(before, inner.get_weights(), strict=True)]
        speed = [0.9 * v - 0.7 * way for v, way in zip(speed, ways, strict=True)]
        before = [w + 0.9 * v - 0.7 * way for w, v, way in zip(before, speed, ways, strict=True)]
    with ParameterServer(consistency="sync") as strategy:
        strategy.fit(model, x[:32], y[:32], local=DiLoCo(every=2), **HOW)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_averages_of_weights_and_local_steps_exclude_each_other():
    (x, y), model = data(), dense(keras.optimizers.SGD(0.1, use_ema=True))
    with ParameterServer() as strategy, pytest.raises(mw.ModelError, match="use_ema=True gives"):
        strategy.fit(model, x, y, local=LocalSGD(2), **HOW)


def test_tables_by_rows_and_local_steps_exclude_each_other():
    (x, y), model = ratings(), recommender("sgd")
    how = {"tables": Tables(["user_table"]), "local": LocalSGD(2), "verbose": 0}
    refused = pytest.raises(
        mw.ModelError, match=r"local= does not support tables.*user_table/embeddings"
    )
    with ParameterServer() as strategy, refused:
        strategy.fit(model, x, y, **how)


@pytest.mark.parametrize("make", [lambda: LocalSGD(0), lambda: DiLoCo(every=1.5)])
def test_the_number_of_steps_is_checked(make):
    with pytest.raises(mw.ModelError, match="must be an integer of at least 1"):
        make()


@pytest.mark.parametrize("how", ["bfloat16", TopK(0.25)], ids=str)
def test_compressed_gradients_train(how):
    x, y = data(64)
    with ParameterServer() as strategy:
        model = dense(keras.optimizers.SGD(0.5))
        history = strategy.fit(model, x, y, epochs=12, compression=how, **HOW).history
    assert history["accuracy"][-1] > 0.8
    assert history["loss"][-1] < 0.6 * history["loss"][0]
