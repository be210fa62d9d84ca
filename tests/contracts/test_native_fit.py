"""No weight is ever lost: Keras' own loops in ``scope()``, and ours, when something goes wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest
from oracle import Native, OneDevice, classifier, largest_gap, made, sharded, weights

import meshwright as mw

draw = np.random.default_rng(5)
X = draw.normal(size=[64, 12]).astype("float32")
Y = draw.integers(0, 4, 64)


build = classifier


WAYS = {"strategy.fit": sharded, "native": lambda: Native(sharded())}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Broken(Exception):
    """What the data or a callback raises."""


class RaiseAt(keras.callbacks.Callback):
    """Raises after a number of batches."""

    def __init__(self, batch: int, error: type[BaseException]) -> None:
        super().__init__()
        self._left, self._error = batch, error

    def _count(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if not self._left:
            raise self._error

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _count


def broken_batches(after: int, targets: bool = True) -> Iterator[Any]:
    for i in range(after):
        rows = slice(16 * i, 16 * i + 16)
        yield (X[rows], Y[rows]) if targets else (X[rows],)
    raise Broken


def steps(strategy: Any, count: int) -> dict[str, np.ndarray]:
    """The weights after so many steps that go well."""
    model = made(strategy, build)
    strategy.fit(model, X[: 16 * count], Y[: 16 * count], batch_size=16, shuffle=False, verbose=0)
    return weights(model)


@pytest.mark.full_for("Broken-native", "Broken-strategy.fit", "KeyboardInterrupt-strategy.fit")
@each_way
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_callback_that_raises_leaves_the_newest_weights(way: Any, error: Any) -> None:
    strategy = way()
    model = made(strategy, build)
    with pytest.raises(error):
        strategy.fit(
            model, X, Y, batch_size=16, shuffle=False, verbose=0, callbacks=[RaiseAt(2, error)]
        )
    gap, path = largest_gap(weights(model), steps(OneDevice(), 2))
    assert gap <= 1e-7, path


@pytest.mark.full_for("strategy.fit")
@each_way
def test_data_that_break_off_leave_the_newest_weights(way: Any) -> None:
    strategy = way()
    model = made(strategy, build)
    with pytest.raises(Broken):
        strategy.fit(model, broken_batches(2), steps_per_epoch=4, shuffle=False, verbose=0)
    # Keras reads one batch ahead, so that its step for the last one may not have been taken.
    results = [largest_gap(weights(model), steps(OneDevice(), count))[0] for count in (1, 2)]
    assert min(results) <= 1e-7
    strategy.fit(model, X, Y, batch_size=16, verbose=0)


@pytest.mark.full_for("evaluate-native", "evaluate-strategy.fit")
@each_way
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_measuring_that_breaks_off_changes_no_weight(way: Any, call: str) -> None:
    strategy = way()
    model = made(strategy, build)
    strategy.fit(model, X[:16], Y[:16], batch_size=16, verbose=0)
    before = weights(model)
    data = (X,) if call == "predict" else (X, Y)
    with pytest.raises(Broken):
        getattr(strategy, call)(
            model, *data, batch_size=16, verbose=0, callbacks=[RaiseAt(2, Broken)]
        )
    with pytest.raises(Broken):
        getattr(strategy, call)(
            model, broken_batches(2, targets=call == "evaluate"), steps=4, verbose=0
        )
    assert largest_gap(weights(model), before)[0] == 0


@pytest.mark.full
@each_way
def test_predicting_rows_that_do_not_divide_keeps_every_weight(way: Any) -> None:
    """Plain Keras under a distribution loses them all: 36 rows in batches of 32."""
    strategy = way()
    model, one = made(strategy, build), made(OneDevice(), build)
    strategy.fit(model, X[:16], Y[:16], batch_size=16, verbose=0)
    one.fit(X[:16], Y[:16], batch_size=16, verbose=0)
    before = weights(model)
    actual = strategy.predict(model, X[:36], batch_size=32, verbose=0)
    expected = one.predict(X[:36], batch_size=32, verbose=0)
    assert actual.shape == (36, 4)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert strategy.evaluate(model, X[:36], Y[:36], batch_size=32, verbose=0) == pytest.approx(
        one.evaluate(X[:36], Y[:36], batch_size=32, verbose=0), rel=1e-6
    )
    assert largest_gap(weights(model), before)[0] == 0


@pytest.mark.full_for("strategy.fit")
@each_way
def test_slots_are_kept_from_one_fit_to_the_next(way: Any) -> None:
    """Two fits of one epoch are one fit of two."""
    strategy, one = way(), OneDevice()
    model, other = made(strategy, build), made(one, build)
    for epoch in range(2):
        strategy.fit(
            model, X, Y, batch_size=16, shuffle=False, verbose=0,
            initial_epoch=epoch, epochs=epoch + 1,
        )  # fmt: skip
    one.fit(other, X, Y, batch_size=16, shuffle=False, verbose=0, epochs=2)
    gap, path = largest_gap(weights(model), weights(other))
    assert gap <= 1e-6, path


def test_both_ways_take_turns_on_one_model() -> None:
    strategy = sharded()
    native = Native(strategy)
    model, other = made(strategy, build), made(OneDevice(), build)
    for how in (strategy, native, strategy, native):
        how.fit(model, X, Y, batch_size=16, shuffle=False, verbose=0)
        other.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    gap, path = largest_gap(weights(model), weights(other))
    assert gap <= 1e-6, path
    assert str(model.layers[0].kernel.layout.unbound()) == "[unsharded, model]"


@pytest.mark.parametrize("call", ["fit", "train_on_batch"])
@pytest.mark.parametrize("is_built", [True, False])
def test_keras_own_loops_lay_out_what_was_made_outside_of_the_scope(
    is_built: bool, call: str
) -> None:
    gone_through = []
    for strategy in (OneDevice(), sharded()):
        keras.utils.set_random_seed(5)
        first = [keras.Input([12])] if is_built else []
        model = keras.Sequential([*first, keras.layers.Dense(8, name="hidden")])
        for optimizer in ("sgd", "adam"):
            model.compile(optimizer, "mse", metrics=["mae"])
            with strategy.scope():
                getattr(model, call)(X[:32], X[:32, :8])
                measured = model.evaluate(X[:32], X[:32, :8])
        gone_through.append([*model.get_weights(), *measured])
    for ours, theirs in zip(*gone_through, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def on_batches(model: keras.Model) -> list[Any]:
    """What Keras' methods for single batches return, also for batches that do not divide."""
    rows, odd = slice(0, 16), slice(16, 26)
    return [
        model.train_on_batch(X[rows], Y[rows]),
        model.train_on_batch(X[odd], Y[odd], sample_weight=np.arange(10.0, dtype="float32")),
        model.train_on_batch(X[rows], Y[rows], class_weight={0: 2.0, 1: 1.0, 2: 0.5, 3: 1.0}),
        model.test_on_batch(X[rows], Y[rows]),
        model.test_on_batch(X[odd], Y[odd], return_dict=True)["loss"],
        model.predict_on_batch(X[odd]),
    ]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(sharded, id="model"),
        pytest.param(
            lambda: mw.DataParallel(mw.create_mesh({"batch": 8}), zero=3),
            id="zero3",
            marks=pytest.mark.full,
        ),
    ],
)
def test_single_batches_are_those_of_one_device(strategy: Callable[[], mw.Sharded]) -> None:
    alone, model = made(OneDevice(), build), made(ours := strategy(), build)
    layouts = [variable.layout for variable in model.variables]
    with ours.scope():
        result = on_batches(model)
    for value, expected in zip(result, on_batches(alone), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    gap, path = largest_gap(weights(model), weights(alone))
    assert gap <= 1e-6, path
    assert [variable.layout for variable in model.variables] == layouts


def test_keras_own_fit_on_a_mesh_of_one_device_finds_every_variable_on_the_mesh() -> None:
    """Keras warns of some that lie on the device alone; so its optimizer's counter did."""
    strategy = mw.DataParallel(mw.create_mesh({"batch": 1}, devices=jax.devices()[:1]))
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        model.compile("adam", "mse", metrics=["mae"])
        data = np.ones([8, 4], "float32"), np.ones([8, 3], "float32")
        model.fit(*data, batch_size=8, verbose=0)
        model.evaluate(*data, batch_size=8, verbose=0)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    lying = {type(variable.value.sharding) for variable in variables}
    assert lying == {jax.sharding.NamedSharding}


@pytest.mark.parametrize(("rows", "pieces"), [(8, 8), (3, 1)])
def test_the_layout_of_a_batch_is_one_that_keras_lays_arrays_out_by(rows: int, pieces: int) -> None:
    """Keras Hub's ``generate`` asks a strategy so for the layouts of its prompts."""
    axes = ("batch", "model")
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), batch=axes)
    layout = strategy.get_data_layout((rows, 4))
    laid_out: Any = keras.distribution.distribute_tensor(np.ones([rows, 4]), layout)
    assert layout.axes == ((axes, None) if pieces > 1 else (None, None))
    assert len({str(shard.index) for shard in laid_out.addressable_shards}) == pieces
