"""Layouts of Keras' layers in configurations, copies, wrappers and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_layer_cases import (
    ROWS,
    STEPS,
    WRITABLE,
    ZEROS,
    ZEROS_RNN,
    Case,
    U,
    asked,
    built,
    over,
    some_layout,
)

import meshwright as mw
from meshwright.frontends.keras import layers

# Keras 3.15 turns variables into NumPy arrays in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


# Copies and wrappers

KERNEL = {"kernel_layout": [U, "model"]}


@over(WRITABLE)
def test_layouts_survive_config(case: Case) -> None:
    weights = layers.weights_by_name(built(case, keras.layers))
    layer = built(case, **{f"{n}_layout": some_layout(w) for n, w in weights.items()})
    assert len(asked(layer)) == len(weights)
    config = json.loads(json.dumps(layer.get_config()))
    again = type(layer).from_config(config)
    again.build(*case.shapes)
    assert type(again) is type(layer)
    assert asked(again) == asked(layer)


@pytest.mark.parametrize("functional", [False, True], ids=["sequential", "functional"])
def test_layouts_survive_clone_model(functional: bool) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, **KERNEL, name="d")])
    if functional:
        inputs = keras.Input((4,))
        shared = layers.Dense(4, **KERNEL, name="shared")
        model = keras.Model(inputs, model(shared(shared(inputs))))
    clone = keras.models.clone_model(model, **({"recursive": True} if functional else {}))
    kernels = [w for w in clone.weights if w.name == "kernel"]
    assert len(kernels) == 1 + functional
    assert [str(layers.weight_layout(k)) for k in kernels] == ["[unsharded, model]"] * len(kernels)
    assert not set(map(id, kernels)) & set(map(id, model.weights))


def test_a_layer_called_twice_has_its_weights_laid_out_once() -> None:
    layer = layers.Dense(4, **KERNEL)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layer(layer(inputs)))
    assert len(model.weights) == 2
    assert asked(layer) == {"kernel": "[unsharded, model]"}


@pytest.mark.full_for("GRU-keras")
@pytest.mark.parametrize("module", [keras.layers, layers], ids=["keras", "meshwright"])
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN"])
def test_both_directions_of_bidirectional_keep_the_layouts(module: Any, layer: str) -> None:
    inner = getattr(layers, layer)(2, **KERNEL, recurrent_kernel_layout=["model", U])
    wrapper = module.Bidirectional(inner)
    wrapper.build((None, 5, 4))
    assert asked(wrapper) == {
        f"{way}_{weight}": layout
        for way in ("forward", "backward")
        for weight, layout in (
            ("kernel", "[unsharded, model]"),
            ("recurrent_kernel", "[model, unsharded]"),
        )
    }


def test_other_wrappers_keep_the_layouts_also_through_config() -> None:
    wrappers = [
        (keras.layers.TimeDistributed(layers.Dense(2, **KERNEL)), STEPS),
        (keras.layers.SpectralNormalization(layers.Dense(2, **KERNEL)), ROWS),
        (keras.layers.RNN(layers.LSTMCell(2, **KERNEL)), STEPS),
    ]
    for wrapper, shape in wrappers:
        again = type(wrapper).from_config(wrapper.get_config())
        for layer in (wrapper, again):
            layer.build(shape)
            assert asked(layer) == {"kernel": "[unsharded, model]"}


def test_a_bound_layout_comes_back_bound() -> None:
    layout = mw.Layout([U, "model"], mw.create_mesh({"batch": 4, "model": 2}))
    again = layers.Dense.from_config(layers.Dense(2, kernel_layout=layout).get_config())
    again.build((None, 4))
    assert layers.weight_layout(again.kernel) == layout


def test_keras_own_layers_stay_keras_own() -> None:
    plain = keras.layers.Dense(2)
    again = keras.layers.deserialize(keras.layers.serialize(plain))
    assert type(again) is keras.layers.Dense
    wrapper = keras.layers.Bidirectional(keras.layers.LSTM(2))
    assert type(wrapper.forward_layer) is keras.layers.LSTM


# Files


@pytest.fixture(scope="module")
def model() -> keras.Model:
    """Functional: a nested Sequential, wrappers, a shared layer, attention."""
    inputs = keras.Input((6, 4), name="x")
    shared = layers.Dense(4, name="shared", **KERNEL, bias_layout=["model"], **ZEROS)
    x = shared(shared(inputs))
    x = layers.GroupQueryAttention(3, 4, 2, output_kernel_layout=["model", U, U], **ZEROS)(x, x)
    x = layers.BatchNormalization(moving_mean_layout=["model"])(x)
    x = layers.TimeDistributed(layers.Dense(4, **KERNEL, **ZEROS), name="each")(x)
    gru = layers.GRU(2, recurrent_layout=[U, "model"], **ZEROS_RNN)
    x = keras.layers.Bidirectional(gru)(x)
    head = [layers.Dense(4, **KERNEL, **ZEROS), keras.layers.Dense(1, **ZEROS)]
    model = keras.Model(inputs, keras.Sequential(head, name="head")(x))
    ramps = [
        np.linspace(-1, 1, w.size, dtype=w.dtype).reshape(w.shape) for w in model.get_weights()
    ]
    model.set_weights([np.abs(r) if r.ndim == 1 else r for r in ramps])  # a variance among them
    return model


def all_asked(model: keras.Model) -> list[tuple[str, str]]:
    return [(w.name, str(layers.weight_layout(w))) for w in model.weights]


def in_plain_keras(script: str, *arguments: Any) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": "jax"},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.full
def test_a_saved_model_loads_in_plain_keras_and_computes_the_same(
    tmp_path: Path, model: keras.Model
) -> None:
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(2, 6, 4)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", model.predict(x, verbose=0))
    model.save(tmp_path / "model.keras")
    with_layouts = []
    for case in WRITABLE:
        weights = layers.weights_by_name(built(case, keras.layers))
        asks = {f"{name}_layout": some_layout(weight) for name, weight in weights.items()}
        with_layouts.append(keras.saving.serialize_keras_object(built(case, **asks)))
    (tmp_path / "layers.json").write_text(json.dumps(with_layouts))
    in_plain_keras(
        """
        import json, pathlib, sys
        import keras, numpy as np
        at = pathlib.Path(sys.argv[1])
        model = keras.saving.load_model(at / "model.keras")
        for layer in model._flatten_layers():
            assert type(layer).__module__.startswith("keras."), layer
        y = model.predict(np.load(at / "x.npy"), verbose=0)
        np.testing.assert_allclose(y, np.load(at / "y.npy"), rtol=1e-6, atol=1e-6)
        for config in json.loads((at / "layers.json").read_text()):
            layer = keras.saving.deserialize_keras_object(config)
            assert layer.built and layer.weights, layer
        assert "meshwright" not in sys.modules
        """,
        tmp_path,
    )


def test_a_saved_model_brings_its_layouts_back(tmp_path: Path, model: keras.Model) -> None:
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert all_asked(again) == all_asked(model)
    assert sum(layout != "None" for _, layout in all_asked(again)) == 8
    assert [type(layer) for layer in again.layers] == [
        # A wrapper that was given no layout itself comes back as Keras' own.
        keras.layers.TimeDistributed if layer.name == "each" else type(layer)
        for layer in model.layers
    ]
    assert all_asked(keras.models.model_from_json(model.to_json())) == all_asked(model)
    for mine, yours in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, yours)


@keras.saving.register_keras_serializable("tests")
class Net(keras.Model):
    """A subclassed model that makes its layers itself."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.blocks = [layers.Dense(units, **KERNEL) for _ in range(2)]

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def test_a_saved_subclassed_model_has_its_layouts_again(tmp_path: Path) -> None:
    model = Net(4)
    model(np.ones((2, 4), "float32"))
    model.save(tmp_path / "net.keras")
    again = keras.saving.load_model(tmp_path / "net.keras")
    assert [asked(block) for block in again.blocks] == [{"kernel": "[unsharded, model]"}] * 2


def test_a_legacy_h5_file_brings_back_keras_own_layers(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, **KERNEL)])
    from keras.src.legacy.saving import legacy_h5_format

    legacy_h5_format.save_model_to_hdf5(model, str(tmp_path / "model.h5"))
    again = keras.saving.load_model(tmp_path / "model.h5", compile=False)
    assert type(again.layers[0]) is keras.layers.Dense
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


# Under a strategy


def test_under_a_strategy_the_arrays_lie_so_also_in_a_loaded_model(tmp_path: Path) -> None:
    strategy = mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}))
    with strategy.scope():
        rnn = layers.LSTM(2, recurrent_layout=[U, "model"], **ZEROS_RNN)
        head = layers.Dense(4, kernel_layout=["model", U], **ZEROS)
        net = keras.Sequential([keras.Input((3, 4)), keras.layers.Bidirectional(rnn), head])
    net.save(tmp_path / "net.keras")
    with strategy.scope():
        again = keras.saving.load_model(tmp_path / "net.keras")
    for loaded in (net, again):
        shapes = {n: w.value.addressable_shards[0].data.shape for n, w in names_in(loaded).items()}
        assert (
            shapes["0_forward_recurrent_kernel"] == shapes["0_backward_recurrent_kernel"] == (2, 4)
        )
        assert shapes["0_forward_kernel"] == (4, 8)
        assert shapes["1_kernel"] == (2, 4)


def names_in(model: keras.Sequential) -> dict[str, Any]:
    results = [layers.weights_by_name(layer) for layer in model.layers]
    return {
        f"{i}_{name}": weight
        for i, weights in enumerate(results)
        for name, weight in weights.items()
    }
