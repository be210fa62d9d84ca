"""Every strategy, and every optimizer: gradients, loss curve and weights are one device's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import pytest
from keras import optimizers
from oracle import (
    OneDevice,
    Tolerance,
    Trained,
    agree,
    compiled,
    float64,
    gradients,
    made,
    relative,
    train,
)
from strategies import BATCH, QUICK, STRATEGIES, SUBJECTS, Row, rows

# One process: each oracle is computed once.
pytestmark = pytest.mark.xdist_group("training_laws")

# The largest difference allowed after six steps: of any weight or slot, and of any loss
# (relative). The largest measured over all rows was 5e-16 in double precision, whatever the
# optimizer, and in single precision 2e-7 for weights and 5e-7 for losses; Adam divides by the root
# of small second moments, which amplifies rounding to 5e-6 (of the wide net: to 1e-14 in double).
# Four times that is allowed, for processors that round otherwise.
DOUBLE = Tolerance(weights=2e-15, losses=2e-15)
DOUBLE_AMPLIFIED = Tolerance(weights=4e-14, losses=2e-15)
SINGLE = Tolerance(weights=8e-7, losses=2e-6)
AMPLIFIED = Tolerance(weights=2e-5, losses=2e-6)
OPTIMIZERS = {
    "sgd": (lambda: optimizers.SGD(0.05), SINGLE),
    "momentum": (lambda: optimizers.SGD(0.05, momentum=0.9), SINGLE),
    "adam": (lambda: optimizers.Adam(1e-3), AMPLIFIED),
    "adamw": (lambda: optimizers.AdamW(1e-3), AMPLIFIED),
    "rmsprop": (lambda: optimizers.RMSprop(1e-3), SINGLE),
    "adagrad": (lambda: optimizers.Adagrad(1e-2), SINGLE),
    "adadelta": (lambda: optimizers.Adadelta(0.1), SINGLE),
    "lion": (lambda: optimizers.Lion(1e-3), SINGLE),
    "adafactor": (lambda: optimizers.Adafactor(1e-2), SINGLE),
}

ALWAYS = [("float64", "adam"), ("float32", "momentum")]  # on the quick rows

# Optimizers that divide a gradient by its size, or take its sign, make a step of the rounding
# noise that one device computes for weights whose exact gradient is zero (strategies.py:
# ``noise``). SGD and momentum have no exceptions.
AMPLIFY_NOISE = ("adam", "adamw", "lion", "adafactor")


@contextlib.contextmanager
def computing_in(precision: str) -> Iterator[None]:
    with float64() if precision == "float64" else contextlib.nullcontext():
        yield


@functools.cache
def one_device(subject: str, optimizer: str, precision: str) -> Trained:
    del precision  # it is in force; the cache must tell the two apart
    return _trained(OneDevice(), subject, optimizer)


def _trained(strategy: object, subject: str, optimizer: str) -> Trained:
    of = SUBJECTS[subject]
    return train(strategy, compiled(of.build, OPTIMIZERS[optimizer][0]), *of.data())


# What an update sees of a strategy is how parameters and slots lie: whole, split, and shared out.
UPDATED = ("dp8-dense", "model-dense", "zero3-model-wide")


def _optimizers(row: Row, precision: str) -> tuple[str, ...]:
    """Those that a row is asked with: all where they see the layout, else one or two.

    In float64 a wrong term shows beyond rounding; float32 shows that the wider tolerance is kept.
    """
    if precision == "float32":
        return ("sgd", "momentum", "adam") if row.name in UPDATED else ("momentum",)
    if row.name in UPDATED:
        return tuple(OPTIMIZERS)
    return ("momentum", "adam") if row.core else ("adam",)


def _cases() -> list[object]:
    return [
        pytest.param(
            row,
            optimizer,
            precision,
            id=f"{precision}-{row.name}-{optimizer}",
            marks=()
            if row.name in QUICK and (precision, optimizer) in ALWAYS
            else pytest.mark.full,
        )
        for precision in ("float64", "float32")
        for row in STRATEGIES
        for optimizer in _optimizers(row, precision)
    ]


@pytest.mark.full_for(
    "float32-model-dense-momentum",
    "float32-spatial-images-momentum",
    "float32-zero3-model-wide-momentum",
    "float64-model-dense-adam",
    "float64-spatial-images-adam",
    "float64-zero3-model-wide-adam",
)
@pytest.mark.parametrize(("row", "optimizer", "precision"), _cases())
def test_loss_curve_and_weights_are_one_devices(row: Row, optimizer: str, precision: str) -> None:
    """Six steps over shuffled batches, so that the order of the rows is one device's too."""
    with computing_in(precision):
        one = one_device(row.subject, optimizer, precision)
        sharded = _trained(row.strategy(), row.subject, optimizer)
    excepted = row.of.noise + row.of.follows if optimizer in AMPLIFY_NOISE else ()
    within = OPTIMIZERS[optimizer][1]
    if precision == "float64":
        within = DOUBLE_AMPLIFIED if within is AMPLIFIED else DOUBLE
    agree(sharded, one, within, leave=excepted)
    assert len(sharded.curve) == 6


@pytest.mark.full_for("model-dense", "spatial-images", "zero3-model-wide")
@pytest.mark.parametrize("row", rows(only=lambda row: row.is_asked_all))
def test_gradients_of_the_first_step_are_one_devices(row: Row) -> None:
    build = compiled(row.of.build, lambda: optimizers.SGD(0.05))
    x, y = row.of.data()
    batch = x[:BATCH], y[:BATCH]
    one, strategy = OneDevice(), row.strategy()
    expected = gradients(one, made(one, build), batch)
    actual = gradients(strategy, made(strategy, build), batch)
    for path, gradient in expected.items():
        if not path.endswith(row.of.noise or ("nothing is noise",)):
            assert relative(actual[path], gradient) <= 1e-5, path


@pytest.mark.parametrize("subject", [name for name, of in SUBJECTS.items() if of.noise])
def test_excepted_weights_have_a_gradient_of_rounding_noise(subject: str) -> None:
    """The exceptions of the table cannot hide a wrong gradient: one device's is noise."""
    one, of = OneDevice(), SUBJECTS[subject]
    x, y = of.data()
    model = made(one, compiled(of.build, lambda: optimizers.SGD(0.05)))
    by_path = gradients(one, model, (x[:BATCH], y[:BATCH]))
    largest = max(float(np.abs(gradient).max()) for gradient in by_path.values())
    noise = [g for path, g in by_path.items() if path.endswith(of.noise)]
    assert len(noise) == len(of.noise)
    assert all(np.abs(gradient).max() < 1e-6 * largest for gradient in noise)


def test_the_table_notices_a_wrong_gradient() -> None:
    """One weight that is off by a thousandth fails the comparison."""
    of = SUBJECTS["dense"]
    build = compiled(of.build, OPTIMIZERS["sgd"][0])
    one = train(OneDevice(), build, *of.data())
    other = train(OneDevice(), build, *of.data())
    other.weights["output/kernel"] = other.weights["output/kernel"] * 1.001
    with pytest.raises(AssertionError, match="output/kernel differs by"):
        agree(other, one, SINGLE)
