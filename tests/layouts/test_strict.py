"""Rules that place nothing, large variables without a rule, and idle axes are told at once."""

from __future__ import annotations

import keras
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.layouts.strict import inspect

MESH = mw.Mesh({"batch": 4, "model": 2})


def info(path: str, *dims: int) -> mw.ParamInfo:
    return mw.ParamInfo(path, (path,), dims or (8, 8), "float32", 4)


SMALL = [info("hidden/kernel"), info("hidden/bias", 8), info("output/kernel")]
LARGE = [info("words/embeddings", 1024, 512), info("output/kernel", 512, 1024)]
KERNELS = {"kernel": [None, "model"]}


def test_rules_that_place_nothing_are_listed_together_with_the_nearest_paths() -> None:
    rules = {
        "hiden/kernel": [None, "model"],
        ".*kernel": [None, "model"],
        "output.*kernel": ["model", None],
    }
    with pytest.raises(mw.PlacementError) as caught:
        inspect(mw.Placement.of(MESH, rules), SMALL, "model 'net'")
    assert str(caught.value) == (
        "2 pattern(s) match no variable of model 'net', and what they were meant for may be "
        "replicated:\n"
        "  'hiden/kernel' matches no path. The nearest: 'hidden/kernel', "
        "'output/kernel', 'hidden/bias'.\n"
        "  'output.*kernel' is shadowed: what it matches ('output/kernel') is laid out by "
        "'.*kernel'.\n"
        "Correct them or remove them; strict=False makes this a warning."
    )


def test_without_strict_they_are_a_warning() -> None:
    placement = mw.Placement.of(MESH, {"nothing": ["model"], **KERNELS}, strict=False)
    with pytest.warns(mw.MeshwrightWarning, match="'nothing' matches no path"):
        inspect(placement, SMALL)


def test_large_parameters_without_a_rule_are_listed_with_their_bytes() -> None:
    with pytest.warns(mw.MeshwrightWarning) as caught:
        inspect(mw.Placement.of(MESH, {"output": ["model", None]}), LARGE)
    assert len(caught) == 1
    assert "no pattern matches 1 large parameter(s) of the program" in str(caught[0].message)
    assert "words/embeddings (1024, 512): 2,097,152 bytes" in str(caught[0].message)


def test_they_can_be_refused() -> None:
    placement = mw.Placement.of(MESH, {"output": ["model", None]}, unmatched="error")
    with pytest.raises(mw.PlacementError, match=r"words/embeddings .*\nAdd a layout for them"):
        inspect(placement, LARGE)


@pytest.mark.parametrize(
    "placement",
    [
        mw.Placement.of(MESH, {"output": ["model", None]}, unmatched="replicate"),
        mw.Placement.of(MESH, {"output": ["model", None]}, zero=3),
        mw.Placement.of(mw.Mesh({"batch": 4})),
    ],
    ids=["replicate", "zero=3", "no rules"],
)
def test_they_are_silent_where_it_is_meant(placement: mw.Placement) -> None:
    inspect(placement, LARGE)


def test_another_word_than_the_three_is_refused() -> None:
    with pytest.raises(mw.LayoutError, match="unmatched must be 'warn', 'error' or"):
        mw.Placement.of(MESH, unmatched="ignore")  # type: ignore[arg-type]


def test_an_idle_axis_is_reported() -> None:
    with pytest.warns(mw.MeshwrightWarning, match=r"along axis 'model' \(size 2\): all devices"):
        inspect(mw.Placement.of(MESH), SMALL)


@pytest.mark.parametrize(
    "more",
    [
        {"layouts": KERNELS},
        {"batch": ("batch", "model")},
        {"inputs": ["batch", "model"]},
        {"activations": {"hidden": [None, "model"]}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_an_axis_that_anything_lies_along_is_not_idle(more: dict[str, object]) -> None:
    inspect(mw.Placement.of(MESH, **more), SMALL)  # type: ignore[arg-type]


# Where it is asked


def net(width: int = 16) -> keras.Model:
    layers = [keras.layers.Dense(width, name="hidden"), keras.layers.Dense(4, name="output")]
    model = keras.Sequential([keras.Input([width]), *layers])
    model.compile("sgd", "mse")
    return model


DATA = np.zeros([16, 16], "float32"), np.zeros([16, 4], "float32")


def test_fit_refuses_a_mistyped_rule() -> None:
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), {"hiden": [None, "model"]})
    with strategy.scope():
        model = net()
    with pytest.raises(mw.PlacementError, match="'hiden' matches no path"):
        strategy.fit(model, *DATA, verbose=0)


def test_nothing_large_is_allocated_for_a_mistyped_rule() -> None:
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), {"hiden": [None, "model"]})
    with pytest.raises(mw.PlacementError, match="'hiden' matches no path"), strategy.scope():
        model = net(width=1024)
    assert all(hasattr(v, "_meshwright_waits") for v in model.variables)


def test_rules_for_two_models_of_one_strategy_are_all_used() -> None:
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    strategy = mw.Sharded(mesh, {"hidden/kernel": [None, "model"], "other/kernel": [None, "model"]})
    with strategy.scope():
        model = net()
    with strategy.scope():
        other = keras.Sequential([keras.Input([16]), keras.layers.Dense(4, name="other")])
        other.compile("sgd", "mse")
    strategy.fit(model, *DATA, verbose=0)
    strategy.fit(other, *DATA, verbose=0)


def test_a_trainer_refuses_a_mistyped_rule() -> None:
    program = mw.jax_program(lambda p, b: p["w"].sum(), {"w": np.ones([4, 4])}, optax.sgd(0.1))
    placement = mw.Placement.of(mw.create_mesh({"batch": 8}), {"v": ["batch", None]})
    with pytest.raises(mw.PlacementError, match="'v' matches no path"):
        mw.Trainer(program, placement).init()
