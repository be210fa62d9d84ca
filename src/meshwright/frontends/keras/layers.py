"""Keras' own layers, each with an argument ``<weight>_layout`` for every weight it has.

``mw.keras.layers`` replaces ``keras.layers``: layers with weights are subclasses, generated from
Keras' classes on first access; everything else is Keras' own. The arguments are those of
TensorFlow DTensor's Keras layers, named after the weights.

A model saved with them is an ordinary Keras file: it names Keras' classes and loads without
Meshwright. The layouts travel inside a layer's ``dtype`` entry, the one place in every layer's
configuration where Keras passes over what it does not know; where this module is imported, a
``.keras`` file brings them back. The legacy ``.h5`` format brings back Keras' own layers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import keras

from ... import _compat
from ...errors import LayoutError
from ...layouts.layout import Layout, as_layout
from .paths import set_weight_layout as set_weight_layout
from .paths import weight_layout as weight_layout
from .quantized import KERNELS

_ENDING = "_layout"
_CARRIED = "meshwright_layouts"

# The weights that Keras 3.15's layers can have; the tests build every layer and hold it to this.
# Where it is empty, the weights are those of the layers inside.
_PROJECTIONS = [
    f"{part}_{weight}"
    for part in ("query", "key", "value", "output", "gate")
    for weight in ("kernel", "bias")
]
_FAMILIES = {
    "kernel bias lora_kernel_a lora_kernel_b": "Dense EinsumDense Conv1D Conv2D Conv3D",
    "kernel bias": (
        "Conv1DTranspose Conv2DTranspose Conv3DTranspose DepthwiseConv1D DepthwiseConv2D"
    ),
    "depthwise_kernel pointwise_kernel bias": "SeparableConv1D SeparableConv2D",
    "kernel recurrent_kernel bias": (
        "SimpleRNN SimpleRNNCell GRU GRUCell LSTM LSTMCell ConvLSTM1D ConvLSTM2D ConvLSTM3D"
    ),
    "embeddings lora_embeddings_a lora_embeddings_b": "Embedding",
    "embeddings reverse_embeddings lora_embeddings_a lora_embeddings_b": "ReversibleEmbedding",
    "gamma beta moving_mean moving_variance moving_stddev renorm_mean renorm_stddev": (
        "BatchNormalization"
    ),
    "gamma beta": "LayerNormalization GroupNormalization",
    "scale": "RMSNormalization AdditiveAttention",
    "scale concat_score_weight": "Attention",
    " ".join(_PROJECTIONS): "MultiHeadAttention GroupQueryAttention",
    "alpha": "PReLU",
    "mean variance count": "Normalization",
    "real_kernel imag_kernel": "STFTSpectrogram",
    "": (
        "Wrapper Bidirectional TimeDistributed SpectralNormalization RNN StackedRNNCells "
        "JaxLayer FlaxLayer"
    ),
}
_WEIGHTS = {
    layer: tuple(weights.split())
    for weights, layers in _FAMILIES.items()
    for layer in layers.split()
}
# Shorter and other names that people know, each with what it may stand for; the first that the
# layer has is meant. TensorFlow DTensor says depthwise, pointwise and recurrent.
_ALIASES = {
    "depthwise": ("depthwise_kernel", "kernel"),
    "depthwise_kernel": ("kernel",),
    "pointwise": ("pointwise_kernel",),
    "recurrent": ("recurrent_kernel",),
    "attention_output_kernel": ("output_kernel",),
    "attention_output_bias": ("output_bias",),
}


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(keras.layers, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(keras.layers, name)
    return _generated(attribute) if _public_name(attribute) in _WEIGHTS else attribute


def __dir__() -> list[str]:
    public = (name for name in dir(keras.layers) if not name.startswith("_"))
    return sorted({"set_weight_layout", "weight_layout", "weights_by_name", *public})


def weights_by_name(layer: keras.layers.Layer) -> dict[str, Any]:
    """Every weight of a built layer, by the name that its ``_layout`` argument begins with.

    A weight goes by its own name. One inside an inner layer has the inner layer's attribute before
    it (``query_kernel``, ``forward_bias``), except where there is but one inside (``cell``,
    ``layer``).

    >>> import keras
    >>> layer = keras.layers.Bidirectional(keras.layers.GRU(2, use_bias=False))
    >>> layer.build((None, 3, 4))
    >>> for name, weight in weights_by_name(layer).items():
    ...     print(name, weight.shape)
    forward_kernel (4, 6)
    forward_recurrent_kernel (2, 6)
    backward_kernel (4, 6)
    backward_recurrent_kernel (2, 6)
    """
    names = {id(variable): either for *either, variable in _walk(layer, "", {id(layer)})}
    by_name: dict[str, Any] = {}
    for weight in layer.weights:
        # What hangs on no attribute has only its path.
        choices = [*names.get(id(weight), ()), weight.path.replace("/", "_")]
        by_name[next((name for name in choices if name not in by_name), choices[-1])] = weight
    return by_name


# The generated classes


class _LaidOut(keras.layers.Layer):
    """What all generated classes have in common: they take layouts, keep them and ask for them."""

    _plain: ClassVar[type[keras.layers.Layer]]
    _weight_names: ClassVar[tuple[str, ...]] = ()
    _meshwright_layouts: dict[str, Layout]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        layer = super().__new__(cls, *args, **kwargs)
        # Around the instance's build, as Keras itself does: so weights that a subclass makes in its
        # own build, after this class's, are there as well.
        layer.build = _then_asking(layer, layer.build)
        return layer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        layouts = _pop_layouts(kwargs, type(self).__name__)
        # Past Keras' tracking, which would make a tracked container of it and lock it.
        object.__setattr__(self, "_meshwright_layouts", layouts)
        super().__init__(*args, **kwargs)
        if _is_generated(type(self)) and self._weight_names and self.quantization_mode is None:
            resolved = _resolved(layouts, self._weight_names, type(self).__name__)
            object.__setattr__(self, "_meshwright_layouts", resolved)

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        weight = super().add_weight(*args, **kwargs)
        layout = self._meshwright_layouts.get(weight.name) if self.built else None
        if layout is not None and not _is_packed(weight, layout):  # by enable_lora or quantize
            _ask(self, {weight.name: weight}, only={weight.name})
        return weight

    def quantize(self, mode: Any = None, type_check: bool = True, config: Any = None) -> Any:
        # Keras refuses subclasses, which may compute something else; a generated one does not.
        check = type_check and not _is_generated(type(self))
        return super().quantize(mode, type_check=check, config=config)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        if self._meshwright_layouts:
            texts = {name: str(layout) for name, layout in self._meshwright_layouts.items()}
            config["dtype"] = {**config["dtype"], _CARRIED: texts}
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        texts = _carried(config)
        if texts:
            dtype = {key: value for key, value in config["dtype"].items() if key != _CARRIED}
            layouts = {name + _ENDING: Layout.from_string(text) for name, text in texts.items()}
            config = {**config, "dtype": dtype, **layouts}
        return super().from_config(config, *args, **kwargs)


def _is_packed(weight: Any, layout: Layout) -> bool:
    """Whether a kernel has lost dims in quantization; see ``quantized.py`` for how it lies."""
    return weight.name in KERNELS and len(weight.shape) < layout.rank


def _then_asking(layer: Any, build: Callable[..., None]) -> Callable[..., None]:
    """A layer's ``build`` which then asks for the layouts."""
    refused = False

    @functools.wraps(build)
    def build_and_ask(*args: Any, **kwargs: Any) -> None:
        nonlocal refused
        if not refused:
            build(*args, **kwargs)
        try:
            _ask(layer, weights_by_name(layer) if layer._meshwright_layouts else {})
        except LayoutError:
            # Keras passes over a failed first attempt to build a subclassed model. A layer that
            # counted as built would then go on without its layouts.
            layer.built, refused = False, True
            raise

    return build_and_ask


class _Signature:
    """The signature of whichever class it is looked up on; a subclass's own ``__init__`` counts."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@functools.cache
def _generated(plain: Any) -> type[_LaidOut]:
    """The subclass of one of Keras' layers that takes layouts."""
    public = _public_name(plain)
    members = {
        "__module__": __name__,
        "__qualname__": public,
        "__doc__": f"{inspect.getdoc(plain)}\n\n{_documented(_WEIGHTS[public])}",
        "__init__": _documented_init(plain, _WEIGHTS[public]),
        "__signature__": _Signature(),
        "_plain": plain,
        "_weight_names": _WEIGHTS[public],
    }
    # Keras finds weights in a file by the class's __name__, so that must stay.
    generated = type(plain.__name__, (_LaidOut, plain), members)
    _compat.write_as_keras_name(generated, f"keras.layers.{public}")
    return generated


def _is_generated(cls: type) -> bool:
    """Whether a class is one of ours, and not a user's subclass of it."""
    return "_plain" in vars(cls)


def _public_name(plain: Any) -> str:
    """The name of a class in ``keras.layers``, aliases undone; empty if it has none there."""
    return _compat.keras_name(plain).removeprefix("keras.layers.")


def _documented_init(plain: Any, weights: tuple[str, ...]) -> Any:
    @functools.wraps(plain.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _LaidOut.__init__(self, *args, **kwargs)

    signature = inspect.signature(plain.__init__)
    parameters = list(signature.parameters.values())
    rest = [parameters.pop()] if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    layouts = [
        inspect.Parameter(name + _ENDING, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in weights
    ]
    # setattr, since functions are not declared to have it.
    setattr(init, "__signature__", signature.replace(parameters=[*parameters, *layouts, *rest]))  # noqa: B010
    return init


def _documented(weights: tuple[str, ...]) -> str:
    which = "\n".join(f"    {name}{_ENDING}" for name in weights) or (
        "    `<weight>_layout` for each weight of the layers inside, such as\n"
        "    `kernel_layout` or, for `Bidirectional`, `forward_kernel_layout`"
    )
    return (
        "Layouts (Meshwright): how each weight lies on the mesh of the strategy in whose scope\n"
        'the layer is built, such as `[mw.UNSHARDED, "model"]`; one entry per dim of the weight.\n'
        f"{which}\n"
    )


# Layouts as arguments


def _pop_layouts(kwargs: dict[str, Any], owner: str) -> dict[str, Layout]:
    """Take the layouts out of a layer's arguments. Raises :class:`LayoutError` if malformed."""
    layouts, faults = {}, []
    for key in [key for key in kwargs if key.endswith(_ENDING)]:
        value = kwargs.pop(key)
        try:
            if value is not None:
                layouts[key.removesuffix(_ENDING)] = as_layout(value)
        except LayoutError as error:
            faults.append(f"{owner}({key}={value!r}): {error}")
    if faults:
        raise LayoutError("\n".join(faults))
    return layouts


def _resolved(layouts: dict[str, Layout], names: tuple[str, ...], owner: str) -> dict[str, Layout]:
    """The layouts under the weights' own names. Raises :class:`LayoutError` for unknown ones."""
    resolved: dict[str, Layout] = {}
    faults = []
    for name, layout in layouts.items():
        weight = _weight_called(name, names)
        if weight is None:
            faults.append(f"{owner} has no weight {name!r}, so it takes no {name}{_ENDING}.")
        elif resolved.setdefault(weight, layout) != layout:
            faults.append(_twice(f"weight {weight!r} of {owner}", resolved[weight], layout))
    if faults:
        faults.append(f"Its weights are {_listed(names)}; write {names[0]}{_ENDING}=[...].")
        raise LayoutError("\n".join(faults))
    return resolved


def _weight_called(name: str, names: Any) -> str | None:
    """The weight that a name means, by itself or by an alias."""
    if name in names:
        return name
    for alias, meanings in _ALIASES.items():
        if name == alias or name.endswith(f"_{alias}"):
            for meaning in meanings:
                candidate = name.removesuffix(alias) + meaning
                if candidate in names:
                    return candidate
    return None


def _ask(layer: _LaidOut, weights: Mapping[str, Any], only: set[str] | None = None) -> None:
    """Note each layout of a built layer on its weight; all faults at once, and then nothing."""
    pairs: list[tuple[Any, Layout]] = []
    faults = []
    for name, layout in layer._meshwright_layouts.items():
        if only is not None and name not in only:
            continue
        weight = weights.get(_weight_called(name, weights) or "")
        fault = _fault(name, layout, weight, weights)
        if fault is None:
            pairs.append((weight, layout))
        else:
            faults.append(f"  {name}{_ENDING}: {fault}")
    if faults:
        kind = type(layer).__name__
        raise LayoutError(
            f"layer {layer.name!r} ({kind}) cannot lay its weights out.\n" + "\n".join(faults)
        )
    for weight, layout in pairs:
        set_weight_layout(weight, layout)


def _fault(name: str, layout: Layout, weight: Any, weights: Mapping[str, Any]) -> str | None:
    if weight is None:
        has = f"its weights are {_listed(weights)}" if weights else "it has no weights"
        return f"as it is configured, the layer has no weight {name!r}; {has}."
    if layout.rank != len(weight.shape):
        return "; ".join(layout.faults(tuple(weight.shape), f"weight {name!r}"))
    before = weight_layout(weight)
    if before is not None and before != layout:
        return _twice(f"weight {name!r}", before, layout)
    return None


def _twice(what: str, first: Layout, second: Layout) -> str:
    return f"{what} is laid out twice, as {first} and as {second}. Keep one."


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))


# Weights by name


def _walk(owner: Any, prefix: str, visited: set[int]) -> Iterator[tuple[str, str, Any]]:
    """``(name, name by attribute, variable)`` for all variables inside a layer or container."""
    of_layer = isinstance(owner, keras.layers.Layer)
    for attribute, value in _members(owner):
        if id(value) in visited:
            continue
        by_attribute = f"{prefix}{attribute.lstrip('_')}"
        if isinstance(value, keras.Variable):
            visited.add(id(value))
            yield (prefix + value.name if of_layer else by_attribute), by_attribute, value
        elif isinstance(value, keras.layers.Layer | Mapping | list | tuple):
            visited.add(id(value))
            yield from _walk(value, prefix + _prefix_of(attribute), visited)


def _members(owner: Any) -> list[tuple[str, Any]]:
    if isinstance(owner, keras.Model):
        return [(layer.name, layer) for layer in owner.layers]
    if isinstance(owner, keras.layers.Layer):
        return [pair for pair in vars(owner).items() if pair[0] not in _bookkeeping()]
    pairs = owner.items() if isinstance(owner, Mapping) else enumerate(owner)
    return [(str(key), value) for key, value in pairs]


def _prefix_of(attribute: str) -> str:
    """What an inner layer's attribute adds before the names of its weights."""
    name = attribute.lstrip("_").removesuffix("_dense").removesuffix("_layer")
    return "" if name in ("cell", "layer") else f"{name}_"


@functools.cache
def _bookkeeping() -> frozenset[str]:
    """The attributes that any layer has, where Keras lists the same weights once more."""
    return frozenset(vars(keras.layers.Layer(name="bare")))


# Files


class _AsWritten:
    """What Keras finds when it reads a layer's name: its own class, or ours where layouts came."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def from_config(self, config: dict[str, Any]) -> keras.layers.Layer:
        cls = _generated(self._plain) if _carried(config) else self._plain
        return cls.from_config(config)


def _carried(config: Mapping[str, Any]) -> dict[str, str]:
    dtype = config.get("dtype")
    return dtype.get(_CARRIED, {}) if isinstance(dtype, Mapping) else {}


for _public in _WEIGHTS:  # Keras asks these when it reads the name of a layer that can have layouts
    _compat.read_keras_name_as(
        f"keras.layers.{_public}", _AsWritten(getattr(keras.layers, _public))
    )
