"""A Keras model as it is served: its forward pass under a strategy, whether or not it has values.

The model itself is left as it is: where its variables lie, and what they hold, does not change.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from ... import _compat
from ...errors import CheckpointError, ModelError
from ...program import Program, TrainState
from ...step.assemble import Assembly, assemble
from ..inputs import Input, inputs_like, leaf_names, named
from .abstract import AbstractRoom, is_abstract
from .checkpoint_names import LastingNames
from .hooks import Hooks, lying
from .host_layers import check_traceable
from .pending import initial_value, is_pending, settle
from .program import KerasVariables, keras_program

if TYPE_CHECKING:
    from .sharded import Sharded

_NAMED_BY_KERAS = re.compile(r"(keras_tensor|input_layer|input)(_\d+)?")


@dataclass(frozen=True, eq=False)
class KerasForward:
    """The forward pass of one model under a strategy.

    ``like`` has an :class:`~meshwright.frontends.inputs.Input` for each array that the model takes,
    and ``outputs`` the names of what comes out, where they are known.
    """

    steps: Assembly
    names: LastingNames
    variables: KerasVariables
    like: Any
    outputs: tuple[str, ...]

    @property
    def own_dtypes(self) -> dict[str, str]:
        """The dtypes of the model's own variables by path, in which training saves them."""
        v = self.variables
        return {path: _compat.stored_dtype(x) for p in (v.params, v.state) for path, x in p.items()}

    def values(self, host_values: Mapping[int, np.ndarray] | None = None) -> TrainState:
        """Parameters and state in their own dims: the model's arrays, or host arrays by variable.

        Raises :class:`ModelError` for a model of shapes only.
        """
        v = self.variables

        def value(variable: Any) -> Any:
            if host_values is not None and id(variable) in host_values:
                return host_values[id(variable)]
            if host_values is not None and is_pending(variable):
                return np.asarray(initial_value(variable))  # of a seed: files keep none
            settle(variable)
            return _compat.raw_value(variable)

        params, state = (
            {path: value(x) for path, x in part.items()} for part in (v.params, v.state)
        )
        return TrainState(params, state, {}, {})


def forward_of(
    strategy: Sharded,
    model: keras.Model,
    example: Any = None,
    dtype: str | None = None,
    altered: Callable[[Program, KerasVariables], Program] | None = None,
) -> KerasForward:
    """The forward pass of a model, which ``example`` inputs build where that is not done yet.

    ``dtype`` is the floating-point type that its layers compute in and parameters are kept in.
    ``altered`` changes the program before its steps are put together.
    Raises :class:`ModelError` where it cannot be built, or the shapes of inputs are not known.
    """
    _compat.install_keras_hooks(Hooks())
    check_traceable(model)
    if not _compat.has_its_variables(model):
        with strategy.in_force(model), AbstractRoom().open():
            if example is not None:
                _compat.build_forward(model, example)
            elif not _compat.build_as_declared(model):
                raise ModelError(
                    f"model {model.name!r} is not built: pass example=, inputs of any number of "
                    "rows."
                )
    strategy._inspect(model)
    variables = KerasVariables.of(model).under(strategy.placement)

    @contextlib.contextmanager
    def in_force() -> Iterator[None]:
        placed = strategy._placed(model)
        with strategy.in_force(model), lying(placed), _computing_in(model, dtype):
            yield

    program = _forward_only(keras_program(model, variables, in_force), dtype)
    if altered is not None:
        program = altered(program, variables)
    return KerasForward(
        assemble(program, strategy.placement),
        LastingNames.of(model, variables),
        variables,
        _like(model, example),
        _output_names(model),
    )


def _forward_only(program: Program, dtype: str | None) -> Program:
    """The program without optimizer and metrics, and with parameters of another type."""
    params = program.params
    if dtype is not None:
        is_float = [jax.numpy.issubdtype(info.dtype, jax.numpy.floating) for info in params]
        params = tuple(
            replace(info, dtype=dtype, itemsize=2) if floats else info
            for info, floats in zip(params, is_float, strict=True)
        )
    predict = program.predict
    assert predict is not None

    def in_own_types(params: Any, state: Any, batch: Any) -> Any:
        outputs, new = predict(params, state, batch)
        single = jax.tree.map(lambda x: x.astype("float32") if x.dtype == dtype else x, outputs)
        return single, new

    served = predict if dtype is None else in_own_types
    return replace(program, params=params, slots=(), metrics=(), predict=served)


@contextlib.contextmanager
def _computing_in(model: keras.Model, dtype: str | None) -> Iterator[None]:
    """Layers of float32 compute in another floating-point type while they are traced."""
    if dtype is None:
        yield
        return
    layers = [layer for layer in _compat.layers_inside(model) if layer.compute_dtype == "float32"]
    before = [(layer, layer.dtype_policy) for layer in (model, *layers)]
    try:
        for layer, _ in before:
            layer.dtype_policy = keras.DTypePolicy(f"mixed_{dtype}")
        yield
    finally:
        for layer, policy in before:
            layer.dtype_policy = policy


def example_of(model: keras.Model) -> Any:
    """The shapes of one row, as the model itself says.

    Raises :class:`ModelError` for a model that does not say them, or has dims of any size.
    """

    def shape(like: Input) -> jax.ShapeDtypeStruct:
        if None in like.shape[1:]:
            raise ModelError(
                f"input {like.name!r} of model {model.name!r} has a dim of any size: let build() "
                "return (model, batch), of which sizes are taken."
            )
        return jax.ShapeDtypeStruct((1, *like.shape[1:]), like.dtype)

    return jax.tree.map(shape, _like(model, None))


def _like(model: keras.Model, example: Any) -> Any:
    """The inputs in the structure that the model takes; see :class:`Input`."""
    like = own_inputs(model)
    if example is not None:
        return inputs_like(example, like)
    if like is None:
        raise ModelError(
            f"the shapes of the inputs of model {model.name!r} are not known: pass example=, "
            "inputs of any number of rows, or let the function that builds it return "
            "(model, batch)."
        )
    return like


def own_inputs(model: keras.Model) -> Any:
    """The inputs as the model itself says them, each an :class:`Input`; ``None`` if it does not."""
    tensors = _compat.input_tensors(model)
    if tensors is None:
        return None

    def one(tensor: Any) -> Input:
        name = "" if _NAMED_BY_KERAS.fullmatch(tensor.name) else tensor.name
        dtype = str(jax.dtypes.canonicalize_dtype(tensor.dtype))  # what is computed in
        return Input(name, (None, *tensor.shape[1:]), dtype)

    return named(jax.tree.map(one, tensors))


def _output_names(model: keras.Model) -> tuple[str, ...]:
    """The names of its outputs: the keys of a dict, or else those that layers were given.

    ``output``, or ``output_0``, for what Keras counted; empty where none are known.
    """
    functional = model if hasattr(model, "output_names") else _compat.functional_of(model)
    names = tuple(getattr(functional, "output_names", None) or ())
    paths = [path for path, _ in jax.tree.flatten_with_path(getattr(functional, "output", None))[0]]
    if len(paths) != len(names):
        return names
    layers = {layer.name: layer for layer in _compat.layers_inside(model)}
    own = ["" if _is_counted(name, layers.get(name)) else name for name in names]
    return leaf_names(list(zip(paths, own, strict=True)), "output")


def _is_counted(name: str, layer: Any) -> bool:
    """Whether Keras gave a name, of a layer or of an operation."""
    return layer is None or name == keras_name_of(layer)


def keras_name_of(layer: Any) -> str:
    """The name that Keras gives to a layer of this class when it is given none.

    >>> import keras
    >>> layer = keras.layers.GlobalAveragePooling2D()
    >>> keras_name_of(layer) == layer.name
    True
    """
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", type(layer).__name__)
    snake = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
    numbered = re.fullmatch(re.escape(snake) + r"(_\d+)?", layer.name)
    return layer.name if numbered else snake


# Files of Keras


def load_file(path: str | Path) -> tuple[keras.Model, dict[int, np.ndarray]]:
    """A model of shapes only from a ``.keras`` file, and host arrays by the id of their variable.

    Raises :class:`~meshwright.CheckpointError` for a file that Keras cannot read.
    """
    if not Path(path).is_file():
        raise CheckpointError(_no_file(Path(path)))
    _compat.install_keras_hooks(Hooks())
    room = LoadingRoom()
    try:
        with room.open():
            model: Any = keras.saving.load_model(str(path), compile=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a Keras model: {error} Write it by model.save('m.keras'); "
            "classes of your own need @keras.saving.register_keras_serializable(), and the module "
            "that defines them must be imported first."
        ) from error
    return model, room.values_by_id


def _no_file(path: Path) -> str:
    """The message for a path that holds no model, with the nearest ones."""
    if path.is_dir():
        return (
            f"{path} is a folder, not a .keras file. The checkpoints of a run are served with the "
            f"function that builds their model: Server(build=build, checkpoint={str(path)!r})."
        )
    folder = path.parent
    beside = sorted(file.name for file in folder.glob("*.keras")) if folder.is_dir() else []
    listed = f"{folder} has {', '.join(beside)}" if beside else f"{folder} has no .keras file"
    return f"there is no file {path}: {listed}. Name a model that model.save('name.keras') wrote."


class LoadingRoom(AbstractRoom):
    """Keeps what is assigned to variables of shapes only on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.values_by_id: dict[int, np.ndarray] = {}

    def keeps(self, variable: Any, value: Any) -> bool:
        value = np.asarray(value, _compat.stored_dtype(variable))
        if value.shape != tuple(variable.shape):
            raise ValueError(f"{variable.path} is {tuple(variable.shape)} and not {value.shape}")
        self.values_by_id[id(variable)] = value
        return True


def has_values(model: keras.Model) -> bool:
    """Whether the model has values, and is not one of shapes only."""
    return not any(map(is_abstract, model.variables))
