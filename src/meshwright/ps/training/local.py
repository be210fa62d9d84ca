"""Several steps on each worker between two talks with the servers.

``LocalSGD`` averages what the workers arrive at (McMahan and others, 2017; Stich, 2019). ``DiLoCo``
(Douillard and others, 2023) takes how far they moved for a gradient, and gives it to an outer
optimizer on the servers. The inner optimizer is the model's own; its slots stay on the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import ClusterError


@dataclass(frozen=True)
class LocalSGD:
    """Talk to the servers after ``every`` steps, and there average the workers' parameters.

    With ``consistency="sync"`` it is the average; asynchronously each worker's move is added.
    (Stich 2018)

    >>> LocalSGD(every=8)
    LocalSGD(every=8)
    """

    every: int

    def __post_init__(self) -> None:
        _check_every(self)

    @property
    def outer(self) -> dict[str, Any]:
        """The optimizer of the servers, as Keras writes it: a move is applied as it is."""
        return _sgd(1.0, 0.0, nesterov=False)


@dataclass(frozen=True)
class DiLoCo:
    """Exchange with the servers after ``every`` steps, which apply SGD with Nesterov momentum.

    ``learning_rate`` and ``momentum`` are those of the servers' SGD. (Douillard et al. 2023)

    >>> DiLoCo(every=100)
    DiLoCo(every=100, learning_rate=0.7, momentum=0.9)
    """

    every: int
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_every(self)

    @property
    def outer(self) -> dict[str, Any]:
        """The optimizer of the servers, as Keras writes it."""
        return _sgd(self.learning_rate, self.momentum, nesterov=True)


Local = LocalSGD | DiLoCo


def _sgd(learning_rate: float, momentum: float, *, nesterov: bool) -> dict[str, Any]:
    config = {"learning_rate": learning_rate, "momentum": momentum, "nesterov": nesterov}
    return {"class_name": "SGD", "config": config}


def _check_every(local: Local) -> None:
    every = local.every
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ClusterError(
            f"{type(local).__name__}(every) must be an integer of at least 1; received {every!r}."
        )
