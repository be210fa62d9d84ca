"""The paths of a Keras model's variables, in every spelling that a pattern may use.

Keras 3 keeps no attribute names in ``variable.path`` (``self.feature = Dense()`` gives
``dense/kernel``), while people know their models by attributes. So the model is walked, and each
variable gets the path of attributes (``blocks.0.kernel``), the path of layer names, and Keras' own
path, all relative to the model.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp  # knows bfloat16 and the eight-bit floats, which NumPy alone does not
import keras
import numpy as np

from ... import _compat
from ...layouts.layout import Layout
from ...layouts.params import Follows, ParamInfo, Role
from .quantized import companions

Named = Callable[[Any], Iterator[tuple[str, Any]]]  # the layers that a model knows by name

# What Keras keeps on layers for itself: the same variables again, under generated names.
_KERAS_OWN = {
    "_layers",
    "_metrics",
    "_operations",
    "_operations_by_depth",
    "_nodes_by_depth",
    "_seed_generators",
    "_trainable_variables",
    "_non_trainable_variables",
    "_tracker",
    "_functional",
    "_loss_tracker",
    "_compile_metrics",
    "_compile_loss",
    "_optimizer",
    "optimizer",
}


def model_infos(model: keras.Model) -> dict[int, ParamInfo]:
    """``id(variable)`` -> description, for every weight and seed of a model, in Keras' order.

    The first attribute path, in breadth-first order, is a variable's ``path``.
    """
    spellings_of, lasting = _spellings(model), _walked(model, _counted_children)
    infos: dict[int, ParamInfo] = {}
    others: set[str] = set()
    lasts: set[str] = set()
    for variable in model.variables:
        spellings = spellings_of.get(id(variable), {})
        keras_path = _relative(variable.path, model.name)
        spellings = {**spellings, keras_path: None}
        path = unique(next(iter(spellings)), others)
        others.add(path)
        again = unique(lasting.get(id(variable), path), lasts)
        lasts.add(again)
        info = _info(variable, path, tuple({**spellings, again: None}), _role(variable))
        infos[id(variable)] = replace(info, lasting=again)
    return infos | _followers(model, infos)


def _followers(model: keras.Model, infos: dict[int, ParamInfo]) -> dict[int, ParamInfo]:
    """The descriptions, once more, of variables that lie as a quantized layer's kernel does."""
    followers: dict[int, ParamInfo] = {}
    for layer in _compat.layers_inside(model):
        for variable, kernel, dims, along in companions(layer):
            info, owner = infos.get(id(variable)), infos.get(id(kernel))
            if info is not None and owner is not None:
                layout = getattr(layer, "_meshwright_layouts", {}).get(kernel.name)
                follows = Follows(owner.path, owner.spellings, dims, along, layout or owner.asked)
                followers[id(variable)] = replace(info, follows=follows)
    return followers


def slot_info(slot: Any, parameter: Any | None, owner: ParamInfo | None) -> ParamInfo:
    """The description of an optimizer's variable, and of the parameter it belongs to, if any.

    Keras calls the momentum of ``net/hidden/kernel`` ``adam/net_hidden_kernel_momentum``; here it
    is ``adam/hidden/kernel/momentum``.
    """
    info = _info(slot, slot.path, (slot.path,), "slot")
    if parameter is None or owner is None:
        return info
    optimizer = slot.path.removesuffix(slot.name)
    kind = slot.name.removeprefix(parameter.path.replace("/", "_") + "_")
    return replace(info, path=f"{optimizer}{owner.path}/{kind}", owner=owner.path)


def other_info(variable: Any, role: Role) -> ParamInfo:
    """The description of a variable that belongs to no model: a metric's, or a lone layer's."""
    return _info(variable, variable.path, (variable.path,), role)


def distinct(info: ParamInfo, others: set[str]) -> ParamInfo:
    """The description under a path that no other variable has; notes it in ``others``.

    Keras calls every factored slot of Adafactor after its weight alone: ``adafactor/kernel``.
    """
    info = replace(info, path=unique(info.path, others))
    others.add(info.path)
    return info


def _info(variable: Any, path: str, spellings: tuple[str, ...], role: Role) -> ParamInfo:
    dtype = _compat.stored_dtype(variable)
    return ParamInfo(
        path=path,
        spellings=spellings,
        dims=tuple(variable.shape),
        dtype=dtype,
        itemsize=_itemsize(dtype),
        role=role,
        asked=weight_layout(variable),
    )


def _itemsize(dtype: str) -> int:
    if dtype == "bool":
        return 1
    return np.dtype(getattr(jnp, dtype)).itemsize


def _role(variable: Any) -> Role:
    if variable.name == "seed_generator_state":
        return "seed"
    return "parameter" if variable.trainable else "state"


def _relative(path: str, model_name: str) -> str:
    return path.removeprefix(f"{model_name}/")


def unique(path: str, others: set[str]) -> str:
    """The path itself, or with a number where Keras gave two variables the same."""
    if path not in others:
        return path
    number = 2
    while f"{path}#{number}" in others:
        number += 1
    return f"{path}#{number}"


def lasting_paths(model: keras.Model) -> dict[int, str]:
    """``id(variable)`` -> a path that is the same whenever and wherever the model is built.

    Keras counts the layers that it names itself through the whole process: a second model has a
    ``dense_2`` where the first had ``dense``. Here they count within what holds them.
    """
    return _walked(model, _lasting_children)


def _walked(
    model: keras.Model, named: Callable[[Any], Iterator[tuple[str, Any]]]
) -> dict[int, str]:
    """``id(variable)`` -> the first path, breadth-first, with layers called as ``named`` does."""
    paths: dict[int, str] = {}
    waiting: list[tuple[Any, str, frozenset[int]]] = [(model, "", frozenset())]
    while waiting:
        layer, path, above = waiting.pop(0)
        for name, child in (*named(layer), *_attributes(layer)):
            if isinstance(child, keras.Variable):
                paths.setdefault(id(child), _join(path, name))
            elif id(child) not in above:
                waiting.append((child, _join(path, name), above | {id(layer)}))
    return paths


def lasting_name(thing: Any) -> str:
    """The name of a layer, an optimizer or a metric, without the number that Keras put behind it.

    >>> import keras
    >>> [lasting_name(keras.layers.LayerNormalization(name=n)) for n in ("first_1", None)]
    ['first_1', 'layer_normalization']
    """
    return re.sub(r"_\d+$", "", thing.name) if _is_made_up(thing) else thing.name


def _is_made_up(thing: Any) -> bool:
    """Whether Keras chose the name, after the class."""
    begin = re.sub(r"_\d+$", "", thing.name)
    return begin.replace("_", "") == type(thing).__name__.lower().lstrip("_")


def _lasting_children(layer: Any) -> Iterator[tuple[str, Any]]:
    others: set[str] = set()
    for _, child in _named_children(layer):
        base = lasting_name(child)
        names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(1)))
        name = next(name for name in names if name not in others)
        others.add(name)
        yield name, child


def _counted_children(layer: Any) -> Iterator[tuple[str, Any]]:
    """Layers that Keras named itself are ``dense#0``, ``dense#1``, ...: no layer is called so, and
    no pattern for a name of Keras' finds another layer by that."""
    counts: Counter[str] = Counter()
    for name, child in _named_children(layer):
        if _is_made_up(child):
            base = lasting_name(child)
            name = f"{base}#{counts[base]}"
            counts[base] += 1
        yield name, child


def layer_spellings(model: keras.Model) -> dict[str, tuple[str, ...]]:
    """Keras' path of each layer -> its paths by attributes and by layer names."""
    spellings: dict[str, dict[str, None]] = {}
    for child, by_attribute, by_name in _walk(model):
        if isinstance(child, keras.Layer) and child.path is not None:
            relative = _relative(child.path, model.name)
            spellings.setdefault(child.path, {}).update(
                {by_attribute: None, by_name: None, relative: None}
            )
    return {path: tuple(spellings) for path, spellings in spellings.items()}


def block_paths(model: keras.Model) -> frozenset[str]:
    """Keras' paths of the outermost layers that are not models: what users call blocks."""
    paths: set[str] = set()
    waiting = list(model.layers)
    while waiting:
        layer = waiting.pop()
        if isinstance(layer, keras.Model):
            waiting += layer.layers
        elif layer.path is not None:
            paths.add(layer.path)
    return frozenset(paths)


def _spellings(model: keras.Model) -> dict[int, dict[str, None]]:
    """``id(variable)`` -> its paths by attributes and by layer names, in breadth-first order."""
    spellings: dict[int, dict[str, None]] = {}
    for child, by_attribute, by_name in _walk(model):
        if isinstance(child, keras.Variable):
            spellings.setdefault(id(child), {}).update({by_attribute: None, by_name: None})
    return spellings


def _walk(model: keras.Model) -> Iterator[tuple[Any, str, str]]:
    """``(layer or variable, path by attributes, path by names)``, breadth-first."""
    waiting: list[tuple[Any, str, str, frozenset[int]]] = [(model, "", "", frozenset())]
    while waiting:
        layer, by_attribute, by_name, above = waiting.pop(0)
        for attribute, child in _children(layer):
            attribute_path = _join(by_attribute, attribute)
            name_path = _join(by_name, child.name)
            if id(child) in above:  # a layer may hold one that holds it
                continue
            yield child, attribute_path, name_path
            if not isinstance(child, keras.Variable):
                waiting.append((child, attribute_path, name_path, above | {id(layer)}))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _children(layer: Any) -> Iterator[tuple[str, Any]]:
    """The layers, seed generators and variables right inside a layer, with their names there."""
    own_attributes = _attributes(layer)
    yield from _named_children(layer)
    yield from own_attributes


def _named_children(layer: Any) -> Iterator[tuple[str, Any]]:
    """The layers that a Sequential or Functional model knows by their own names."""
    if isinstance(layer, keras.Sequential) or _is_functional(layer):
        for child in layer.layers:
            yield child.name, child


def _attributes(layer: Any) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(vars(layer).items()):
        if attribute not in _KERAS_OWN and _kind(value.__class__):
            yield from _members(attribute.lstrip("_"), value)


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    match _kind(value.__class__):
        case "part":
            yield name, value
        case "mapping":
            for key, item in value.items():
                yield from _members(f"{name}/{key}", item)
        case "sequence":
            for index, item in enumerate(value):
                yield from _members(f"{name}/{index}", item)


@functools.lru_cache(maxsize=4096)  # a model has far more attributes than kinds of them
def _kind(of: type) -> str:
    if issubclass(of, keras.Variable | keras.random.SeedGenerator | keras.Layer):
        return "part"
    if issubclass(of, Mapping):
        return "mapping"
    return "sequence" if issubclass(of, list | tuple | set) else ""


def _is_functional(layer: Any) -> bool:
    return isinstance(layer, keras.Model) and hasattr(layer, "output_names")


def set_weight_layout(variable: Any, layout: Layout) -> None:
    """Note the layout that a layer of ``mw.keras.layers`` was given for a weight."""
    variable._meshwright_layout = layout


def weight_layout(variable: Any) -> Layout | None:
    """The layout that was noted on a weight, if any."""
    return getattr(variable, "_meshwright_layout", None)
