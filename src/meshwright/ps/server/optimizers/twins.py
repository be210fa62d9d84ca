"""The twins of Keras' optimizers: their arithmetic in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .base import Block, Moment, Twin, mixed, mixed_square, root, toward, toward_square


@dataclass(frozen=True, kw_only=True)
class _Moments(Twin):
    slot_names = ("momentum", "velocity")

    learning_rate: Any = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


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

    slot_names = ("momentum", "norm")

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

    slot_names = ("momentum",)

    learning_rate: Any = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.99

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

    slot_names = ("accumulated_grad", "accumulated_delta_var")

    learning_rate: Any = 0.001
    rho: float = 0.95
    epsilon: float = 1e-7

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
