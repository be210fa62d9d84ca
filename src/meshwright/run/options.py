"""The arguments of ``fit`` in groups, as both ways of training take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Data:
    """What to read: arrays, or a dataset of batches as ``x``; ``steps`` batches of each epoch."""

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    class_weight: Mapping[int, float] | None = None


@dataclass(frozen=True, eq=False)
class Validation:
    """What to validate on, or the ``split`` of the training data; after which epochs."""

    data: Any = None
    split: float = 0.0
    batch_size: int | None = None
    steps: int | None = None
    freq: int | Sequence[int] = 1


@dataclass(frozen=True, eq=False)
class Schedule:
    """The epochs, the callbacks that are called, and what is printed."""

    epochs: int = 1
    initial_epoch: int = 0
    callbacks: Any = None
    verbose: str | int = "auto"
