"""What the engine offers to whatever speaks to clients: models, tensors, answers, figures.

This file imports no JAX: a face (HTTP, gRPC, a test) is written against these names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

OUTCOMES = (
    "answered",
    "invalid",  # RequestError
    "overloaded",  # OverloadedError
    "deadline",  # DeadlineError
    "cancelled",  # the client left before its rows were computed
    "failed",  # ModelFailedError
    "not_ready",  # NotReadyError
)


@dataclass(frozen=True)
class TensorSpec:
    """An input or an output: ``shape`` opens with the rows (``None``), other ``None`` are ragged.

    Example:
        >>> str(TensorSpec("image", "float32", (None, 28, 28)))
        'image float32[rows, 28, 28]'
    """

    name: str
    dtype: str  # as NumPy names it; "bfloat16" and the float8 types as ml_dtypes does
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        dims = ("?" if size is None else str(size) for size in self.shape[1:])
        return f"{self.name} {self.dtype}[{', '.join(('rows', *dims))}]"


@dataclass(frozen=True)
class Answer:
    """The outputs for the rows of one request, all computed with the weights of ``version``."""

    outputs: Mapping[str, np.ndarray]
    version: str


@dataclass(frozen=True)
class Histogram:
    """Counts between bounds, as Prometheus counts: ``counts[i]`` holds values <= ``bounds[i]``.

    The last of ``counts`` holds what lies above every bound; counts are not cumulative.

    Example:
        >>> Histogram((0.01, 0.1), (3, 1, 0), total=0.07).quantile(0.5)
        0.01
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0  # the sum of all values

    def quantile(self, share: float) -> float:
        """The smallest bound that ``share`` of the values do not exceed; 0.0 without values."""
        rank, counted = share * sum(self.counts), 0
        if not rank:
            return 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            counted += count
            if counted >= rank:
                return bound
        return float("inf")


@dataclass(frozen=True)
class Weight:
    """One array of a served model: where it lies, and what it takes on each of its devices."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]  # the axes that each dim is split over
    bytes_per_device: int


@dataclass(frozen=True)
class ModelStatus:
    """What a served model has done and is doing, at one moment."""

    name: str
    version: str
    ready: bool
    queued_requests: int = 0
    queued_rows: int = 0
    rows_in_flight: int = 0
    batch_rows: Mapping[int, int] = field(default_factory=dict)  # rows of clients -> batches
    bucket_batches: Mapping[int, int] = field(default_factory=dict)  # rows of bucket -> batches
    latency_s: Histogram = Histogram((), (0,))  # from arrival to answer
    compute_s: Histogram = Histogram((), (0,))  # one batch, devices and transfers
    bytes_by_device: Mapping[str, int] = field(default_factory=dict)  # weights
    weights: tuple[Weight, ...] = field(default=(), repr=False)
    mesh: Mapping[str, int] = field(default_factory=dict)  # axis -> size
    answers: Mapping[str, int] = field(default_factory=dict)  # one of OUTCOMES -> requests
    events: tuple[str, ...] = ()  # the newest swaps and refusals of weights, oldest first
    first_version: str = ""  # that it was added or begun with, which stays when weights are swapped
    refusal: str = ""  # why the newest weights are not served; empty where they are


class ServedModel(Protocol):
    """One version of one model, ready to answer."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def ready(self) -> bool: ...

    async def predict(
        self, inputs: Mapping[str, np.ndarray], *, timeout_s: float | None = None
    ) -> Answer:
        """Answer for the rows of ``inputs``, which all arrays have as their first dim.

        A cancelled call leaves the queue. Values of one kind (floats, integers) are cast to the
        input's dtype; other dtypes are refused.

        Raises:
            RequestError: names, shapes or dtypes do not fit; all faults at once.
            OverloadedError: the queue is full; ``retry_after_s`` says when it should not be.
            DeadlineError: ``timeout_s`` passed before the rows were computed.
            ModelFailedError: the model raised, or its answer was not finite.
            NotReadyError: the model is loading, draining or without its other processes.
        """
        ...

    def status(self) -> ModelStatus:
        """The figures of this moment; cheap enough for a page that asks every second."""
        ...


class Models(Protocol):
    """Several models and their versions behind one face: what ``mw.Server`` is."""

    @property
    def ready(self) -> bool: ...

    def names(self) -> tuple[str, ...]: ...

    def versions(self, name: str) -> tuple[str, ...]:
        """The versions of a model, the one with most of the traffic first."""
        ...

    def model(self, name: str, version: str | None = None) -> ServedModel:
        """The model of this name; without a version, the one that this request's share falls to.

        Raises:
            UnknownModelError: no model of this name, or no such version of it.
        """
        ...

    def compared(self, name: str) -> Mapping[str, float]:
        """The largest differences of other versions from the first one, by ``version/output``."""
        ...

    async def start(self) -> None:
        """Restore, compile and begin to answer; returns once ``ready``."""
        ...

    async def drain(self) -> None:
        """Refuse new requests, answer those that were accepted, and stop."""
        ...
