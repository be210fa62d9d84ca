"""Everything that a Keras model can be or ask for × strategies: one device's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, losses, metrics, ops, optimizers
from oracle import OneDevice, largest_gap, made, train, weights

import meshwright as mw

# One process: each oracle is computed once.
pytestmark = pytest.mark.xdist_group("model_laws")

ROWS = 48


@dataclass(frozen=True)
class Feature:
    """A compiled model with what it is fitted on; the layouts are for the mesh with ``model``."""

    build: Callable[[], keras.Model]
    x: Any
    y: Any = None
    layouts: dict[str, Any] = field(default_factory=lambda: {"hidden.*kernel": [None, "model"]})
    options: dict[str, Any] = field(default_factory=dict)
    # Largest difference measured in any weight or slot, and in any number of the history.
    weights: float = 1e-6
    history: float = 1e-6


draw = np.random.default_rng(3)
X = draw.normal(size=[ROWS, 12]).astype("float32")
X2 = draw.normal(size=[ROWS, 6]).astype("float32")
STEPS = draw.normal(size=[ROWS, 5, 4]).astype("float32")
Y = draw.integers(0, 4, ROWS)
REAL = draw.normal(size=[ROWS, 3]).astype("float32")
WEIGHT = draw.uniform(0.1, 2, ROWS).astype("float32")
CLASSES = losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(**hidden: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([12]),
            layers.Dense(16, activation="tanh", name="hidden", **hidden),
            layers.Dense(4, name="output"),
        ]
    )


def classifier(
    make: Callable[[], keras.Model] = mlp, optimizer: Any = None, **options: Any
) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = make()
        chosen = optimizer() if optimizer else optimizers.SGD(0.05, momentum=0.9)
        model.compile(chosen, **{"loss": CLASSES, "metrics": ["accuracy"]} | options)
        return model

    return build


class Adding(keras.Model):
    """A subclassed model that adds a loss of its own while it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh")
        self.dropout = layers.Dropout(0.3)
        self.out = layers.Dense(4)

    def call(self, x: Any, training: bool = False) -> Any:
        h = self.dropout(self.hidden(x), training=training)
        self.add_loss(0.01 * ops.mean(ops.square(h)))
        return self.out(h)


class OwnStep(keras.Model):
    """Overrides ``train_step`` in Keras' JAX style: a second loss, gradients scaled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh")
        self.out = layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def loss_of(self, trainable: Any, other: Any, x: Any, y: Any) -> Any:
        outputs, other = self.stateless_call(trainable, other, x)
        return CLASSES(y, outputs) + 0.1 * ops.mean(ops.square(outputs)), (outputs, other)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, other, slots, counts = state
        x, y = data
        (loss, (outputs, other)), grads = jax.value_and_grad(self.loss_of, has_aux=True)(
            trainable, other, x, y
        )
        grads = [0.5 * gradient for gradient in grads]
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        logs, new, at = {}, [], 0
        for metric in self.metrics:
            own = counts[at : at + len(metric.variables)]
            at += len(metric.variables)
            if metric.name == "loss":
                own = metric.stateless_update_state(own, loss)
                logs[metric.name] = metric.stateless_result(own)
            else:
                own = metric.stateless_update_state(own, y, outputs)
                logs |= metric.stateless_result(own)
            new += own
        return logs, (trainable, other, slots, new)


class OwnMeasures(OwnStep):
    """Overrides ``test_step`` and ``predict_step`` as well."""

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, other, counts = state
        x, y = data
        loss, _ = self.loss_of(trainable, other, x, y)
        return {"doubled": 2 * loss}, (trainable, other, counts)

    def predict_step(self, state: Any, data: Any) -> Any:
        x, *_ = data if isinstance(data, tuple) else (data,)
        outputs, other = self.stateless_call(*state, x)
        return ops.argmax(outputs, -1), other


def _functional(named: bool) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        a, b = keras.Input([12], name="a"), keras.Input([6], name="b")
        h = layers.Dense(8, activation="tanh", name="hidden")(a)
        joined = layers.Concatenate()([h, layers.Dense(8, name="hidden_b")(b)])
        return keras.Model({"a": a, "b": b} if named else [a, b], layers.Dense(4)(joined))

    return make


def _two_outputs() -> keras.Model:
    x = keras.Input([12])
    h = layers.Dense(16, activation="tanh", name="hidden")(x)
    return keras.Model(
        x, {"digit": layers.Dense(4, name="digit")(h), "real": layers.Dense(3, name="real")(h)}
    )


def _shared() -> keras.Model:
    a, b = keras.Input([12]), keras.Input([12])
    both = layers.Dense(16, activation="tanh", name="hidden")
    return keras.Model([a, b], layers.Dense(4)(layers.Subtract()([both(a), both(b)])))


def _frozen() -> keras.Model:
    model = mlp()
    model.layers[0].trainable = False
    return model


def _stateful() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(batch_shape=[16, 5, 4]),
            layers.LSTM(8, stateful=True, name="hidden"),
            layers.Dense(4),
        ]
    )


def _noisy() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([12]),
            layers.GaussianNoise(0.2),
            layers.Dense(16, name="hidden"),
            layers.AlphaDropout(0.2),
            layers.SpectralNormalization(layers.Dense(8, name="inner")),
            layers.UnitNormalization(),
            layers.Dense(4),
        ]
    )


def _many_metrics() -> dict[str, Any]:
    return {
        "metrics": [
            metrics.SparseCategoricalAccuracy(),
            metrics.SparseTopKCategoricalAccuracy(2),
            metrics.SparseCategoricalCrossentropy(from_logits=True, name="nll"),
        ],
        "weighted_metrics": [metrics.SparseCategoricalAccuracy(name="weighted")],
    }


FEATURES = {
    "own train_step": Feature(classifier(OwnStep), X, Y),
    "own test_step and predict_step": Feature(classifier(OwnMeasures), X, Y),
    "list of inputs": Feature(classifier(_functional(named=False)), [X, X2], Y),
    "dict of inputs": Feature(classifier(_functional(named=True)), {"a": X, "b": X2}, Y),
    "outputs and losses by name": Feature(
        classifier(
            _two_outputs,
            loss={"digit": CLASSES, "real": "mse"},
            loss_weights={"digit": 1.0, "real": 0.3},
            metrics={"digit": ["accuracy"], "real": ["mae", "mse"]},
        ),
        X,
        {"digit": Y, "real": REAL},
    ),
    "sample_weight": Feature(
        classifier(**_many_metrics()), X, Y, options={"sample_weight": WEIGHT}
    ),
    "sample_weight with a rest": Feature(
        classifier(weighted_metrics=["accuracy"]),
        X[:43],
        Y[:43],
        options={"sample_weight": WEIGHT[:43]},
    ),
    "class_weight": Feature(
        classifier(), X, Y, options={"class_weight": {0: 0.2, 1: 3.0, 2: 1.0, 3: 0.7}}
    ),
    "add_loss and dropout": Feature(classifier(Adding), X, Y),
    "regularisers": Feature(
        classifier(functools.partial(mlp, kernel_regularizer="l2", activity_regularizer="l1")),
        X,
        Y,
    ),
    "constraints": Feature(classifier(functools.partial(mlp, kernel_constraint="unit_norm")), X, Y),
    "clipnorm": Feature(classifier(optimizer=lambda: optimizers.SGD(0.1, clipnorm=0.05)), X, Y),
    "global_clipnorm": Feature(
        classifier(optimizer=lambda: optimizers.Adam(1e-3, global_clipnorm=0.05)), X, Y
    ),
    "EMA": Feature(
        classifier(
            optimizer=lambda: optimizers.SGD(
                0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
            )
        ),
        X,
        Y,
    ),
    "EMA at the end": Feature(
        classifier(optimizer=lambda: optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.9)), X, Y
    ),
    "gradient accumulation": Feature(
        classifier(optimizer=lambda: optimizers.Adam(1e-3, gradient_accumulation_steps=2)), X, Y
    ),
    "loss scaling": Feature(
        classifier(optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.05), 64.0)),
        X,
        Y,
    ),
    "learning-rate schedule": Feature(
        classifier(
            optimizer=lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
        ),
        X,
        Y,
    ),
    "shared layer": Feature(classifier(_shared), [X, X[::-1].copy()], Y),
    "frozen layer": Feature(classifier(_frozen), X, Y),
    "state of a recurrent layer": Feature(
        classifier(_stateful), STEPS, Y, options={"shuffle": False}
    ),
    "noise and state": Feature(classifier(_noisy), X, Y),
    "run_eagerly": Feature(classifier(run_eagerly=True), X, Y),
}

STRATEGIES = {
    "batch=8": lambda feature: mw.DataParallel(mw.create_mesh({"batch": 8})),
    "batch=4,model=2": lambda feature: mw.Sharded(
        mw.create_mesh({"batch": 4, "model": 2}), feature.layouts
    ),
}


ALWAYS = {
    "own train_step",
    "dict of inputs",
    "sample_weight with a rest",
    "add_loss and dropout",
    "frozen layer",
}


def _run(strategy: Any, feature: Feature) -> dict[str, Any]:
    options = {"epochs": 2, **feature.options}
    trained = train(strategy, feature.build, feature.x, feature.y, **options)
    model = trained.model
    measured = {"sample_weight": options.get("sample_weight"), "batch_size": 16, "verbose": 0}
    return {
        "history": trained.history,
        "curve": trained.curve,
        "weights": trained.weights,
        "evaluated": strategy.evaluate(model, feature.x, feature.y, return_dict=True, **measured),
        "predicted": strategy.predict(model, feature.x, batch_size=16, verbose=0),
    }


@functools.cache
def one_device(name: str) -> dict[str, Any]:
    return _run(OneDevice(), FEATURES[name])


# Both meshes split the rows of a batch, so that what a second axis adds is asked of every feature,
# and eight parts of a batch only of those that look at its rows one by one, or in turn.
BY_ROWS = (
    "own train_step",
    "own test_step and predict_step",
    "sample_weight with a rest",
    "class_weight",
    "add_loss and dropout",
    "state of a recurrent layer",
    "noise and state",
)


def _cases() -> list[Any]:
    return [
        pytest.param(
            name,
            strategy,
            id=f"{name}-{strategy}",
            marks=() if name in ALWAYS and strategy == "batch=4,model=2" else pytest.mark.full,
        )
        for name in FEATURES
        for strategy in STRATEGIES
        if strategy != "batch=8" or name in BY_ROWS
    ]


@pytest.mark.full_for(
    "add_loss and dropout-batch=4,model=2",
    "dict of inputs-batch=4,model=2",
    "frozen layer-batch=4,model=2",
    "own train_step-batch=4,model=2",
    "sample_weight with a rest-batch=4,model=2",
)
@pytest.mark.parametrize(("name", "strategy"), _cases())
def test_training_with_it_gives_one_devices_numbers(name: str, strategy: str) -> None:
    feature = FEATURES[name]
    actual, expected = _run(STRATEGIES[strategy](feature), feature), one_device(name)
    for part in ("history", "evaluated"):
        assert actual[part].keys() == expected[part].keys()
        for key, value in expected[part].items():
            np.testing.assert_allclose(actual[part][key], value, rtol=feature.history, err_msg=key)
    assert len(actual["curve"]) == 6
    gap, path = largest_gap(actual["weights"], expected["weights"])
    assert gap <= feature.weights, f"{path} differs by {gap:.2e}"
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=feature.weights * 4, rtol=0),
        actual["predicted"],
        expected["predicted"],
    )


@pytest.mark.full_for("batch=4,model=2")
@pytest.mark.parametrize(
    "strategy", ["batch=4,model=2", pytest.param("batch=8", marks=pytest.mark.full)]
)
def test_freezing_between_two_fits_is_obeyed(strategy: str) -> None:
    """Compiled anew with a layer frozen, and once more with it thawed: one device's weights."""
    feature = FEATURES["class_weight"]

    def thrice(how: Any) -> dict[str, np.ndarray]:
        model = made(how, feature.build)
        for trainable in (True, False, True):
            model.layers[0].trainable = trainable
            with how.scope():
                model.compile(optimizers.SGD(0.05, momentum=0.9), CLASSES)
            before = np.asarray(model.layers[0].kernel)
            how.fit(model, X, Y, batch_size=16, verbose=0)
            assert np.array_equal(before, np.asarray(model.layers[0].kernel)) is not trainable
        return weights(model)

    actual, expected = thrice(STRATEGIES[strategy](feature)), thrice(OneDevice())
    gap, path = largest_gap(actual, expected)
    assert gap <= 1e-6, path


class LogsOtherValues(keras.Sequential):
    """Its steps log, under the metrics' names, values that are not the metrics'."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {name: value + 100 for name, value in logs.items()}, state

    def test_step(self, state: Any, data: Any) -> Any:
        logs, state = super().test_step(state, data)
        return {name: value + 100 for name, value in logs.items()}, state


class LogsMore(LogsOtherValues):
    """The same with one value more: then Keras takes all logs as they are."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return logs | {"more": logs["loss"]}, state


@pytest.mark.parametrize("kind", [LogsOtherValues, LogsMore])
def test_epochs_log_metrics_in_place_of_what_steps_log_under_their_names(kind: Any) -> None:
    def fitted(fit: Callable[..., Any]) -> Any:
        model = kind([keras.Input([12]), layers.Dense(4, kernel_initializer="ones", name="hidden")])
        model.compile("sgd", CLASSES, metrics=["accuracy"])
        return fit(model)(
            X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False, validation_data=(X, Y)
        ).history

    expected = fitted(lambda model: model.fit)
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    actual = fitted(lambda model: functools.partial(strategy.fit, model))
    assert list(actual) == list(expected)
    assert expected["val_loss"][0] < 100
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-5, err_msg=name)
