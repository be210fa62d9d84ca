"""Twins of Adam and its kin: AdamW, Adamax, Nadam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .base import Block, Moment, Twin, toward, toward_square


@dataclass(frozen=True, kw_only=True)
class _Moments(Twin):
    learning_rate: Any = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0, "velocity": 0.0}


@dataclass(frozen=True, kw_only=True)
class Adam(_Moments):
    """Adaptive moments (Kingma and Ba, 2014); ``amsgrad`` after Reddi and others, 2018."""

    amsgrad: bool = False

    @property
    def slots(self) -> dict[str, float]:
        return {**super().slots, **({"velocity_hat": 0.0} if self.amsgrad else {})}

    def constants(self, at: Moment) -> tuple[Any, ...]:
        one, step = at.one, at.one(at.step + 1)
        first, second = one(self.beta_1) ** step, one(self.beta_2) ** step
        return (at.rate * np.sqrt(one(1) - second) / (one(1) - first),)

    def update(self, on: Block) -> None:
        value, gradient, (momentum, velocity, *largest), (work, _), (rate,) = on
        toward(momentum, gradient, 1 - self.beta_1, work)
        toward_square(velocity, gradient, 1 - self.beta_2, work)
        if self.amsgrad:
            velocity = np.maximum(largest[0], velocity, out=largest[0])
        np.sqrt(velocity, out=work)
        work += self.epsilon
        np.divide(momentum, work, out=work)
        work *= rate
        value -= work


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with weights that decay by themselves (Loshchilov and Hutter, 2019)."""

    weight_decay: float | None = 0.004


@dataclass(frozen=True, kw_only=True)
class Adamax(_Moments):
    """Adam by the largest gradient seen (Kingma and Ba, 2014, section 7.1)."""

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0, "norm": 0.0}

    def constants(self, at: Moment) -> tuple[Any, ...]:
        return at.rate, at.one(1) - at.one(self.beta_1) ** at.one(at.step + 1)

    def update(self, on: Block) -> None:
        value, gradient, (momentum, norm), (work, move), (rate, correction) = on
        toward(momentum, gradient, 1 - self.beta_1, work)
        norm *= self.beta_2
        np.abs(gradient, out=work)
        np.maximum(norm, work, out=norm)
        np.add(norm, self.epsilon, out=work)
        work *= correction
        np.multiply(momentum, rate, out=move)
        move /= work
        value -= move


@dataclass(frozen=True, kw_only=True)
class Nadam(_Moments):
    """Adam with Nesterov's momentum (Dozat, 2016)."""

    @property
    def scalars(self) -> dict[str, float]:
        return {"u_product": 1.0}

    def constants(self, at: Moment) -> tuple[Any, ...]:
        step, rate, scalars, one = at
        beta, half, decay = one(self.beta_1), one(0.5), one(0.96)
        now = beta * (one(1) - half * decay ** one(step + 1))
        then = beta * (one(1) - half * decay ** one(step + 2))
        product = scalars["u_product"]
        product *= now
        ahead, here = one(1) - product[()] * then, one(1) - product[()]
        correction = one(1) - one(self.beta_2) ** one(step + 1)
        return rate, then / ahead, (one(1) - now) / here, correction

    def update(self, on: Block) -> None:
        value, gradient, (momentum, velocity), (move, work), constants = on
        rate, of_momentum, of_gradient, correction = constants
        toward(momentum, gradient, 1 - self.beta_1, work)
        toward_square(velocity, gradient, 1 - self.beta_2, work)
        np.multiply(momentum, of_momentum, out=move)
        np.multiply(gradient, of_gradient, out=work)
        move += work
        np.divide(velocity, correction, out=work)
        np.sqrt(work, out=work)
        work += self.epsilon
        move *= rate
        move /= work
        value -= move
