"""Twins of SGD and Lion: at most one slot, and no division."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .base import Block, Moment, Twin, mixed


@dataclass(frozen=True, kw_only=True)
class SGD(Twin):
    """Gradient descent, with momentum if asked (Sutskever and others, 2013)."""

    learning_rate: Any = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def constants(self, at: Moment) -> tuple[Any, ...]:
        return at.rate, at.one(self.momentum)

    def update(self, on: Block) -> None:
        value, gradient, slots, (move, ahead), (rate, momentum) = on
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

    def constants(self, at: Moment) -> tuple[Any, ...]:
        one = at.one
        first, second = one(self.beta_1), one(self.beta_2)
        return at.rate, first, one(1) - first, second, one(1) - second

    def update(self, on: Block) -> None:
        value, gradient, (momentum,), (other, sign), constants = on
        rate, first, not_first, second, not_second = constants
        np.multiply(momentum, first, out=sign)
        np.multiply(gradient, not_first, out=other)
        other += sign
        np.sign(other, out=sign)  # from one array to another: in place it is much slower
        sign *= rate
        value -= sign
        mixed(momentum, gradient, second, not_second, other)
