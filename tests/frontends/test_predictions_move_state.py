"""Predictions draw, and remember, from batch to batch and from call to call, as in Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import meshwright as mw

X = np.random.default_rng(0).normal(size=[20, 3, 4]).astype("float32")


class Always(keras.layers.Dropout):
    """Stays in force, as for an estimate of how sure a model is."""

    def call(self, x, training=None):
        del training
        return super().call(x, training=True)


def drawing() -> keras.Model:
    x = keras.Input((3, 4))
    return keras.Model(x, keras.layers.Dense(8)(Always(0.5, seed=1)(x)))


class Counts(keras.layers.Layer):
    """Adds up what it has seen."""

    def build(self, shape):
        self.seen = self.add_weight(shape=shape[2:], initializer="zeros", trainable=False)

    def call(self, x):
        self.seen.assign(self.seen + keras.ops.mean(x, axis=(0, 1)))
        return x + self.seen


def remembering() -> keras.Model:
    x = keras.Input((3, 4))
    return keras.Model(x, keras.layers.Dense(8)(Counts()(x)))


STRATEGIES = {
    "rows": lambda: mw.DataParallel(mw.create_mesh({"batch": 8})),
    "split weights": lambda: mw.Sharded(
        mw.create_mesh({"batch": 2, "model": 4}),
        {".*kernel": [None, "model"]},
    ),
    "gathered weights": lambda: mw.Sharded(mw.create_mesh({"batch": 8}), zero=3),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("build", [drawing, remembering])
def test_predictions_go_on_where_those_of_one_device_do(build, strategy):
    x = X if build is drawing else X[:16]  # rows that fill a batch up would count
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(build())
    expected, model = models
    strategy = STRATEGIES[strategy]()
    outputs = [strategy.predict(model, x, batch_size=8, verbose=0) for _ in range(2)]
    assert not np.allclose(*outputs)
    for output in outputs:
        np.testing.assert_allclose(output, expected.predict(x, batch_size=8, verbose=0), atol=1e-5)
    for one, other in zip(
        expected.non_trainable_variables, model.non_trainable_variables, strict=True
    ):
        np.testing.assert_allclose(np.asarray(one.value), np.asarray(other.value), atol=1e-5)
