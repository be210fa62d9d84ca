"""Small models and data for the tests of training."""

from __future__ import annotations

import keras
import numpy as np
import pytest

ROWS, CLASSES, FEATURES = 40, 3, 6


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose class can be read off them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[rows, FEATURES]).astype("float32")
    return x, x[:, :CLASSES].argmax(1).astype("int32")


class RowsOfClasses(keras.metrics.Metric):
    """How many rows each class has: a metric that is no scalar."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.rows = self.add_weight(shape=(CLASSES,), initializer="zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None) -> None:
        self.rows.assign_add(keras.ops.sum(keras.ops.one_hot(y_true, CLASSES), axis=0))

    def result(self):
        return keras.ops.convert_to_tensor(self.rows)


def dense(optimizer, *between, metrics=("accuracy",)) -> keras.Model:
    """The same model each time that it is made."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([FEATURES]),
            keras.layers.Dense(8, activation="relu", name="hidden"),
            *between,
            keras.layers.Dense(CLASSES, name="output"),
        ],
        name="dense",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=list(metrics))
    return model


def ratings(rows: int = ROWS) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Users, three items each, and a number to predict."""
    rng = np.random.default_rng(1)
    ids = {"users": rng.integers(0, 20, [rows]), "items": rng.integers(0, 10, [rows, 3])}
    ids = {name: values.astype("int32") for name, values in ids.items()}
    return ids, rng.normal(size=[rows, 1]).astype("float32")


def recommender(optimizer, items: keras.layers.Layer | None = None, **options) -> keras.Model:
    """Two tables, of which one is looked up three times per row."""
    keras.utils.set_random_seed(0)
    users = keras.Input([], dtype="int32", name="users")
    bought = keras.Input([3], dtype="int32", name="items")
    of_users = keras.layers.Embedding(20, 4, name="user_table", **options)
    of_items = items or keras.layers.Embedding(10, 4, name="item_table")
    joined = keras.layers.Concatenate()([of_users(users), keras.layers.Flatten()(of_items(bought))])
    model = keras.Model(
        {"users": users, "items": bought}, keras.layers.Dense(1)(joined), name="recommender"
    )
    model.compile(optimizer, "mse")
    return model


def apart(one: keras.Model, other: keras.Model) -> float:
    """The largest difference between the weights of two models."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def same_history(one: dict, other: dict) -> None:
    """Raise unless two histories have the same metrics, and nearly the same values."""
    assert sorted(one) == sorted(other)
    for name, values in one.items():
        assert other[name] == pytest.approx(values, rel=2e-5, abs=1e-6)
