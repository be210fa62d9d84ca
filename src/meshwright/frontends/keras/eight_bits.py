"""A Keras model whose kernels Keras keeps as eight bits, each with a scale for every output."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import keras

from ... import _compat
from ...data import put
from ...errors import ModelError
from ...program import TrainState
from .abstract import AbstractRoom, is_abstract
from .checkpoint_names import LastingNames
from .hooks import Hooks
from .pending import give
from .program import KerasVariables
from .quantized import KERNELS

if TYPE_CHECKING:
    from .sharded import Sharded

_SCALE = "_scale"
_FROZEN_BY_PYTHON = 10_000  # objects at most, with which Python 3.12 begins; JAX alone has more


def fresh_copy(model: keras.Model) -> Callable[[], keras.Model]:
    """Makes the model once more, as shapes only, from its configuration."""

    def make() -> keras.Model:
        with AbstractRoom().open():
            return type(model).from_config(model.get_config())

    return make


def made_of(name: str) -> tuple[str, ...]:
    """The lasting names of what Keras quantizes together to the variable of this name, some of
    which a layer may lack; any other variable stays as it is.

    >>> made_of("head/kernel_scale"), made_of("head/bias")
    (('head/kernel', 'head/embeddings', 'head/reverse_embeddings'), ('head/bias',))
    """
    layer, slash, own = name.rpartition("/")
    if own.removesuffix(_SCALE) not in KERNELS:
        return (name,)
    return tuple(f"{layer}{slash}{kernel}" for kernel in KERNELS)


def quantized(
    strategy: Sharded, make: Callable[[], keras.Model], state: TrainState, names: LastingNames
) -> dict[str, Any]:
    """Arrays by lasting name: these values, in their own dims, quantized by Keras to eight bits.

    ``names`` are the lasting names of the paths in ``state``, which may hold a part of the model.
    Kernels are quantized where they lie.
    """
    with _sparing_the_collector():
        return _quantized(strategy, make(), state, names)


def _quantized(
    strategy: Sharded, model: keras.Model, state: TrainState, names: LastingNames
) -> dict[str, Any]:
    variables = KerasVariables.of(model).under(strategy.placement)
    theirs = LastingNames.of(model, variables)
    by_name = {
        own[path]: value
        for own, values in zip(names.of_parts, state, strict=False)
        for path, value in values.items()
    }
    for part, its in zip((variables.params, variables.state), theirs.of_parts, strict=False):
        for path, variable in part.items():
            if (value := by_name.get(its[path])) is not None:
                give(variable, value, value.sharding)
    with strategy.in_force(model), _on_a_device_of(strategy), _quietly():
        model.quantize("int8", filters=_has_kernels)
        with _quantizing_shapes():
            model.quantize("int8", filters=lambda layer: not _has_kernels(layer))
    return _laid_out(strategy, model)


def _laid_out(strategy: Sharded, model: keras.Model) -> dict[str, Any]:
    """The arrays of a model as a strategy lays them out, of those variables that have any."""
    variables = KerasVariables.of(model)
    names = LastingNames.of(model, variables).of_parts
    shardings = {id(v): entry.unpadded.sharding for v, entry in strategy._placed(model)}
    return {
        its[path]: put(_compat.raw_value(variable), shardings[id(variable)])
        for part, its in zip((variables.params, variables.state), names, strict=False)
        for path, variable in part.items()
        if not is_abstract(variable)
    }


def _has_kernels(layer: Any) -> bool:
    """Whether what Keras quantizes of a layer has values."""
    own = _compat.own_variables(layer)
    return not any(is_abstract(variable) for variable in own if variable.name in KERNELS)


@contextlib.contextmanager
def _on_a_device_of(strategy: Sharded) -> Iterator[None]:
    """What Keras makes lies on a device of the strategy until it is laid out."""
    devices = strategy.mesh.devices or ()
    here = next((d for d in devices if d.process_index == jax.process_index()), None)
    with jax.default_device(here) if here is not None else contextlib.nullcontext():
        yield


def quantized_shapes(
    model: keras.Model, example: Any = None, make: Callable[[], keras.Model] | None = None
) -> keras.Model:
    """A model of shapes only that is what Keras makes of this one by ``quantize("int8")``.

    ``make`` makes the model once more, as shapes only, in place of its configuration. Raises
    :class:`ModelError` for a model that cannot be made again, or that is quantized already.
    """
    _compat.install_keras_hooks(Hooks())
    opening = f"precision='int8' is not supported for model {model.name!r}"
    with _sparing_the_collector(), _quantizing_shapes(), _quietly():
        try:
            copy = (make or fresh_copy(model))()
        except (NotImplementedError, TypeError) as error:
            raise ModelError(
                f"{opening}, which Keras cannot make again from get_config(): {error}"
            ) from error
        if not _compat.is_built(copy) and example is not None:
            _compat.build_forward(copy, example)
        try:
            copy.quantize("int8")
        except ValueError as error:
            raise ModelError(f"{opening}: {error}") from error
    return copy


class _EightBitsRoom(AbstractRoom):
    """Forgets what is assigned: zeros in place of quantized values."""

    def keeps(self, variable: Any, value: Any) -> bool:
        del variable, value
        return True


@contextlib.contextmanager
def _quantizing_shapes() -> Iterator[None]:
    """While the block runs, what Keras makes and quantizes is shapes only."""
    with _EightBitsRoom().open(), _compat.quantizing_shapes():
        yield


@contextlib.contextmanager
def _sparing_the_collector() -> Iterator[None]:
    """Keras collects garbage for each weight that it replaces: it looks at new objects only.

    What was there before is left out, with JAX and Keras themselves, unless a part of it is left
    out already: a server's, which would never get rid of its last version.
    """
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without Keras' warning that other layers stay as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
