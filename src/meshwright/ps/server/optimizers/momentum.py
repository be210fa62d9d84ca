"""Twins of SGD and Lion: at most one slot, and no division."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .base import Arrays, Twin, mixed


@dataclass(frozen=True, kw_only=True)
class SGD(Twin):
    """Gradient descent, with momentum if asked (Sutskever and others, 2013)."""

    learning_rate: Any = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def constants(
        self, step: int, rate: Any, scalars: Mapping[str, np.ndarray], one: type
    ) -> tuple[Any, ...]:
        return rate, one(self.momentum)

    def update(
        self,
        value: np.ndarray,
        gradient: np.ndarray,
        slots: Arrays,
        room: Arrays,
        constants: tuple[Any, ...],
    ) -> None:
        rate, momentum = constants
        move, ahead = room
        np.multiply(gradient, rate, out=move)
        if not self.momentum:
            value -= move
            return
        (speed,) = slots
        speed *= momentum
        speed -= move
        if not self.nesterov:
            value += speed
            return
        np.multiply(speed, momentum, out=ahead)
        ahead -= move
        value += ahead


@dataclass(frozen=True, kw_only=True)
class Lion(Twin):
    """Only the sign of the momentum (Chen and others, 2023)."""

    learning_rate: Any = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.99

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0}

    def constants(
        self, step: int, rate: Any, scalars: Mapping[str, np.ndarray], one: type
    ) -> tuple[Any, ...]:
        first, second = one(self.beta_1), one(self.beta_2)
        return rate, first, one(1) - first, second, one(1) - second

    def update(
        self,
        value: np.ndarray,
        gradient: np.ndarray,
        slots: Arrays,
        room: Arrays,
        constants: tuple[Any, ...],
    ) -> None:
        rate, first, not_first, second, not_second = constants
        (momentum,) = slots
        other, sign = room
        np.multiply(momentum, first, out=sign)
        np.multiply(gradient, not_first, out=other)
        other += sign
        np.sign(other, out=sign)  # from one array to another: in place it is much slower
        sign *= rate
        value -= sign
        mixed(momentum, gradient, second, not_second, other)
