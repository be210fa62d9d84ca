"""One run of the demo: build, train and test on the mesh, and measure what is reported."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from .. import Layout, Mesh, Sharded, create_mesh, fetch_layout
from ..data.datasets import Digits
from ..display.drawing import Drawn, Section
from .jobs import BATCH_SIZE, LEARNING_RATE, Job

_DRAWN = 4  # tensors of a run, which fill a row of the picture
NOT_DRAWN = "The smallest arrays that are whole on every device are left out."
_SEED = 0


@dataclass(frozen=True)
class Result:
    """What one run reached, and how its tensors lay."""

    job: Job
    accuracy: float  # on the test digits, from 0 to 1
    loss: float  # on the test digits
    ms_per_step: float
    parameter_bytes_per_device: int
    picture: Section
    model: keras.Model | None = None  # as it was trained


class Stopwatch(keras.callbacks.Callback):
    """Times the steps of every epoch, from the end of the first: that one compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.ms_per_step: list[float] = []
        self._start = 0.0
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps = batch
        if batch == 0:
            self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._steps:
            elapsed_s = time.perf_counter() - self._start
            self.ms_per_step.append(1e3 * elapsed_s / self._steps)


def run(
    job: Job,
    digits: Digits,
    epochs: int,
    devices: list[Any],
    watchers: Iterable[keras.callbacks.Callback] = (),
) -> Result:
    """Train ``job`` on eight devices and test it on all test digits."""
    mesh = create_mesh(job.axes, devices=devices)
    strategy = Sharded(mesh, job.layouts, inputs=job.inputs)
    keras.utils.set_random_seed(_SEED)
    with strategy.scope():
        model = job.build()
        model.compile(
            keras.optimizers.Adam(LEARNING_RATE),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    stopwatch = Stopwatch()
    x, y = _grey_to_unit(digits.x_train), digits.y_train
    strategy.fit(model, x, y, BATCH_SIZE, epochs, verbose=0, callbacks=[stopwatch, *watchers])
    x, y = _grey_to_unit(digits.x_test), digits.y_test
    reached = strategy.evaluate(model, x, y, BATCH_SIZE, verbose=0, return_dict=True)
    return Result(
        job=job,
        accuracy=reached["accuracy"],
        loss=reached["loss"],
        ms_per_step=statistics.median(stopwatch.ms_per_step),
        parameter_bytes_per_device=max(live_bytes(model).values()),
        picture=_picture(job, mesh, model),
        model=model,
    )


def live_bytes(model: keras.Model) -> Counter[Any]:
    """Device -> bytes of trained parameters there, from the arrays that are alive."""
    held: Counter[Any] = Counter()
    for variable in model.trainable_variables:
        for shard in variable.value.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


def _picture(job: Job, mesh: Mesh, model: keras.Model) -> Section:
    """How a batch of images and the parameters lie; the latter read from the live arrays."""
    dims = (BATCH_SIZE, 28, 28)
    images = Drawn("images", dims, Layout(job.inputs), dim_names=("batch", "height", "width"))
    parameters = [
        Drawn("/".join(variable.path.split("/")[-2:]), variable.shape, fetch_layout(variable))
        for variable in model.trainable_variables
    ]
    by_weight = sorted(parameters, key=lambda p: (p.layout.is_fully_replicated, -p.nbytes))
    shown = by_weight[: _DRAWN - 1]
    return Section(
        job.heading, mesh, (images, *(p for p in parameters if p in shown)), note=job.split
    )


def _grey_to_unit(images: np.ndarray) -> np.ndarray:
    return images.astype("float32") / 255
