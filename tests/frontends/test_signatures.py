"""``fit``, ``evaluate`` and ``predict`` of both strategies take what ``keras.Model``'s take."""

from __future__ import annotations

import inspect
import re
from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("strategy", [mw.Sharded, mw.ParameterServer])
def test_a_method_takes_keras_arguments_and_few_of_its_own(strategy: Any, method: str) -> None:
    theirs = list(inspect.signature(getattr(keras.Model, method)).parameters.values())[1:]
    theirs = [one for one in theirs if one.kind is not inspect.Parameter.VAR_KEYWORD]
    _, model, *ours = inspect.signature(getattr(strategy, method)).parameters.values()
    assert model.name == "model"
    for mine, other in zip(ours, theirs, strict=False):
        assert (mine.name, mine.kind, mine.default) == (other.name, other.kind, other.default)
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
        for batch, fault in (
            ((x, {"a": y}), "needs y as one array, of one output; received y of type dict"),
            ((x, y, np.ones(4)), "class_weight= and sample_weight= cannot be used together"),
            ((x, np.array(["a"] * 4)), "labels that are numbers; received y of dtype <U1"),
            (x, r"needs batches \(x, y\); received one without y"),
        ):
            with pytest.raises(mw.ModelError, match=fault):
                strategy.fit(model, lambda context, batch=batch: [batch], class_weight={0: 1.0})
        with pytest.raises(mw.ModelError, match=r"class_weight= and sample_weight= cannot be used"):
            strategy.fit(model, x, y, sample_weight=np.ones(4), class_weight={0: 1.0})
        with pytest.raises(mw.ModelError, match=r"one label in each row .* shape \(4, 2, 3\)"):
            strategy.fit(model, x, np.ones([4, 2, 3]), class_weight={0: 1.0})
        with pytest.raises(mw.ModelError, match=r"number for each class; received 'much'"):
            strategy.fit(model, x, y, class_weight={0: "much"})
        for method in (strategy.evaluate, strategy.predict):
            with pytest.raises(mw.ModelError, match=r"callbacks= of .* is not supported"):
                method(model, x, callbacks=[keras.callbacks.History()])
        with pytest.raises(mw.ModelError, match="epochs=-1: expected a whole number, at least 0"):
            strategy.fit(model, x, y, epochs=-1)
        for method in (strategy.evaluate, strategy.predict):
            with pytest.raises(mw.ModelError, match="verbose='loud': expected 'auto', 0, 1 or 2"):
                method(model, x, verbose="loud")


def test_servers_evaluate_as_keras_does(capsys: pytest.CaptureFixture[str]) -> None:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = np.ones([4, 2]), np.ones([4, 1])
    expected = model.evaluate(x, y, verbose=0)
    with mw.ParameterServer() as strategy:
        assert strategy.evaluate(model, x, y, verbose=0) == pytest.approx(expected)
        assert np.shape(strategy.predict(model, x, verbose=0)) == (4, 1)
        assert capsys.readouterr().out == ""
        by_name = strategy.evaluate(model, x, y, verbose=2, return_dict=True)
        assert by_name == pytest.approx(dict(zip(["loss", "mae"], expected, strict=True)))
        assert re.search(r"5/5 - .*loss: .* - mae: ", capsys.readouterr().out)
        strategy.predict(model, x)
        assert "5/5" in capsys.readouterr().out
