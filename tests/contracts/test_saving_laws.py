"""Sharded models are read, written, saved, loaded and cloned as any Keras model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from oracle import OneDevice, compiled, largest_gap, made, weights
from strategies import LAYOUTS, PIPELINES, Row, rows

import meshwright as mw
from meshwright.testing import run_in_fresh_process


def _build(row: Row) -> Any:
    return compiled(row.of.build, lambda: keras.optimizers.SGD(0.05, momentum=0.9))


_PIPED = [
    pytest.param(row, id=row.name, marks=pytest.mark.full)
    for row in PIPELINES
    if row.name in ("stage4-1f1b-zero2", "stage2-unequal")
]


@pytest.fixture(
    params=[*rows(always=("model-dense",), only=lambda row: row.name in LAYOUTS), *_PIPED]
)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


def _trained(row: Row) -> tuple[mw.Sharded, keras.Model]:
    strategy, (x, y) = row.strategy(), row.of.data(32)
    model = made(strategy, _build(row))
    strategy.fit(model, x, y, batch_size=16, verbose=0)
    return strategy, model


def _lies_as_told(strategy: mw.Sharded, model: keras.Model) -> None:
    for variable, placed in strategy._placed(model):
        value, sharding = variable.value, placed.unpadded.sharding
        assert value.sharding.is_equivalent_to(sharding, value.ndim), placed.info.path


def test_weights_are_got_set_saved_and_loaded(row: Row, tmp_path: Path) -> None:
    strategy, model = _trained(row)
    before = model.get_weights()
    model.save_weights(tmp_path / "kept.weights.h5")
    model.set_weights([weight + 1 for weight in before])
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then + 1)
    model.load_weights(tmp_path / "kept.weights.h5")
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    _lies_as_told(strategy, model)


@pytest.mark.full
def test_a_saved_model_goes_on_where_it_was(row: Row, tmp_path: Path) -> None:
    """Loaded in scope, or loaded outside and placed: the next epoch is the same, slots and all."""
    strategy, model = _trained(row)
    model.save(tmp_path / "model.keras")
    outside = keras.models.load_model(tmp_path / "model.keras")
    strategy.place(outside)
    with strategy.scope():
        inside = keras.models.load_model(tmp_path / "model.keras")
    x, y = row.of.data(32)
    for net in (model, outside, inside):
        keras.utils.set_random_seed(1)
        for seeds in net.non_trainable_variables:  # dropout goes on from the same seed
            if seeds.name == "seed_generator_state":
                seeds.assign([3, 4])
        strategy.fit(net, x, y, batch_size=16, verbose=0, shuffle=False)
        _lies_as_told(strategy, net)
    for net in (outside, inside):
        gap, path = largest_gap(weights(net), weights(model))
        assert gap <= 1e-7, path


@pytest.mark.full_for("model-dense")
def test_a_model_of_plain_keras_is_placed_and_trained(row: Row) -> None:
    strategy, one, (x, y) = row.strategy(), OneDevice(), row.of.data(32)
    results = []
    for place in (True, False):
        model = made(one, _build(row))
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        if place:
            strategy.place(model)
            _lies_as_told(strategy, model)
        how = strategy if place else one
        how.fit(model, x, y, batch_size=16, verbose=0, shuffle=False)
        results.append(weights(model))
    gap, path = largest_gap(*results)
    assert gap <= 1e-6, path


@pytest.mark.full_for("model-dense")
def test_a_clone_made_in_scope_lies_as_the_model_does(row: Row) -> None:
    strategy, model = _trained(row)
    with strategy.scope():
        clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    _lies_as_told(strategy, clone)
    x, _ = row.of.data(32)
    np.testing.assert_allclose(
        strategy.predict(clone, x, batch_size=16, verbose=0),
        strategy.predict(model, x, batch_size=16, verbose=0),
        atol=1e-7,
    )


def test_a_model_is_called_on_arrays_of_the_mesh(row: Row) -> None:
    strategy, model = _trained(row)
    x, _ = row.of.data(16)
    expected = strategy.predict(model, x, batch_size=16, verbose=0)
    np.testing.assert_allclose(np.asarray(model(strategy.put((x,))[0])), expected, atol=1e-6)


@pytest.mark.full
def test_plain_keras_without_meshwright_loads_a_saved_model(tmp_path: Path) -> None:
    param = next(p for p in rows() if p.id == "model-dense")
    strategy, model = _trained(param.values[0])
    model.save(tmp_path / "model.keras")
    x, _ = param.values[0].of.data(16)
    np.save(tmp_path / "x.npy", x)
    run_in_fresh_process(
        f"""
        import sys
        import keras
        import numpy as np
        model = keras.models.load_model({str(tmp_path / "model.keras")!r})
        outputs = model.predict(np.load({str(tmp_path / "x.npy")!r}), verbose=0)
        np.save({str(tmp_path / "outputs.npy")!r}, outputs)
        assert "meshwright" not in sys.modules
        """,
        env={"KERAS_BACKEND": "jax"},
    )
    np.testing.assert_allclose(
        np.load(tmp_path / "outputs.npy"), strategy.predict(model, x, verbose=0), atol=1e-6
    )


@pytest.mark.full
def test_initial_weights_are_those_of_keras_without_meshwright(tmp_path: Path) -> None:
    """The oracle of these tables runs in a process that has Meshwright; this one does not."""
    run_in_fresh_process(
        f"""
        import sys
        import keras
        import numpy as np
        keras.utils.set_random_seed(11)
        layers = keras.layers
        model = keras.Sequential([
            keras.Input([12]), layers.Dense(16, name="hidden"), layers.Dense(4, name="output")
        ])
        np.savez({str(tmp_path / "weights.npz")!r}, *model.get_weights())
        assert "meshwright" not in sys.modules
        """,
        env={"KERAS_BACKEND": "jax"},
    )
    strategy = next(p for p in rows() if p.id == "model-dense").values[0].strategy()

    def build() -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [keras.Input([12]), layers.Dense(16, name="hidden"), layers.Dense(4, name="output")]
        )

    model = made(strategy, build)
    there = np.load(tmp_path / "weights.npz")
    for ours, name in zip(model.get_weights(), there.files, strict=True):
        np.testing.assert_allclose(ours, there[name], rtol=0, atol=1.2e-7)


INITIALIZERS = {
    "glorot_uniform": 1.2e-7,
    "glorot_normal": 1.2e-7,
    "he_uniform": 1.2e-7,
    "he_normal": 1.2e-7,
    "lecun_normal": 1.2e-7,
    "random_uniform": 1e-8,
    "random_normal": 1.5e-8,
    "truncated_normal": 1.5e-8,
    "orthogonal": 1e-6,
    "zeros": 0.0,
    "ones": 0.0,
    "identity": 0.0,
}


@pytest.mark.full_for("lecun_normal", "orthogonal")
@pytest.mark.parametrize(("name", "within"), INITIALIZERS.items(), ids=INITIALIZERS)
def test_an_initializer_gives_plain_keras_values_in_any_layout(name: str, within: float) -> None:
    """And the values of a compiled initializer are the same bits for every layout."""

    def build() -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [keras.Input([16]), layers.Dense(16, kernel_initializer=name, name="hidden")]
        )

    mesh = mw.create_mesh({"batch": 4, "model": 2})
    layouts: list[Any] = [None, ["batch", "model"], [None, ("model", "batch")]]
    actual = [
        np.asarray(made(mw.Sharded(mesh, {"kernel": k} if k else {}), build).layers[0].kernel)
        for k in layouts
    ]
    for other in actual[1:]:
        np.testing.assert_array_equal(other, actual[0])
    expected = np.asarray(made(OneDevice(), build).layers[0].kernel)
    np.testing.assert_allclose(actual[0], expected, rtol=0, atol=within)


@pytest.mark.parametrize("axes", [{"batch": 4, "model": 2}])
def test_weights_are_saved_in_half_the_bytes(axes: dict[str, int], tmp_path: Path) -> None:
    """They come back rounded, in the type and layout of the model, whatever that is."""

    def build() -> keras.Model:
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input([8]), layers.Dense(6, name="h"), layers.BatchNormalization()]
        )
        model.compile("adam", "mse")
        return model

    strategy = mw.Sharded(mw.create_mesh(axes), {"h/kernel": [None, "model"]})
    model = build()
    strategy.fit(model, np.ones([8, 8], "float32"), np.ones([8, 6], "float32"), verbose=0)
    strategy.save(model, tmp_path, dtype="bfloat16")
    info = mw.read_checkpoint(tmp_path)
    saved = {(array.part, array.dtype) for array in info.arrays if "iteration" not in array.path}
    assert {("params", "bfloat16"), ("state", "bfloat16"), ("slots", "float32")} <= saved
    assert not {("params", "float32"), ("state", "float32")} & saved
    other = build()
    strategy.restore(other, tmp_path)
    assert str(other.layers[0].kernel.layout.unbound()) == "[unsharded, model]"
    keras.config.set_dtype_policy("bfloat16")
    try:
        small = build()
    finally:
        keras.config.set_dtype_policy("float32")
    strategy.restore(small, tmp_path, parts=("params", "state"))
    for value, expected, tiny in zip(other.weights, model.weights, small.weights, strict=True):
        assert (value.dtype, tiny.dtype) == ("float32", "bfloat16")
        rounded = np.asarray(expected.value).astype("bfloat16")
        np.testing.assert_array_equal(np.asarray(value.value), rounded.astype("float32"))
        np.testing.assert_array_equal(np.asarray(tiny.value), rounded)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "int8"}, r"dtype='int8': expected one of 'bfloat16', "),
        ({"parts": ["weights"]}, r"parts=\['weights'\]: expected a tuple of some of \('params'"),
        ({"parts": "params"}, r"parts='params': expected a tuple"),
    ],
)
def test_what_cannot_be_saved_so_is_said(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    with pytest.raises(mw.CheckpointError, match=says):
        strategy.save(model, tmp_path, **options)
    assert not list(tmp_path.iterdir())


class _WithSpare(keras.layers.Layer):
    """Makes a layer that its call leaves out, as some of Keras Hub's do; it is never built."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.used, self.spare = keras.layers.Dense(4, name="used"), keras.layers.Dense(4)

    def build(self, input_shape: Any) -> None:
        self.used.build(input_shape)

    def call(self, x: Any) -> Any:
        return self.used(x)


class _Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="subclassed")
        self.inner = _WithSpare(name="inner")

    def call(self, x: Any) -> Any:
        return self.inner(x)


def _functional() -> keras.Model:
    inputs = keras.Input([4], name="rows")
    return keras.Model(inputs, _WithSpare(name="inner")(inputs), name="functional")


def _called() -> keras.Model:
    model = _Subclassed()
    model(np.zeros([1, 4]))
    return model


@pytest.mark.parametrize("build", [_functional, _called])
def test_a_layer_that_is_never_called_stops_no_save_restore_or_server(
    build: Any, tmp_path: Path
) -> None:
    x = np.ones([8, 4], "float32")
    strategy, model, other = mw.Sharded(mw.create_mesh({"batch": 8})), build(), build()
    strategy.save(model, tmp_path)
    strategy.restore(other, tmp_path)
    np.testing.assert_array_equal(strategy.predict(other, x, verbose=0), model(x))
    name, example = ("rows", None) if build is _functional else ("input", x)
    with mw.Server(build(), example=example) as server:
        server.answer({name: x[:1]})


def test_a_layer_that_is_never_called_stops_no_restore_from_servers(tmp_path: Path) -> None:
    x = np.ones([8, 4], "float32")
    models = _functional(), _functional()
    for model in models:
        model.compile("sgd", "mse")
    servers = mw.ParameterServer()
    servers.fit(models[0], x, x, verbose=0, checkpoint=tmp_path)
    mw.ParameterServer().restore(tmp_path, models[1])
    np.testing.assert_array_equal(models[1](x), models[0](x))
