"""The networks in Keras 3, with no mesh and no layout in them, and the callback with the clock."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from digits import initial_weights, input_shape
from protocol import Clock
from settings import SEED, Job


def build_model(job: Job) -> Any:
    """The job's network, compiled, not yet with the common initial weights."""
    model = keras.Sequential([keras.Input(input_shape(job)), *_layers(job)])
    model.compile(
        keras.optimizers.Adam(job.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def start_alike(model: Any, job: Job) -> None:
    """Give the model the weights that every side starts with."""
    model.set_weights(list(initial_weights(job).values()))


def versions() -> dict[str, str]:
    return {"jax": jax.__version__, "keras": keras.__version__}


class Epochs(keras.callbacks.Callback):
    """Marks the clock when training starts and when an epoch's loss is on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.last: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        np.random.seed(SEED)  # from here on Keras' shuffle gives the same orders to every side
        self.clock.mark()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.last = {name: float(logs[name]) for name in ("loss", "accuracy")}
        self.clock.mark()


def _layers(job: Job) -> list[Any]:
    dense = [
        keras.layers.Dense(128, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="output"),
    ]
    if job.network == "mlp":
        return dense
    return [
        _conv(32, "conv_a"),
        keras.layers.MaxPooling2D(),
        _conv(64, "conv_b"),
        keras.layers.MaxPooling2D(),
        _conv(128, "conv_c"),
        keras.layers.Flatten(),
        *dense,
    ]


def _conv(filters: int, name: str) -> Any:
    return keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=name)
