"""Twins of RMSprop, Adagrad, Adadelta and Ftrl: rates from sums of squared gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .base import Block, Moment, Twin, mixed, mixed_square, root


@dataclass(frozen=True, kw_only=True)
class RMSprop(Twin):
    """A running mean of squared gradients (Tieleman and Hinton, 2012)."""

    learning_rate: Any = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    @property
    def slots(self) -> dict[str, float]:
        return {
            "velocity": 0.0,
            **({"momentum": 0.0} if self.momentum > 0 else {}),
            **({"average_gradient": 0.0} if self.centered else {}),
        }

    def update(self, on: Block) -> None:
        value, gradient, slots, (work, move), (rate,) = on
        velocity = slots[0]
        mixed_square(velocity, gradient, self.rho, 1 - self.rho, work)
        if self.centered:
            mean = slots[-1]
            mixed(mean, gradient, self.rho, 1 - self.rho, work)
            np.multiply(mean, mean, out=work)
            velocity = np.subtract(velocity, work, out=work)
        np.multiply(gradient, rate, out=move)
        move /= root(velocity, self.epsilon, work)
        if self.momentum > 0:
            speed = slots[1]
            speed *= self.momentum
            speed += move
            move = speed
        value -= move


@dataclass(frozen=True, kw_only=True)
class Adagrad(Twin):
    """The sum of all squared gradients (Duchi and others, 2011)."""

    learning_rate: Any = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    @property
    def slots(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def update(self, on: Block) -> None:
        value, gradient, (accumulator,), (work, move), (rate,) = on
        np.multiply(gradient, gradient, out=work)
        accumulator += work
        np.multiply(gradient, rate, out=move)
        move /= root(accumulator, self.epsilon, work)
        value -= move


@dataclass(frozen=True, kw_only=True)
class Adadelta(Twin):
    """Steps as large as the last ones were (Zeiler, 2012)."""

    learning_rate: Any = 0.001
    rho: float = 0.95
    epsilon: float = 1e-7

    @property
    def slots(self) -> dict[str, float]:
        return {"accumulated_grad": 0.0, "accumulated_delta_var": 0.0}

    def update(self, on: Block) -> None:
        value, gradient, (squares, moves), (work, move), (rate,) = on
        mixed_square(squares, gradient, self.rho, 1 - self.rho, work)
        root(moves, self.epsilon, move)
        move *= gradient
        move /= root(squares, self.epsilon, work)
        mixed_square(moves, move, self.rho, 1 - self.rho, work)
        move *= rate
        value -= move


@dataclass(frozen=True, kw_only=True)
class Ftrl(Twin):
    """Follow the regularized leader (McMahan and others, 2013)."""

    learning_rate: Any = 0.001
    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0

    @property
    def slots(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value, "linear": 0.0}

    def constants(self, at: Moment) -> tuple[Any, ...]:
        one, rate = at.one, at.rate
        l2 = one(self.l2_regularization_strength) + one(self.beta) / (one(2) * rate)
        return rate, one(2) * l2

    def update(self, on: Block) -> None:
        value, gradient, (accumulator, linear), (squares, quadratic), (rate, twice_l2) = on
        power, l1 = -self.learning_rate_power, self.l1_regularization_strength
        np.multiply(gradient, gradient, out=squares)
        squares += accumulator
        _power(squares, power, quadratic)
        # The accumulator is free to work in: what it will hold stands in `squares`.
        change = _power(accumulator, power, accumulator)
        np.subtract(quadratic, change, out=change)
        change /= rate
        change *= value
        np.subtract(gradient, change, out=change)
        linear += change
        if self.l2_shrinkage_regularization_strength:
            np.multiply(value, 2 * self.l2_shrinkage_regularization_strength, out=change)
            linear += change
        accumulator[...] = squares
        quadratic /= rate
        quadratic += twice_l2
        np.clip(linear, -l1, l1, out=squares)
        squares -= linear
        np.divide(squares, quadratic, out=value)


def _power(array: np.ndarray, power: float, out: np.ndarray) -> np.ndarray:
    return np.sqrt(array, out=out) if power == 0.5 else np.power(array, power, out=out)
