"""The guard against what is not finite: it names step, batch, operation, variable; nothing is lost.

The oracle is a training run that ends one step earlier.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from oracle import made, weights

import meshwright as mw

draw = np.random.default_rng(5)
X = draw.normal(size=[128, 8]).astype("float32")
Y = draw.normal(size=[128, 2]).astype("float32")
BAD_STEP = 6  # of eight steps of 16 rows


def sharded(**options: Any) -> mw.Sharded:
    mesh = mw.create_mesh({"batch": 4, "model": 2})
    return mw.Sharded(mesh, {"hidden.*kernel": [None, "model"]}, **options)


def build(middle: Any = None) -> keras.Model:
    layers = [keras.layers.Dense(8, name="hidden", use_bias=False)]
    layers += [keras.layers.Lambda(middle, name="middle")] if middle else []
    model = keras.Sequential([keras.Input([8]), *layers, keras.layers.Dense(2, name="output")])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def spoilt(value: float) -> np.ndarray:
    """The rows, of which the fourth of the bad step holds this value."""
    x = X.copy()
    x[(BAD_STEP - 1) * 16 + 3] = value
    return x


def trained(strategy: mw.Sharded, make: Any, x: np.ndarray, **options: Any) -> Any:
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "nan_guard": "raise"} | options
    model = made(strategy, make)
    try:
        strategy.fit(model, x, Y[: len(x)], **options)
    except mw.NotFiniteError as error:
        return model, error
    return model, None


def norm(x: Any) -> Any:
    """Finite at zero, where its gradient is not."""
    return keras.ops.sqrt(keras.ops.sum(keras.ops.square(x), axis=-1, keepdims=True))


class Every(keras.callbacks.Callback):
    """Looks at every batch, so that steps are taken one by one."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@pytest.mark.full_for("one by one, zero=2")
@pytest.mark.parametrize(
    ("strategy", "fit"),
    [
        pytest.param({}, {}, id="four steps at once", marks=pytest.mark.full),
        pytest.param({"zero": 2}, {"callbacks": [Every()]}, id="one by one, zero=2"),
        pytest.param(
            {"accumulate": 2}, {"batch_size": 8}, id="accumulate=2", marks=pytest.mark.full
        ),
    ],
)
def test_a_bad_row_is_found_and_the_values_before_are_kept(
    strategy: dict[str, Any], fit: dict[str, Any]
) -> None:
    model, error = trained(sharded(**strategy), build, spoilt(np.nan), epochs=2, **fit)
    before, none = trained(sharded(**strategy), build, X[: (BAD_STEP - 1) * 16], **fit)
    assert none is None
    assert (error.step, error.epoch) == (BAD_STEP, 0)
    assert error.variables == ("hidden/kernel", "output/kernel", "output/bias")
    assert "its batch holds such values, x in 1 of" in str(error)
    assert "rows (3)" in str(error)
    actual, expected = weights(model), weights(before)
    for path, value in expected.items():
        np.testing.assert_array_equal(actual[path], value, err_msg=path)


@pytest.mark.full
def test_a_gradient_that_is_not_finite_is_found_though_the_loss_is() -> None:
    model, error = trained(sharded(), lambda: build(norm), spoilt(0.0))
    assert error.step == BAD_STEP
    assert error.variables == ("hidden/kernel",)
    assert "the first such result is that of the backward pass: " in str(error)
    assert "middle" in str(error)
    assert "the gradients of hidden/kernel are not finite." in str(error)
    assert all(np.isfinite(value).all() for value in weights(model).values())


@pytest.mark.full
def test_the_operation_and_its_layer_are_named() -> None:
    def log(x: Any) -> Any:
        return keras.ops.log(keras.ops.abs(x))

    _, error = trained(sharded(), lambda: build(log), spoilt(0.0))
    assert "the first such result is that of log in " in str(error)
    assert "middle" in str(error)
    assert "its loss is" in str(error)


def test_a_later_epoch_is_counted() -> None:
    def make() -> keras.Model:
        model = build(keras.ops.exp)
        model.compile(keras.optimizers.SGD(lambda: 1e-3), "mse")
        return model

    class Spoil(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.get_layer("hidden").kernel.assign(np.full([8, 8], 1e4))

    _, error = trained(sharded(), make, X, epochs=3, callbacks=[Spoil()])
    assert (error.step, error.epoch) == (9, 1)
    assert "step 9 of the optimizer (step 1 of epoch 2)" in str(error)


@pytest.mark.full
def test_guarded_training_is_bit_for_bit_the_same() -> None:
    with_guard, _ = trained(sharded(), build, X, epochs=2)
    without, _ = trained(sharded(), build, X, epochs=2, nan_guard="off")
    for path, value in weights(without).items():
        np.testing.assert_array_equal(weights(with_guard)[path], value, err_msg=path)


@pytest.mark.full
def test_training_goes_on_after_the_bad_row_is_mended() -> None:
    strategy = sharded()
    model, error = trained(strategy, build, spoilt(np.inf))
    assert error is not None
    history = strategy.fit(model, X, Y, batch_size=16, verbose=0, nan_guard="raise")
    assert np.isfinite(history.history["loss"]).all()


def test_without_being_asked_it_warns_once_at_the_end_of_an_epoch() -> None:
    strategy = sharded()
    model = made(strategy, build)
    with pytest.warns(mw.MeshwrightWarning, match="loss of epoch 1 is nan.*nan_guard='raise'") as w:
        strategy.fit(model, spoilt(np.nan), Y, batch_size=16, epochs=3, verbose=0)
    assert len(w) == 1


def test_it_can_be_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(sharded(), build, spoilt(np.nan), nan_guard="off")


def test_a_guard_that_there_is_not_is_told() -> None:
    with pytest.raises(mw.ModelError, match="nan_guard must be 'warn'"):
        trained(sharded(), build, X, nan_guard="stop")


class OwnStep(keras.Model):
    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


def test_a_step_that_it_cannot_reach_into_is_refused() -> None:
    def own() -> keras.Model:
        source = keras.Input([8])
        model = OwnStep(source, keras.layers.Dense(2, name="hidden")(source))
        model.compile("adam", "mse")
        return model

    def scaled() -> keras.Model:
        model = build()
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
        return model

    for make, why in ((own, "brings its own train_step"), (scaled, "skips steps itself")):
        with pytest.raises(mw.ModelError, match=f"is not supported for model.*{why}"):
            trained(sharded(), make, X)
