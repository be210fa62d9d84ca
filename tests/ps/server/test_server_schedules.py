"""Learning-rate schedules beside Keras' own."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest

from meshwright.ps.server.optimizers.schedules import SCHEDULES, Schedule

k = keras.optimizers.schedules
CASES = [
    k.ExponentialDecay(0.1, 7, 0.3),
    k.ExponentialDecay(0.1, 3, 0.3, staircase=True),
    k.PiecewiseConstantDecay([2, 5, 11], [0.4, 0.3, 0.2, 0.1]),
    k.PolynomialDecay(0.1, 9),
    k.PolynomialDecay(0.1, 9, end_learning_rate=0.01, power=2.0),
    k.PolynomialDecay(0.1, 5, end_learning_rate=0.01, power=0.5, cycle=True),
    k.InverseTimeDecay(0.1, 4, 0.5),
    k.InverseTimeDecay(0.1, 4, 0.5, staircase=True),
    k.CosineDecay(0.1, 10),
    k.CosineDecay(0.0, 10, alpha=0.1, warmup_target=0.2, warmup_steps=5),
    k.CosineDecayRestarts(0.1, 5),
    k.CosineDecayRestarts(0.1, 4, t_mul=1.0, m_mul=0.8, alpha=0.05),
    k.CosineDecayRestarts(0.1, 3, t_mul=1.5, m_mul=0.9),
]


@pytest.mark.parametrize("schedule", CASES, ids=lambda one: type(one).__name__)
def test_a_schedule_is_that_of_keras(schedule) -> None:
    serialized: Any = k.serialize(schedule)
    twin = Schedule.of(serialized)
    ours = [twin(step) for step in range(25)]
    with jax.disable_jit():  # or every step would be compiled
        theirs = [float(schedule(step)) for step in range(25)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_every_schedule_of_keras_is_in_the_table() -> None:
    base = k.LearningRateSchedule
    known = {n for n in dir(k) if isinstance(c := getattr(k, n), type) and issubclass(c, base)}
    assert known - {base.__name__} == SCHEDULES.keys() == {type(one).__name__ for one in CASES}
