"""Layouts as arguments of Keras' layers: reach, errors, configuration, files."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.frontends.keras import layers

U = mw.UNSHARDED
# Keras 3.15 turns variables into NumPy arrays in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Case(NamedTuple):
    """A layer in one configuration: its arguments, and those of its ``build``."""

    layer: str
    arguments: dict[str, Any]
    shapes: tuple[Any, ...]


def case(layer: str, /, *shapes: Any, **arguments: Any) -> Case:
    return Case(layer, arguments, shapes)


ROWS, STEPS = (None, 4), (None, 5, 4)
CONVOLUTION = {"filters": 2, "kernel_size": 2}
LINE, IMAGE, VOLUME = (None, 6, 4), (None, 6, 6, 4), (None, 6, 6, 6, 4)


ZEROS: Any = {"kernel_initializer": "zeros"}  # random initialisers take seconds to compile
ZEROS_RNN: Any = {**ZEROS, "recurrent_initializer": "zeros"}
CELLS = [keras.layers.GRUCell(2, **ZEROS_RNN), keras.layers.LSTMCell(3, **ZEROS_RNN)]


def affine(params: Any, inputs: Any) -> Any:
    return inputs @ params["kernel"] + params["shift"]["bias"]


AFFINE = {"kernel": np.ones((4, 2), "float32"), "shift": {"bias": np.ones((2,), "float32")}}

# Every layer of Keras with weights, in configurations that together have each weight it can have.
CASES = [
    case("Dense", ROWS, units=2),
    case("Dense", ROWS, units=2, use_bias=False),
    case("Dense", ROWS, units=2, lora_rank=1),
    case("Dense", ROWS, units=2, dtype="int8_from_float32"),
    case("EinsumDense", STEPS, equation="abc,cd->abd", output_shape=(None, 2), bias_axes="d"),
    case("EinsumDense", STEPS, equation="abc,cd->abd", output_shape=(None, 2), lora_rank=1),
    case("Embedding", ROWS, input_dim=6, output_dim=2),
    case("Embedding", ROWS, input_dim=6, output_dim=2, lora_rank=1),
    case("ReversibleEmbedding", ROWS, input_dim=6, output_dim=2, tie_weights=False),
    case("ReversibleEmbedding", ROWS, input_dim=6, output_dim=2, lora_rank=1),
    case("Conv1D", LINE, **CONVOLUTION),
    case("Conv1D", LINE, **CONVOLUTION, lora_rank=1),
    case("Conv2D", IMAGE, **CONVOLUTION),
    case("Conv2D", IMAGE, **CONVOLUTION, lora_rank=1),
    case("Conv3D", VOLUME, **CONVOLUTION),
    case("Conv3D", VOLUME, **CONVOLUTION, lora_rank=1),
    case("Conv1DTranspose", LINE, **CONVOLUTION),
    case("Conv2DTranspose", IMAGE, **CONVOLUTION),
    case("Conv3DTranspose", VOLUME, **CONVOLUTION),
    case("DepthwiseConv1D", LINE, kernel_size=2),
    case("DepthwiseConv2D", IMAGE, kernel_size=2),
    case("SeparableConv1D", LINE, **CONVOLUTION),
    case("SeparableConv2D", IMAGE, **CONVOLUTION),
    case("SimpleRNN", STEPS, units=2),
    case("GRU", STEPS, units=2),
    case("LSTM", STEPS, units=2),
    case("SimpleRNNCell", ROWS, units=2),
    case("GRUCell", ROWS, units=2),
    case("LSTMCell", ROWS, units=2),
    case("ConvLSTM1D", (None, 3, 6, 4), **CONVOLUTION),
    case("ConvLSTM2D", (None, 3, 6, 6, 4), **CONVOLUTION),
    case("ConvLSTM3D", (None, 3, 6, 6, 6, 4), **CONVOLUTION),
    case("BatchNormalization", ROWS),
    case("BatchNormalization", ROWS, renorm=True),
    case("LayerNormalization", ROWS),
    case("GroupNormalization", ROWS, groups=2),
    case("RMSNormalization", ROWS),
    case("PReLU", STEPS),
    case("Attention", [STEPS, STEPS], use_scale=True, score_mode="concat"),
    case("AdditiveAttention", [STEPS, STEPS]),
    case("MultiHeadAttention", STEPS, STEPS, num_heads=2, key_dim=3, use_gate=True),
    case(
        "GroupQueryAttention",
        *(STEPS, STEPS),
        **{"head_dim": 3, "num_query_heads": 4, "num_key_value_heads": 2, "use_gate": True},
    ),
    case("Normalization", ROWS),
    case("STFTSpectrogram", (None, 32, 1), frame_length=8, frame_step=4, fft_length=8),
    case("Wrapper", ROWS, layer=keras.layers.Dense(2, **ZEROS)),
    case("Bidirectional", STEPS, layer=keras.layers.LSTM(2, **ZEROS_RNN)),
    case("TimeDistributed", STEPS, layer=keras.layers.Dense(2, **ZEROS)),
    case(
        "TimeDistributed",
        STEPS,
        layer=keras.Sequential(
            [
                keras.layers.Dense(3, name="inner", **ZEROS),
                keras.layers.Dense(2, name="outer", **ZEROS),
            ]
        ),
    ),
    case("SpectralNormalization", ROWS, layer=keras.layers.Dense(2, **ZEROS)),
    case("RNN", STEPS, cell=keras.layers.LSTMCell(2, **ZEROS_RNN)),
    case("RNN", STEPS, cell=keras.layers.StackedRNNCells(CELLS)),
    case("StackedRNNCells", ROWS, cells=CELLS),
    case("JaxLayer", ROWS, call_fn=affine, params=AFFINE),
]
# Not ours to lay out: variables of TensorFlow and Torch, which no JAX program sees.
FOREIGN = {
    *("IntegerLookup", "StringLookup", "TextVectorization"),
    *("TFSMLayer", "TorchModuleWrapper"),
}

WRITABLE = [each for each in CASES if each.layer != "JaxLayer"]  # Keras cannot write its functions


def over(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("each", cases, ids=[each.layer for each in cases])


def fresh(value: Any) -> Any:
    """The same with layers of its own, since a layer is built once."""
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items()}
    if isinstance(value, list):
        return [fresh(item) for item in value]
    return value.from_config(value.get_config()) if isinstance(value, keras.Layer) else value


def built(each: Case, module: Any = layers, **layouts: Any) -> Any:
    cls = getattr(module, each.layer)
    named = inspect.signature(cls.__init__).parameters
    zeros = {p: "zeros" for p in named if p.endswith("_initializer")}
    layer = cls(**fresh(each.arguments), **zeros, **layouts)
    layer.build(*each.shapes)
    return layer


def some_layout(weight: Any) -> list[str]:
    return ["model", U, U, U, U][: len(weight.shape)]


def asked(layer: Any) -> dict[str, str]:
    """``name -> layout`` for all weights of a layer that some layout was asked for."""
    found = layers.weights_by_name(layer)
    return {n: str(layers.weight_layout(w)) for n, w in found.items() if layers.weight_layout(w)}


def layer_classes() -> dict[str, type[keras.Layer]]:
    found = {n: getattr(keras.layers, n) for n in dir(keras.layers)}
    return {n: c for n, c in found.items() if inspect.isclass(c) and issubclass(c, keras.Layer)}


# Reach


@pytest.mark.full_for("STFTSpectrogram")
@over(CASES)
def test_every_weight_has_a_name_of_its_own(each: Case) -> None:
    layer = built(each, keras.layers)
    found = layers.weights_by_name(layer)
    assert layer.weights
    assert {id(w) for w in found.values()} == {id(w) for w in layer.weights}
    assert len(found) == len(layer.weights)


@pytest.mark.full_for("STFTSpectrogram")
@over(CASES)
def test_a_layout_reaches_exactly_the_weight_it_names(each: Case) -> None:
    for name, weight in layers.weights_by_name(built(each, keras.layers)).items():
        layer = built(each, **{f"{name}_layout": some_layout(weight)})
        assert asked(layer) == {name: str(mw.Layout(some_layout(weight)))}


@pytest.mark.full_for("STFTSpectrogram")
@pytest.mark.parametrize("layer", sorted({each.layer for each in CASES}))
def test_the_signature_names_the_weights_that_the_layer_can_have_and_no_others(layer: str) -> None:
    cls = getattr(layers, layer)
    parameters = inspect.signature(cls).parameters
    shown = {n.removesuffix("_layout") for n in parameters if n.endswith("_layout")}
    if not shown:
        assert "<weight>_layout" in cls.__doc__
        return
    cases = [e for e in CASES if e.layer == layer and "int8" not in str(e.arguments.get("dtype"))]
    real = {name for e in cases for name in layers.weights_by_name(built(e, keras.layers))}
    assert shown == real
    assert all(f"{name}_layout" in cls.__doc__ for name in shown)


def names_used(function: Any) -> set[str]:
    """Every name that a function's code looks up, inner functions included."""
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return names


def makes_weights(cls: type) -> bool:
    for base in cls.__mro__[: cls.__mro__.index(keras.Layer)]:
        for member in vars(base).values():
            function = getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType):
                used = names_used(function)
                inner = [function.__globals__.get(name) for name in used]
                if used & {"add_weight", "add_variable", "Variable"} or any(
                    inspect.isclass(i) and issubclass(i, keras.Layer) and makes_weights(i)
                    for i in inner
                    if i is not keras.Layer
                ):
                    return True
    return False


def test_no_layer_of_keras_that_makes_weights_is_missing() -> None:
    plain = {c for n, c in layer_classes().items() if getattr(layers, n) is c}
    tried = {getattr(keras.layers, each.layer) for each in CASES}
    generated = set(layer_classes().values()) - plain
    foreign = {getattr(keras.layers, name) for name in FOREIGN}
    assert makes_weights(keras.layers.MultiHeadAttention)  # the check can fail
    assert {c.__name__ for c in plain - foreign if makes_weights(c)} == set()
    assert generated - {keras.layers.FlaxLayer} == tried  # a JaxLayer that needs Flax


def test_no_argument_of_keras_ends_as_ours_do() -> None:
    for cls in layer_classes().values():
        parameters = inspect.signature(cls.__init__).parameters
        assert not [p for p in parameters if p.endswith("_layout")]


def test_keras_names_for_one_class_give_one_class_here() -> None:
    assert layers.Convolution2D is layers.Conv2D
    assert layers.Dropout is keras.layers.Dropout
    assert layers.Input is keras.layers.Input
    assert "Dense" in dir(layers)
    with pytest.raises(AttributeError, match="no attribute 'Dens'"):
        _ = layers.Dens


@pytest.mark.parametrize(
    ("each", "alias", "weight"),
    [
        (case("SeparableConv2D", IMAGE, **CONVOLUTION), "depthwise", "depthwise_kernel"),
        (case("SeparableConv2D", IMAGE, **CONVOLUTION), "pointwise", "pointwise_kernel"),
        (case("DepthwiseConv2D", IMAGE, kernel_size=2), "depthwise", "kernel"),
        (case("DepthwiseConv2D", IMAGE, kernel_size=2), "depthwise_kernel", "kernel"),
        (case("LSTM", STEPS, units=2), "recurrent", "recurrent_kernel"),
        (
            case("Bidirectional", STEPS, layer=keras.layers.LSTM(2)),
            "backward_recurrent",
            "backward_recurrent_kernel",
        ),
        (
            case("MultiHeadAttention", STEPS, STEPS, num_heads=2, key_dim=3),
            "attention_output_kernel",
            "output_kernel",
        ),
    ],
)
def test_the_short_names_of_dtensor_mean_one_weight(each: Case, alias: str, weight: str) -> None:
    rank = len(layers.weights_by_name(built(each, keras.layers))[weight].shape)
    layer = built(each, **{f"{alias}_layout": [U] * rank})
    assert list(asked(layer)) == [weight]


def test_a_subclass_may_have_more_weights_and_arguments() -> None:
    class Scaled(layers.Dense):
        def __init__(self, units: int, offset: float = 0.0, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.offset = offset

        def build(self, input_shape: Any) -> None:
            super().build(input_shape)
            self.gain = self.add_weight(shape=(self.units,), name="gain")

    layer = Scaled(4, 1.0, gain_layout=["model"], kernel_layout=[U, "model"])
    layer.build((None, 3))
    assert asked(layer) == {"kernel": "[unsharded, model]", "gain": "[model]"}
    assert list(inspect.signature(Scaled).parameters) == ["units", "offset", "kwargs"]
    with pytest.raises(mw.LayoutError, match=r"no weight 'gian'.*'kernel', 'bias', 'gain'"):
        Scaled(4, gian_layout=["model"]).build((None, 3))


def test_weights_that_quantization_makes_anew_keep_their_layouts() -> None:
    layer = layers.Dense(4, kernel_layout=[U, "model"])
    layer.build((None, 2))
    layer.quantize("int8")
    assert str(layer.kernel.dtype) == "int8"
    assert asked(layer) == {"kernel": "[unsharded, model]"}


# The same as Keras' own


def test_a_layer_is_an_instance_of_keras_class_under_its_name() -> None:
    layer = layers.Dense(3, "relu", kernel_layout=[U, "model"])
    assert isinstance(layer, keras.layers.Dense)
    assert type(layer).__name__ == "Dense"
    assert layer.activation is keras.activations.relu
    assert layers.GroupQueryAttention.__name__ == keras.layers.GroupQueryAttention.__name__


@over(WRITABLE)
def test_without_layouts_a_layer_configures_itself_as_keras_own(each: Case) -> None:
    ours, theirs = (
        getattr(module, each.layer)(**fresh(each.arguments), name="same")
        for module in (layers, keras.layers)
    )
    signature = inspect.signature(type(theirs).__init__).parameters
    named = [p for p in inspect.signature(type(ours)).parameters if not p.endswith("_layout")]
    assert named == list(signature)[1:]
    assert ours.get_config() == theirs.get_config()
    mine, yours = (keras.saving.serialize_keras_object(layer) for layer in (ours, theirs))
    assert mine == yours


def test_outside_a_strategy_a_layer_computes_as_keras_own() -> None:
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
    ours = layers.Dense(3, kernel_layout=[U, "model"], bias_layout=["model"])
    theirs = keras.layers.Dense(3)
    ours.build(x.shape)
    theirs.build(x.shape)
    theirs.set_weights(ours.get_weights())
    np.testing.assert_array_equal(ours(x), theirs(x))


def test_classes_pickle_by_name() -> None:
    for name in ("Dense", "GroupQueryAttention"):
        cls = getattr(layers, name)
        assert pickle.loads(pickle.dumps(cls)) is cls


# Errors


def test_a_misspelt_weight_is_found_when_the_layer_is_made() -> None:
    with pytest.raises(mw.LayoutError, match=r"(?s)Dense has no weight 'kernal'.*'kernel', 'bias'"):
        layers.Dense(3, kernal_layout=[U, "model"])
    with pytest.raises(mw.LayoutError, match=r"(?s)no weight 'kernel'.*'query_kernel'"):
        layers.MultiHeadAttention(2, 3, kernel_layout=[U, U, "model"])


def test_a_misspelt_weight_of_an_inner_layer_is_found_when_it_is_built() -> None:
    layer = layers.Bidirectional(keras.layers.LSTM(2), kernel_layout=[U, "model"])
    with pytest.raises(mw.LayoutError, match=r"no weight 'kernel'; its weights are 'forward_ker"):
        layer.build((None, 5, 4))


def test_a_weight_that_this_configuration_lacks_is_an_error() -> None:
    layer = layers.Dense(3, use_bias=False, bias_layout=["model"], name="last")
    with pytest.raises(mw.LayoutError, match=r"(?s)'last'.*no weight 'bias'; its weights are 'ker"):
        layer.build((None, 4))


def test_all_malformed_layouts_are_told_at_once() -> None:
    with pytest.raises(mw.LayoutError, match=r"(?s)kernel_layout='model'.*bias_layout=3"):
        layers.Dense(3, kernel_layout="model", bias_layout=3)


def test_a_rank_that_does_not_fit_names_layer_weight_shape_and_layout() -> None:
    layer = layers.Dense(3, kernel_layout=["model"], bias_layout=["model", U], name="head")
    with pytest.raises(mw.LayoutError) as caught:
        layer.build((None, 4))
    for fact in ("'head'", "kernel", "(4, 3)", "[model]", "bias", "(3,)", "[model, unsharded]"):
        assert fact in str(caught.value)
    assert asked(layer) == {}


def test_a_weight_laid_out_twice_is_an_error() -> None:
    with pytest.raises(mw.LayoutError, match="weight 'recurrent_kernel' of LSTM is laid out twice"):
        layers.LSTM(2, recurrent_layout=[U, "model"], recurrent_kernel_layout=["model", U])
    inner = layers.Dense(2, kernel_layout=[U, "model"])
    outer = layers.TimeDistributed(inner, kernel_layout=["model", U])
    with pytest.raises(mw.LayoutError, match=r"laid out twice, as \[uns.* and as \[model, uns"):
        outer.build((None, 5, 4))


def test_a_layer_that_was_refused_stays_refused() -> None:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(2, kernel_layout=["model"])

        def call(self, x: Any) -> Any:
            return self.dense(x)

    net = Net()
    for _ in range(2):  # Keras swallows the first failure inside a subclassed model
        with pytest.raises(mw.LayoutError, match="weight 'kernel' has 2 dims"):
            net(np.ones((3, 4), "float32"))


# Copies and wrappers

KERNEL = {"kernel_layout": [U, "model"]}


@over(WRITABLE)
def test_layouts_survive_config(each: Case) -> None:
    found = layers.weights_by_name(built(each, keras.layers))
    layer = built(each, **{f"{n}_layout": some_layout(w) for n, w in found.items()})
    assert len(asked(layer)) == len(found)
    config = json.loads(json.dumps(layer.get_config()))
    again = type(layer).from_config(config)
    again.build(*each.shapes)
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
        for each in (wrapper, again):
            each.build(shape)
            assert asked(each) == {"kernel": "[unsharded, model]"}


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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": "jax"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_saved_model_loads_in_plain_keras_and_computes_the_same(
    tmp_path: Path, model: keras.Model
) -> None:
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(2, 6, 4)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", model.predict(x, verbose=0))
    model.save(tmp_path / "model.keras")
    with_layouts = []
    for each in WRITABLE:
        found = layers.weights_by_name(built(each, keras.layers))
        asks = {f"{name}_layout": some_layout(weight) for name, weight in found.items()}
        with_layouts.append(keras.saving.serialize_keras_object(built(each, **asks)))
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
    for each in (net, again):
        held = {n: w.value.addressable_shards[0].data.shape for n, w in names_in(each).items()}
        assert held["0_forward_recurrent_kernel"] == held["0_backward_recurrent_kernel"] == (2, 4)
        assert held["0_forward_kernel"] == (4, 8)
        assert held["1_kernel"] == (2, 4)


def names_in(model: keras.Sequential) -> dict[str, Any]:
    found = [layers.weights_by_name(layer) for layer in model.layers]
    return {f"{i}_{name}": weight for i, each in enumerate(found) for name, weight in each.items()}
