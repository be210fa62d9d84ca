"""The learning-rate schedules of Keras, as functions of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import ModelError

_one: Any = np.float32  # Keras computes them in float32, so that steps fall where its own fall


@dataclass(frozen=True)
class Schedule:
    """A learning rate that depends on the count of steps before; the settings are Keras' own.

    >>> exponential = {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5}
    >>> schedule = Schedule.of({"class_name": "ExponentialDecay", "config": exponential})
    >>> round(schedule(10), 6)
    0.05
    """

    name: str
    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, serialized: Mapping[str, Any]) -> Schedule:
        """The twin of a serialized Keras schedule.

        Raises :class:`~meshwright.errors.ModelError` for one that is not among Keras' own.
        """
        name = str(serialized.get("class_name"))
        if name not in SCHEDULES or serialized.get("registered_name"):
            raise ModelError(
                f"learning-rate schedule {name!r} runs no code on a server, which knows "
                f"{', '.join(SCHEDULES)}. Use one of them, or give the optimizer a number and set "
                "it as training goes."
            )
        settings = {key: value for key, value in serialized["config"].items() if key != "name"}
        return cls(name, tuple(sorted((key, _frozen(value)) for key, value in settings.items())))

    def __call__(self, step: int) -> float:
        return float(SCHEDULES[self.name](step, **dict(self.settings)))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _falling(rate_after: Callable[[float, float, Any], float]) -> Callable[..., float]:
    """A rate that falls with the number of ``decay_steps``, or with each of them at once."""

    def rate(
        step: int,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
    ) -> float:
        progress = _one(step) / _one(decay_steps)
        return rate_after(
            initial_learning_rate, decay_rate, np.floor(progress) if staircase else progress
        )

    return rate


_exponential = _falling(lambda first, rate, progress: first * _one(rate) ** progress)
_inverse_time = _falling(lambda first, rate, progress: first / (1 + rate * progress))


def _piecewise(step: int, boundaries: tuple[float, ...], values: tuple[float, ...]) -> float:
    # Keras casts the boundaries to the integers that steps are.
    return values[sum(step > int(boundary) for boundary in boundaries)]


def _polynomial(
    step: int,
    initial_learning_rate: float,
    decay_steps: float,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> float:
    if cycle:
        decay_steps *= 1 if step == 0 else math.ceil(_one(step) / _one(decay_steps))
        progress = _one(step) / _one(decay_steps)
    else:
        progress = _one(min(step, decay_steps)) / _one(decay_steps)
    span = initial_learning_rate - end_learning_rate
    return span * (1 - progress) ** _one(power) + end_learning_rate


def _cosine(
    step: int,
    initial_learning_rate: float,
    decay_steps: float,
    alpha: float = 0.0,
    warmup_target: float | None = None,
    warmup_steps: float = 0,
) -> float:
    start = initial_learning_rate if warmup_target is None else warmup_target
    if warmup_target is not None:
        step = min(step, int(decay_steps + warmup_steps))
        if step < warmup_steps:
            return (warmup_target - initial_learning_rate) * (step / warmup_steps) + (
                initial_learning_rate
            )
        step -= int(warmup_steps)
    return start * _cosine_decayed(min(step, decay_steps) / decay_steps, alpha)


def _cosine_restarts(
    step: int,
    initial_learning_rate: float,
    first_decay_steps: float,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: float = 0.0,
) -> float:
    progress = _one(step) / _one(first_decay_steps)
    if t_mul == 1.0:
        restarts = np.floor(progress)
        progress -= restarts
    else:
        factor = _one(t_mul)
        restarts = np.floor(np.log(1 - progress * (1 - factor)) / np.log(factor))
        progress = (progress - (1 - factor**restarts) / (1 - factor)) / factor**restarts
    return initial_learning_rate * _cosine_decayed(float(progress), alpha, _one(m_mul) ** restarts)


def _cosine_decayed(progress: float, alpha: float, height: float = 1.0) -> float:
    return (1 - alpha) * 0.5 * height * (1 + math.cos(math.pi * progress)) + alpha


SCHEDULES: dict[str, Callable[..., float]] = {
    "ExponentialDecay": _exponential,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "InverseTimeDecay": _inverse_time,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _cosine_restarts,
}
