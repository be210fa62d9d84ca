"""Layouts as arguments of Keras' layers: reach, the same as Keras' own, errors."""

from __future__ import annotations

import inspect
import pickle
import types
from typing import Any

import keras
import numpy as np
import pytest
from keras_layer_cases import (
    CASES,
    CONVOLUTION,
    FOREIGN,
    IMAGE,
    STEPS,
    WRITABLE,
    Case,
    U,
    asked,
    built,
    case,
    fresh,
    layer_classes,
    over,
    some_layout,
)

import meshwright as mw
from meshwright.frontends.keras import layers

# Keras 3.15 turns variables into NumPy arrays in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


# Reach


@pytest.mark.full_for("STFTSpectrogram")
@over(CASES)
def test_every_weight_has_a_name_of_its_own(case: Case) -> None:
    layer = built(case, keras.layers)
    weights = layers.weights_by_name(layer)
    assert layer.weights
    assert {id(w) for w in weights.values()} == {id(w) for w in layer.weights}
    assert len(weights) == len(layer.weights)


@pytest.mark.full_for("STFTSpectrogram")
@over(CASES)
def test_a_layout_reaches_exactly_the_weight_it_names(case: Case) -> None:
    for name, weight in layers.weights_by_name(built(case, keras.layers)).items():
        layer = built(case, **{f"{name}_layout": some_layout(weight)})
        assert asked(layer) == {name: str(mw.Layout(some_layout(weight)))}


@pytest.mark.full_for("STFTSpectrogram")
@pytest.mark.parametrize("layer", sorted({case.layer for case in CASES}))
def test_the_signature_names_the_weights_that_the_layer_can_have_and_no_others(layer: str) -> None:
    cls = getattr(layers, layer)
    parameters = inspect.signature(cls).parameters
    visible = {n.removesuffix("_layout") for n in parameters if n.endswith("_layout")}
    if not visible:
        assert "<weight>_layout" in cls.__doc__
        return
    cases = [e for e in CASES if e.layer == layer and "int8" not in str(e.arguments.get("dtype"))]
    real = {name for e in cases for name in layers.weights_by_name(built(e, keras.layers))}
    assert visible == real
    assert all(f"{name}_layout" in cls.__doc__ for name in visible)


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
    tried = {getattr(keras.layers, case.layer) for case in CASES}
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
    ("case", "alias", "weight"),
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
def test_the_short_names_of_dtensor_mean_one_weight(case: Case, alias: str, weight: str) -> None:
    rank = len(layers.weights_by_name(built(case, keras.layers))[weight].shape)
    layer = built(case, **{f"{alias}_layout": [U] * rank})
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
def test_without_layouts_a_layer_configures_itself_as_keras_own(case: Case) -> None:
    ours, theirs = (
        getattr(module, case.layer)(**fresh(case.arguments), name="same")
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
