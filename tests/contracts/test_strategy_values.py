"""Strategies are values: copies and pickles are equal and decide alike."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import keras
import pytest

import meshwright as mw

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


class Named(mw.DataParallel):
    """A user's own strategy."""

    note = ""


STRATEGIES = {
    "Sharded": lambda: mw.Sharded(
        mw.create_mesh({"batch": 4, "model": 2}), {"kernel": [None, "model"]}, accumulate=2
    ),
    "named dims": lambda: mw.Sharded(
        mw.create_mesh({"batch": 4, "model": 2}),
        {"kernel": mw.dims("d_in d_out")},
        rules="batch:batch;d_out:model",
    ),
    "DataParallel": lambda: mw.DataParallel(mw.create_mesh({"batch": 8}), zero=1),
    "a subclass": lambda: Named(mw.create_mesh({"batch": 8})),
    "an abstract mesh": lambda: mw.Sharded(mw.Mesh({"batch": 4}), batch="batch"),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_copy_equals_its_strategy_and_decides_alike(name: str, way: str) -> None:
    strategy = STRATEGIES[name]()
    strategy.note = "mine"
    if not strategy.mesh.is_abstract:
        with strategy.scope():  # it knows a model, which a copy does not
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    result = COPIES[way](strategy)
    assert type(result) is type(strategy)
    assert result == strategy
    assert hash(result) == hash(strategy)
    assert result.note == "mine"
    if not strategy.mesh.is_abstract:
        result.place(model)
        assert result.explain(model) == strategy.explain(model)
    other = STRATEGIES["DataParallel" if name == "Sharded" else "Sharded"]()
    assert result != other
