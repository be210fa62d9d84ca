"""Weights that are stored padded × meshes × optimizers: every number is one device's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, optimizers
from oracle import (
    OneDevice,
    Tolerance,
    Trained,
    agree,
    compiled,
    gradients,
    largest_gap,
    made,
    relative,
    train,
    weights,
)

import meshwright as mw
from meshwright._compat import raw_value
from meshwright.step.accumulate import Way, accumulating_in

# One process: each oracle is computed once.
pytestmark = pytest.mark.xdist_group("padding_laws")

BATCH = 16
SINGLE = Tolerance(weights=8e-7, losses=2e-6)  # as in test_training_laws.py
AMPLIFIED = Tolerance(weights=2e-5, losses=2e-6)


def padded(*specs: Any) -> mw.Layout:
    return mw.Layout(specs, pad=True)


COLUMNS = {"hidden.*kernel": padded(None, "model"), "hidden.*bias": padded("model")}
ROWS = {"output.*kernel": padded("model", None)}
WORDS = {"words.embeddings": padded("model", None)}
BOTH = {"hidden.*kernel": padded("batch", "model"), "words": padded(None, ("model", "batch"))}
ALL = COLUMNS | ROWS | WORDS
RULES = {"columns": COLUMNS, "rows": ROWS, "words": WORDS, "both": BOTH, "all": ALL}
MESHES = {"4x2": {"batch": 4, "model": 2}, "2x4": {"batch": 2, "model": 4}}
OPTIMIZERS = {
    "sgd": (lambda: optimizers.SGD(0.05), SINGLE),
    "momentum": (
        lambda: optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1, weight_decay=1e-2),
        SINGLE,
    ),
    "adam": (lambda: optimizers.Adam(1e-3, clipnorm=0.1, weight_decay=1e-2), AMPLIFIED),
    "global": (lambda: optimizers.Adam(1e-3, global_clipnorm=0.2), AMPLIFIED),
    "adafactor": (lambda: optimizers.Adafactor(1e-2, clipnorm=0.1, weight_decay=1e-2), SINGLE),
    "averages": (
        lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4),
        SINGLE,
    ),
    "muon": (lambda: optimizers.Muon(1e-3), AMPLIFIED),
    "lamb": (lambda: optimizers.Lamb(1e-3), AMPLIFIED),
}


def odd() -> keras.Model:
    """No dim divides by two: 13 words of 7 features, 35 features into 11 into 5."""
    return keras.Sequential(
        [
            keras.Input([5], dtype="int32"),
            layers.Embedding(13, 7, name="words"),
            layers.Flatten(),
            layers.Dense(11, activation="tanh", name="hidden"),
            layers.Dropout(0.25),
            layers.Dense(5, name="output"),
        ],
        name="odd",
    )


def wide() -> keras.Model:
    """Large enough for ZeRO to share it out, over the dims that do divide."""
    return keras.Sequential(
        [
            keras.Input([64]),
            layers.Dense(193, activation="tanh", name="hidden"),
            layers.BatchNormalization(name="norm", momentum=0.8),
            layers.Dense(5, name="output"),
        ],
        name="wide",
    )


def pictures() -> keras.Model:
    """Windows over split rows, by kernels whose features are stored padded."""
    return keras.Sequential(
        [
            keras.Input([8, 8, 3]),
            layers.Conv2D(7, 3, padding="same", activation="tanh", name="hidden"),
            layers.MaxPooling2D(3, strides=2, padding="same"),
            layers.Conv2D(5, 3, strides=2, padding="same", name="strided"),
            layers.Flatten(),
            layers.Dense(5, name="output"),
        ],
        name="pictures",
    )


def data(rows: int = 96) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(7)
    return draw.integers(0, 13, [rows, 5], "int32"), draw.integers(0, 5, rows)


def floats(*dims: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(7)
    return draw.normal(size=dims).astype("float32"), draw.integers(0, 5, dims[0])


def strategy(rules: str = "all", mesh: str = "2x4", **options: Any) -> mw.Sharded:
    return mw.Sharded(mw.create_mesh(MESHES[mesh]), RULES[rules], **options)


@functools.cache
def one_device(optimizer: str) -> Trained:
    return train(OneDevice(), compiled(odd, OPTIMIZERS[optimizer][0]), *data())


def _cases() -> list[Any]:
    return [
        pytest.param(
            rules,
            mesh,
            optimizer,
            id=f"{rules}-{mesh}-{optimizer}",
            marks=() if (rules, mesh, optimizer) == ("all", "2x4", "adam") else pytest.mark.full,
        )
        for optimizer in OPTIMIZERS
        for mesh in MESHES
        for rules in RULES
        if _is_asked(rules, mesh, optimizer)
    ]


def _is_asked(rules: str, mesh: str, optimizer: str) -> bool:
    """Every optimizer over all kinds of padding, and every kind on both meshes.

    Adafactor, which takes means over rows and columns, sees which of the dims is padded.
    """
    if optimizer == "adam":
        return True
    if optimizer == "adafactor":
        return mesh == "2x4" or rules == "both"
    return (rules, mesh) in (("all", "2x4"), ("both", "4x2"))


@pytest.mark.full_for("all-2x4-adam")
@pytest.mark.parametrize(("rules", "mesh", "optimizer"), _cases())
def test_loss_curve_and_weights_are_one_devices(rules: str, mesh: str, optimizer: str) -> None:
    build, within = compiled(odd, OPTIMIZERS[optimizer][0]), OPTIMIZERS[optimizer][1]
    sharded = train(strategy(rules, mesh), build, *data())
    agree(sharded, one_device(optimizer), within)


@pytest.mark.full_for("all-2x4")
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        pytest.param(r, m, marks=() if (r, m) == ("all", "2x4") else pytest.mark.full)
        for r in RULES
        for m in MESHES
        if m == "2x4" or r == "both"
    ],
)
def test_gradients_are_one_devices(rules: str, mesh: str) -> None:
    build = compiled(odd, lambda: optimizers.SGD(0.05))
    batch = tuple(part[:BATCH] for part in data())
    under, one = strategy(rules, mesh), OneDevice()
    actual = gradients(under, made(under, build), batch)
    expected = gradients(one, made(one, build), batch)
    for path, gradient in expected.items():
        assert relative(actual[path], gradient) <= 1e-5, path


@functools.cache
def one_wide_device() -> Trained:
    return train(OneDevice(), compiled(wide, OPTIMIZERS["adam"][0]), *floats(96, 64))


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_shares_padded_weights_out(zero: int) -> None:
    x, y = floats(96, 64)
    build = compiled(wide, OPTIMIZERS["adam"][0])
    rules = {"hidden.*kernel": padded(None, "model")}
    under = mw.Sharded(mw.create_mesh(MESHES["4x2"]), rules, zero=zero)
    sharded = train(under, build, x, y)
    agree(sharded, one_wide_device(), AMPLIFIED)
    state = under.state(sharded.model)
    assert _share(state.slots, "hidden/kernel/momentum") == (16, 97)
    assert _share(state.params, "hidden/kernel") == ((16, 97) if zero == 3 else (64, 97))


@pytest.mark.full
@pytest.mark.parametrize(
    ("zero", "way"),
    [(0, "written out"), (2, "written out"), (3, "written out"), (2, "side by side")],
)
def test_gradients_of_padded_weights_are_accumulated(zero: int, way: Way) -> None:
    def build() -> keras.Model:  # without statistics, which are those of each micro-batch
        return keras.Sequential([layer for layer in wide().layers if layer.name != "norm"])

    x, y = floats(96, 64)
    build = compiled(build, OPTIMIZERS["momentum"][0])
    rules = {"hidden.*kernel": padded(None, "model")}
    under = mw.Sharded(mw.create_mesh(MESHES["4x2"]), rules, zero=zero, accumulate=2)
    with accumulating_in(way):
        ours = train(under, build, x, y, batch_size=BATCH // 2)
    one = train(OneDevice(), build, x, y, batch_size=BATCH)
    gap, path = largest_gap(ours.weights, one.weights)
    assert gap <= SINGLE.weights, path


@pytest.mark.full
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"remat": "block"}, {"sums": "float32"}])
def test_other_ways_to_take_a_step_agree(options: dict[str, Any]) -> None:
    def plain() -> keras.Model:
        model = odd()
        return keras.Sequential([layer for layer in model.layers if "dropout" not in layer.name])

    build = compiled(plain, lambda: optimizers.SGD(0.05, momentum=0.9))
    size = BATCH // options.get("accumulate", 1)
    ours = train(strategy(**options), build, *data(), batch_size=size)
    one = train(OneDevice(), build, *data(), batch_size=BATCH)
    gap, path = largest_gap(ours.weights, one.weights)
    assert gap <= SINGLE.weights, path


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 3])
def test_windows_over_split_rows_stay_right(zero: int) -> None:
    """XLA alone would take uneven features of a kernel, or uneven rows, silently wrong."""
    build = compiled(pictures, lambda: optimizers.SGD(0.05, momentum=0.9))
    kernel = padded(None, None, None, "model")
    under = mw.Sharded(
        mw.create_mesh({"batch": 2, "rows": 2, "model": 2}),
        {"hidden/kernel": kernel, "strided/kernel": kernel, "hidden/bias": padded("model")},
        inputs=["batch", "rows", None, None],
        zero=zero,
    )
    x, y = floats(96, 8, 8, 3)
    agree(train(under, build, x, y), train(OneDevice(), build, x, y), SINGLE)


# What a user sees of the model


@pytest.mark.full
def test_the_model_keeps_its_own_dims(tmp_path: Path) -> None:
    under, (x, y) = strategy(), data(40)
    model = made(under, compiled(odd, OPTIMIZERS["adam"][0]))
    one = made(OneDevice(), compiled(odd, OPTIMIZERS["adam"][0]))
    shapes = [w.shape for w in one.get_weights()]
    assert [w.shape for w in model.get_weights()] == shapes
    one.set_weights(model.get_weights())
    predicted = under.predict(model, x[:37], verbose=0)
    assert np.allclose(predicted, one.predict(x[:37], verbose=0), atol=1e-6)
    measured = under.evaluate(model, x, y, verbose=0)
    assert np.allclose(measured, one.evaluate(x, y, verbose=0), rtol=1e-6)
    model.save(tmp_path / "odd.keras")
    loaded = keras.saving.load_model(tmp_path / "odd.keras")
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert np.array_equal(a, b)
    under.place(loaded)
    assert np.array_equal(under.predict(loaded, x[:37], verbose=0), predicted)


@pytest.mark.full
def test_a_step_is_compiled_once_and_stores_its_share() -> None:
    under, (x, y) = strategy(), data(32)
    model = made(under, compiled(odd, OPTIMIZERS["momentum"][0]))
    batch = x[:BATCH], y[:BATCH]
    taken = under.train_step(model, batch)
    state = under.state(model)
    lies = jax.tree.map(lambda array: array.sharding, state)
    step = jax.jit(taken, donate_argnums=0, out_shardings=(lies, None))
    explained = under.explain(model)
    for part in state:
        for path, array in part.items():
            share = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
            assert share == explained[path].bytes_per_device, path
    assert _share(state.params, "hidden/kernel") == (35, 3)
    assert _share(state.slots, "words/embeddings/momentum") == (4, 7)
    before = jax.tree.map(lambda array: (array.shape, array.sharding), state)
    for _ in range(3):
        state, _ = step(state, under.put(batch))
    assert step._cache_size() == 1
    after = jax.tree.map(lambda array: (array.shape, array.sharding), state)
    assert jax.tree.all(jax.tree.map(_same, before, after, is_leaf=_is_pair))
    for part in state[:3]:
        for path, array in part.items():
            value = np.asarray(array).copy()
            value[tuple(slice(size) for size in explained[path].info.dims)] = 0
            assert not value.any(), path
    under.load_state(model, state)
    assert model.get_layer("hidden").kernel.shape == (35, 11)


@pytest.mark.full
def test_no_whole_copy_is_alive_while_fit_trains() -> None:
    under, (x, y) = strategy(), data(BATCH)
    model = made(under, compiled(odd, OPTIMIZERS["momentum"][0]))
    gone: list[bool] = []

    def batches() -> Any:
        while True:
            slots = [v for v in model.optimizer.variables if v.shape == (35, 11)]
            kernels = [model.get_layer("hidden").kernel, *slots]
            gone.append(all(raw_value(v).is_deleted() for v in kernels) and bool(slots))
            yield x, y

    under.fit(model, batches(), shuffle=False, steps_per_epoch=40, verbose=0)
    assert not gone[0]
    assert all(gone[28:40])  # a few batches are read ahead of the first step
    assert not raw_value(model.get_layer("hidden").kernel).is_deleted()


@pytest.mark.full
@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"steps_per_execution": 3}])
def test_other_ways_to_run_agree(how: dict[str, Any]) -> None:
    build = compiled(odd, OPTIMIZERS["momentum"][0], **how)
    ours, one = (train(placement, build, *data(48)) for placement in (strategy(), OneDevice()))
    gap, path = largest_gap(ours.weights, one.weights)
    assert gap <= SINGLE.weights, path


@pytest.mark.full
def test_the_scopes_own_fit_agrees() -> None:
    build = compiled(odd, OPTIMIZERS["momentum"][0])
    under = strategy()
    model = made(under, build)
    with under.scope():
        model.fit(*data(), batch_size=BATCH, verbose=0)
    gap, path = largest_gap(weights(model), one_device("momentum").weights)
    assert gap <= SINGLE.weights, path


@pytest.mark.full
def test_callbacks_see_and_change_weights_in_their_own_dims() -> None:
    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel = self.model.get_layer("hidden").kernel
            assert kernel.shape == (35, 11)
            kernel.assign(np.asarray(kernel) * 0.5)

    def run(under: Any) -> keras.Model:
        model = made(under, compiled(odd, OPTIMIZERS["sgd"][0]))
        under.fit(model, *data(48), batch_size=BATCH, verbose=0, callbacks=[Halve()])
        return model

    for a, b in zip(run(strategy()).get_weights(), run(OneDevice()).get_weights(), strict=True):
        assert np.abs(a - b).max() <= SINGLE.weights


@pytest.mark.full
def test_the_nan_guard_names_the_step() -> None:
    x, y = floats(96, 64)
    x[40, 3] = np.inf
    under = mw.Sharded(mw.create_mesh(MESHES["2x4"]), {"hidden.*kernel": padded(None, "model")})
    model = made(under, compiled(wide, lambda: optimizers.SGD(0.05)))
    with pytest.raises(mw.NotFiniteError, match="step 3 of the optimizer"):
        under.fit(model, x, y, batch_size=BATCH, shuffle=False, verbose=0, nan_guard="raise")
    assert model.get_layer("hidden").kernel.shape == (64, 193)
    assert all(np.isfinite(w).all() for w in model.get_weights())


class OwnSteps(keras.Sequential):
    def train_step(self, state: Any, batch: Any) -> Any:
        return super().train_step(state, batch)

    def test_step(self, state: Any, batch: Any) -> Any:
        return super().test_step(state, batch)


@pytest.mark.full
def test_a_model_with_steps_of_its_own_agrees() -> None:
    def build() -> keras.Model:
        return OwnSteps([keras.Input([5], dtype="int32"), *odd().layers])

    build = compiled(build, OPTIMIZERS["adam"][0])
    ours, one = (train(placement, build, *data()) for placement in (strategy(), OneDevice()))
    agree(ours, one, AMPLIFIED)
    measured = strategy().evaluate(ours.model, *data(), verbose=0)
    assert np.allclose(measured, one.model.evaluate(*data(), verbose=0), rtol=1e-5)


@pytest.mark.full
def test_frozen_weights_may_be_padded() -> None:
    def build() -> keras.Model:
        model = odd()
        model.get_layer("words").trainable = False
        return model

    build = compiled(build, OPTIMIZERS["momentum"][0])
    agree(train(strategy(), build, *data()), train(OneDevice(), build, *data()), SINGLE)


@pytest.mark.full
def test_a_layers_own_layout_may_pad() -> None:
    def build() -> keras.Model:
        dense = mw.keras.layers.Dense(5, name="output", kernel_layout=padded("model", None))
        return keras.Sequential([*odd().layers[:-1], dense])

    under = mw.Sharded(mw.create_mesh(MESHES["2x4"]))
    build = compiled(build, OPTIMIZERS["sgd"][0])
    sharded, one = (train(placement, build, *data()) for placement in (under, OneDevice()))
    agree(sharded, one, SINGLE)
    kernel = under.explain(sharded.model)["output/kernel"]
    assert kernel.reason == "the layer's own argument, stored as 12x5"
    assert _share(under.state(sharded.model).params, "output/kernel") == (3, 5)


# Checkpoints


@pytest.mark.full
def test_checkpoints_hold_weights_in_their_own_dims(tmp_path: Path) -> None:
    """A run stopped after one epoch goes on under another mesh, and on one that pads nothing."""
    build, directory = compiled(odd, OPTIMIZERS["adam"][0]), tmp_path / "run"
    options = {"batch_size": BATCH, "verbose": 0, "checkpoint": directory}
    through = train(OneDevice(), build, *data(), epochs=3)
    for number, under in enumerate(
        [strategy(), strategy(mesh="4x2"), mw.DataParallel(mw.create_mesh({"batch": 8}))], 1
    ):
        model = made(under, build)
        under.fit(model, *data(), epochs=number, **options)
        saved = {array.key: array.dims for array in mw.read_checkpoint(directory).arrays}
        assert saved["params/hidden/kernel"] == (35, 11)
        assert saved["params/words/embeddings"] == (13, 7)
        assert saved["slots/adam/hidden/kernel/momentum"] == (35, 11)
    gap, path = largest_gap(weights(model), through.weights)
    assert gap <= 2 * AMPLIFIED.weights, path


def test_a_checkpoint_is_saved_and_restored(tmp_path: Path) -> None:
    under = strategy()
    model = made(under, compiled(odd, OPTIMIZERS["momentum"][0]))
    x, y = data(BATCH)
    under.state(model, (x, y))  # makes the optimizer's slots
    under.save(model, tmp_path)
    before = model.get_weights()
    model.set_weights([np.zeros_like(w) for w in before])
    under.restore(model, tmp_path)
    for a, b in zip(model.get_weights(), before, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.full
def test_the_check_compares_padded_weights_too() -> None:
    def build() -> Any:
        return compiled(odd, OPTIMIZERS["momentum"][0])(), tuple(p[:BATCH] for p in data())

    mw.testing.assert_equivalent(build, [MESHES["2x4"]], ALL, steps=2)


def _share(part: dict[str, Any], ending: str) -> tuple[int, ...]:
    (array,) = (value for path, value in part.items() if path.endswith(ending))
    return array.sharding.shard_shape(array.shape)


def _is_pair(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], tuple)


def _same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and one[1].is_equivalent_to(other[1], len(one[0]))
