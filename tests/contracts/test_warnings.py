"""Every warning points at the user's line, and ``place`` says what ``fit`` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw

X, Y = np.ones([24, 4], "float32"), np.ones([24, 2], "float32")
MESH = {"batch": 4, "model": 2}


def build(width: int = 2) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([keras.Input([4]), layers.Dense(width, name="h"), layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def loose(**options: Any) -> mw.Sharded:
    return mw.Sharded(mw.create_mesh(MESH), {"h/kernel": [None, "model"]}, strict=False, **options)


def idle() -> mw.Sharded:
    return mw.Sharded(mw.create_mesh({"batch": 8}), {"hh": [None]}, strict=False)


def in_scope() -> None:
    strategy = loose()
    with strategy.scope():
        model = build()
    strategy.fit(model, X, Y, batch_size=5, verbose=0)


WARNINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "an odd batch": (in_scope, "batch of 5 does not divide"),
    "an odd batch in evaluate": (
        lambda: loose().evaluate(build(), X, Y, batch_size=5, verbose=0),
        "batch of 5 does not divide",
    ),
    "a rule that places nothing": (
        lambda: idle().fit(build(), X, Y, batch_size=8, verbose=0),
        "1 pattern.s. match no variable",
    ),
    "the same in place": (
        lambda: mw.Sharded(mw.create_mesh({"batch": 8}), {"hh": [None]}, strict=False).place(
            build()
        ),
        "1 pattern.s. match no variable",
    ),
    "an axis that nothing uses": (
        lambda: mw.DataParallel(mw.create_mesh(MESH)).place(build()),
        "no parameter and no input",
    ),
    "a large parameter": (
        lambda: loose().place(build(300_000)),
        "no pattern matches",
    ),
    "a loss that is not finite": (
        lambda: loose().fit(build(), X * np.inf, Y, batch_size=8, verbose=0),
        "the loss of epoch 1 is",
    ),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_it_points_here(case: str) -> None:
    call, says = WARNINGS[case]
    with pytest.warns(mw.MeshwrightWarning, match=says) as result:
        call()
    assert {Path(warning.filename).name for warning in result} == {Path(__file__).name}


def test_place_refuses_what_fit_refuses() -> None:
    strategy = mw.Sharded(mw.create_mesh({"batch": 8}), {"hh/kernel": ["batch", None]})
    for call in (strategy.place, lambda model: strategy.fit(model, X, Y, verbose=0)):
        with pytest.raises(mw.PlacementError, match=r"'hh/kernel' matches no path.*h/kernel"):
            call(build())
