"""Small models behind the engine's protocol: computed by NumPy, and one that the engine serves."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwright.errors import (
    DeadlineError,
    ModelFailedError,
    NotReadyError,
    OverloadedError,
    UnknownModelError,
)
from meshwright.serving.api import Answer, Histogram, ModelStatus, TensorSpec, Weight

KERNEL = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Linear:
    """``x @ KERNEL``, or what ``fault`` says instead; it waits for ``gate`` where it has one."""

    def __init__(self, name: str = "linear", version: str = "1") -> None:
        self.name, self.version, self.ready = name, version, True
        self.inputs = (TensorSpec("x", "float32", (None, 4)),)
        self.outputs = (TensorSpec("y", "float32", (None, 3)),)
        self.fault: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.outcomes: Counter[str] = Counter()
        self.timeouts: list[float | None] = []

    async def predict(
        self, inputs: Mapping[str, np.ndarray], *, timeout_s: float | None = None
    ) -> Answer:
        self.timeouts.append(timeout_s)
        try:
            if self.gate is not None:
                async with asyncio.timeout(timeout_s):
                    await self.gate.wait()
        except asyncio.CancelledError:
            self.outcomes["cancelled"] += 1
            raise
        except TimeoutError:
            raise DeadlineError("not answered in time.") from None
        if self.fault is not None:
            raise self.fault
        self.outcomes["answered"] += 1
        return Answer(self.compute(inputs), self.version)

    def compute(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": inputs["x"] @ KERNEL}

    def status(self) -> ModelStatus:
        return ModelStatus(
            self.name,
            self.version,
            self.ready,
            queued_rows=2,
            bucket_batches={1: 3, 8: 5},
            latency_s=Histogram((0.001, 0.01, 0.1), (3, 4, 0, 1), 0.2),
            compute_s=Histogram((0.001, 0.01), (8, 0, 0), 0.004),
            bytes_by_device={"cpu:0": 24, "cpu:1": 24},
            weights=(Weight("dense/kernel", "float32", (4, 3), ("model", None), 24),),
            mesh={"model": 2},
            answers=dict(self.outcomes),
            events=("version 1 loaded",),
        )


@functools.cache
def served(name: str = "linear") -> Any:
    """A server of a Keras model that computes the same; apps start and drain it, one at a time."""
    import keras

    import meshwright as mw

    x = keras.Input([4], name="x")
    dense = keras.layers.Dense(3, use_bias=False, name="y")
    model = keras.Model(x, dense(x), name=name)
    dense.set_weights([KERNEL])
    return mw.Server(model, version="1", buckets=[2])


class Pair(Linear):
    """Two inputs of other dtypes, one ragged; two outputs."""

    def __init__(self, name: str = "pair", version: str = "1") -> None:
        super().__init__(name, version)
        self.inputs = (
            TensorSpec("tokens", "int32", (None, None)),
            TensorSpec("scale", "bfloat16", (None,)),
        )
        self.outputs = (
            TensorSpec("sum", "float32", (None,)),
            TensorSpec("doubled", "int32", (None, None)),
        )

    def compute(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        scale = inputs["scale"].astype(np.float32)
        total = inputs["tokens"].sum(1).astype(np.float32) * scale
        return {"sum": total, "doubled": inputs["tokens"] * np.int32(2)}


class Shelf:
    """Models by name, each in its versions."""

    def __init__(self, *models: Linear) -> None:
        self._models = {name: [m for m in models if m.name == name] for name in _names(models)}
        self.ready = False
        self.drained = False

    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    def versions(self, name: str) -> tuple[str, ...]:
        return tuple(model.version for model in self._models[name])

    def model(self, name: str, version: str | None = None) -> Linear:
        for model in self._models.get(name, ()):
            if version in (None, model.version):
                return model
        raise UnknownModelError(f"unknown model {name!r}, version {version}.")

    def compared(self, name: str) -> dict[str, float]:
        return {f"{version}/y": 0.5 for version in self.versions(name)[1:]}

    async def start(self) -> None:
        self.ready = True

    async def drain(self) -> None:
        self.ready, self.drained = False, True


def _names(models: tuple[Linear, ...]) -> list[str]:
    return list(dict.fromkeys(model.name for model in models))


FAULTS = {  # what a model may raise -> the status of the answer
    OverloadedError("the queue is full.", 2.5): 429,
    DeadlineError("too late."): 504,
    ModelFailedError("the model raised."): 500,
    NotReadyError("loading."): 503,
    ZeroDivisionError("a bug"): 500,
}
