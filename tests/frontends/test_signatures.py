"""``fit``, ``evaluate`` and ``predict`` of both strategies take what ``keras.Model``'s take."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw

OTHER_DEFAULTS = {("ParameterServer", "evaluate", "return_dict"): True}


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("strategy", [mw.Sharded, mw.ParameterServer])
def test_a_method_takes_keras_arguments_and_few_of_its_own(strategy: Any, method: str) -> None:
    theirs = list(inspect.signature(getattr(keras.Model, method)).parameters.values())[1:]
    theirs = [one for one in theirs if one.kind is not inspect.Parameter.VAR_KEYWORD]
    _, model, *ours = inspect.signature(getattr(strategy, method)).parameters.values()
    assert model.name == "model"
    for mine, other in zip(ours, theirs, strict=False):
        default = OTHER_DEFAULTS.get((strategy.__name__, method, other.name), other.default)
        assert (mine.name, mine.kind, mine.default) == (other.name, other.kind, default)
    own = ours[len(theirs) :]
    assert len(ours) >= len(theirs)
    assert len(own) <= 8
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in own)
    assert all(one.annotation is not inspect.Parameter.empty for one in ours)


def test_what_servers_cannot_do_is_named() -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones([4, 2]), np.ones([4, 1])
    with mw.ParameterServer() as strategy:
        with pytest.raises(mw.ModelError, match=r"class_weight= is not supported .*sample_weight="):
            strategy.fit(model, x, y, class_weight={0: 1.0})
        for method in (strategy.evaluate, strategy.predict):
            with pytest.raises(mw.ModelError, match=r"callbacks= of .* is not supported"):
                method(model, x, callbacks=[keras.callbacks.History()])
        with pytest.raises(mw.ModelError, match="epochs=-1: expected a whole number, at least 0"):
            strategy.fit(model, x, y, epochs=-1)
