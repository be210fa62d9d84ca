"""One device as the oracle: the same model by plain Keras, and what both sides are asked for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.common import dtypes

import meshwright as mw
from meshwright.frontends.keras.program import KerasVariables, read_state

SEED = 11


@dataclass(frozen=True)
class Tolerance:
    """The largest differences allowed: of any weight, and of any loss of the curve (relative)."""

    weights: float
    losses: float


class Curve(keras.callbacks.Callback):
    """Notes the logs after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append({name: float(value) for name, value in logs.items()})


class OneDevice:
    """Plain Keras, under the names of a strategy."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(self)

    def fit(self, model: keras.Model, *args: Any, **options: Any) -> Any:
        return model.fit(*args, **options)

    def evaluate(self, model: keras.Model, *args: Any, **options: Any) -> Any:
        return model.evaluate(*args, **options)

    def predict(self, model: keras.Model, *args: Any, **options: Any) -> Any:
        return model.predict(*args, **options)


class Native:
    """A strategy's scope with Keras' own loops inside it."""

    def __init__(self, strategy: mw.Sharded) -> None:
        self.strategy = strategy

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.scope()

    def fit(self, model: keras.Model, *args: Any, **options: Any) -> Any:
        with self.scope():
            return model.fit(*args, **options)

    def evaluate(self, model: keras.Model, *args: Any, **options: Any) -> Any:
        with self.scope():
            return model.evaluate(*args, **options)

    def predict(self, model: keras.Model, *args: Any, **options: Any) -> Any:
        with self.scope():
            return model.predict(*args, **options)


def made(strategy: Any, build: Callable[[], keras.Model]) -> keras.Model:
    """The model that ``build`` makes (and compiles) under a strategy, from the same seed always."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        return build()


def compiled(build: Callable[[], keras.Model], optimizer: Any, **options: Any) -> Any:
    """``build``, compiled as a classifier; ``optimizer`` is a function without arguments."""
    options = {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    } | options

    def build_and_compile() -> keras.Model:
        model = build()
        model.compile(optimizer(), **options)
        return model

    return build_and_compile


def classifier(**options: Any) -> keras.Model:
    """Four classes of rows of twelve numbers, trained with momentum."""
    layers = [keras.layers.Dense(16, name="hidden"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input([12]), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, **options)
    return model


def sharded() -> mw.Sharded:
    """Its strategy: batches over four devices, the hidden layer over two."""
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    return mw.Sharded(mesh, {"hidden.*kernel": [None, "model"]})


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    """Every weight and slot of a model by path, whole, on the host."""
    parts = read_state(KerasVariables.of(model))[:3]
    return {path: whole(value) for part in parts for path, value in part.items()}


def whole(value: Any) -> np.ndarray:
    """An array's value, also where other processes hold a part of it."""
    if not value.is_fully_addressable:
        mesh = value.sharding.mesh
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        value = jax.jit(lambda array: array, out_shardings=replicated)(value).addressable_data(0)
    return np.asarray(value)


def gradients(
    strategy: Any, model: keras.Model, batch: tuple[np.ndarray, ...]
) -> dict[str, np.ndarray]:
    """The gradient of the loss by path of parameter, at the weights that the model has."""
    variables = KerasVariables.of(model)
    if isinstance(strategy, OneDevice):
        parts = (variables.params, variables.state, variables.metrics)
        values = [[variable.value for variable in part.values()] for part in parts]
        slots = [variable.value for variable in model.optimizer.variables]

        def loss(*args: Any) -> Any:
            return model.compute_loss_and_updates(
                *args, None, training=True, optimizer_variables=slots
            )

        results, _ = jax.jit(jax.grad(loss, has_aux=True))(*values, *batch)
    else:
        program = strategy.program(model, batch)
        state = strategy.state(model)

        def by_path(state: Any, batch: Any) -> Any:
            with strategy.in_force(model):
                return jax.grad(program.loss, has_aux=True)(state.params, state, batch, True)[0]

        by_name = jax.jit(by_path)(state, strategy.put(batch))
        # A program's gradients are stored as its parameters are, some of them padded.
        results = [
            by_name[path][tuple(slice(size) for size in variable.shape)]
            for path, variable in variables.params.items()
        ]
    return {path: whole(g) for path, g in zip(variables.params, results, strict=True)}


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference over the norm of the expected value."""
    norm = float(np.linalg.norm(expected))
    gap = float(np.linalg.norm(np.asarray(actual, float) - np.asarray(expected, float)))
    return gap / norm if norm else gap


def largest_gap(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], leave: tuple[str, ...] = ()
) -> tuple[float, str]:
    """The largest absolute difference of any element of any array, and whose it is."""
    assert actual.keys() == expected.keys()
    gaps = {
        path: float(np.max(np.abs(np.asarray(actual[path], float) - value), initial=0))
        for path, value in expected.items()
        if not any(suffix in path for suffix in leave)
    }
    worst = max(gaps, key=gaps.__getitem__)
    return gaps[worst], worst


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Everything that is made inside is made, and computed, in double precision.

    Keras 3.15 would round to single inside BatchNormalization, ``tanh``, Adafactor and others: its
    type promotion knows no ``float64`` on JAX.
    """
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    rounded = dtypes.BIT64_TO_BIT32_DTYPE.pop("float64")
    try:
        yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = rounded
        keras.config.set_floatx("float32")
        jax.config.update("jax_enable_x64", False)


@dataclass
class Trained:
    """What a model was and became in one training run."""

    model: keras.Model
    curve: list[dict[str, float]]
    history: dict[str, list[float]]
    weights: dict[str, np.ndarray]

    @property
    def losses(self) -> np.ndarray:
        return np.array([logs["loss"] for logs in self.curve])


def train(
    strategy: Any, build: Callable[[], keras.Model], x: Any, y: Any = None, **options: Any
) -> Trained:
    """Build, train and read a model under a strategy."""
    model = made(strategy, build)
    curve = Curve()
    options = {"batch_size": 16, "epochs": 1, "verbose": 0} | options
    callbacks = [curve, *options.pop("callbacks", [])]
    history = strategy.fit(model, x, y, callbacks=callbacks, **options)
    return Trained(model, curve.logs, history.history, weights(model))


def agree(sharded: Trained, one: Trained, within: Tolerance, leave: tuple[str, ...] = ()) -> None:
    """Raise unless curve and weights are one device's."""
    gap, path = largest_gap(sharded.weights, one.weights, leave)
    assert gap <= within.weights, f"{path} differs by {gap:.2e} (allowed {within.weights:.0e})"
    assert len(sharded.curve) == len(one.curve)
    for name in one.curve[0]:
        curves = [np.array([logs[name] for logs in t.curve]) for t in (sharded, one)]
        apart = float(np.max(np.abs(curves[0] - curves[1]) / np.abs(curves[1]).clip(1e-30)))
        assert apart <= within.losses, f"{name} differs by {apart:.2e} relative"


replace = dataclasses.replace
