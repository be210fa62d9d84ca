"""Gradients for the servers' optimizers, as updates: dense, or by rows."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ArrayError, ModelError, TaskError
from ..server.rows import aggregate
from ..shared.client import Servers
from ..shared.cutting import checked_rows
from ..shared.placing import VariableSpec
from ..shared.slots import optimizer_heads
from ..wire.message import Message
from .context import current
from .updates import Update

NORMS = ("clipnorm", "global_clipnorm")


class WorkerStrategy:
    """What a strategy is inside a scheduled function."""

    def apply_gradients(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        """See :meth:`~meshwright.ps.strategy.ParameterServer.apply_gradients`."""
        context = current()
        if context is None:
            raise TaskError("this strategy is a worker's: use it in a scheduled function.")
        options = context.settings.get("gradient_options", {})
        config, listed = config_of(optimizer), pairs_of(pairs)
        in_round = context.round is not None and not context.at_once
        for update in gradient_updates(
            context.servers, context.cache, config, listed, options, in_round
        ):
            context.change(update)
        names = [variable.spec.name for _, variable in listed]
        context.note_once([config, names, dict(options)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"strategy.{name} is not there in a scheduled function, whose strategy has "
            "apply_gradients only. Make variables, save and fit in the program that schedules: a "
            "function uses the variables that it closes over or gets as arguments."
        )


def config_of(optimizer: Any) -> dict[str, Any]:
    """An optimizer as plain values: a mapping with ``class_name`` and ``config``, or one of Keras'.

    Raises :class:`~meshwright.errors.ModelError` for anything else.

    >>> config_of({"class_name": "SGD", "config": {"learning_rate": 0.1}})["class_name"]
    'SGD'
    """
    if isinstance(optimizer, Mapping) and "class_name" in optimizer:
        config = {name: _number(value) for name, value in optimizer.get("config", {}).items()}
        return {"class_name": optimizer["class_name"], "config": config}
    get_config: Any = getattr(optimizer, "get_config", None)
    if get_config is not None and hasattr(optimizer, "apply_gradients"):
        return {"class_name": type(optimizer).__name__, "config": dict(get_config())}
    raise ModelError(
        "expected a Keras optimizer, or a mapping such as "
        "{'class_name': 'SGD', 'config': {'learning_rate': 0.1}}; "
        f"received {optimizer!r}."
    )


def _number(value: Any) -> Any:
    """A scalar of NumPy or JAX as Python's number; all else as it is."""
    return np.asarray(value).item() if hasattr(value, "dtype") and np.ndim(value) == 0 else value


def pairs_of(pairs: Any) -> list[Any]:
    """What ``apply_gradients`` takes, as a list.

    Raises :class:`~meshwright.errors.ArrayError` for anything else.
    """
    if not isinstance(pairs, Iterable):
        raise ArrayError(
            "apply_gradients takes a list of pairs of a gradient and a variable, "
            f"[(gradient, variable), ...]; received {reprlib.repr(pairs)}."
        )
    return list(pairs)


def gradient_updates(
    servers: Servers,
    sent: dict[Any, Any],
    config: Mapping[str, Any],
    pairs: Sequence[tuple[Any, Any]],
    options: Mapping[str, Any],
    in_round: bool = False,
) -> list[Update]:
    """The updates for (gradient, variable) pairs, whose optimizer the servers know afterwards.

    ``sent`` remembers what was sent to which servers. A gradient by rows is a pair of rows and
    values. Clipping by norms needs whole gradients, so it is done here; in a round the servers
    clip the mean.
    """
    specs = [_spec_of(pair) for pair in pairs]
    norms = [config["config"].get(name) for name in NORMS]
    together = tell_optimizer(servers, sent, config, specs, options)
    gradients = [_arrays(gradient, spec) for (gradient, _), spec in zip(pairs, specs, strict=True)]
    if in_round and norms != [None, None]:
        options = {**options, "together": together}
    else:
        gradients = _clipped(gradients, *norms)
    return [
        Update(spec, "gradient" if len(arrays) == 1 else "rows_gradient", arrays, options)
        for spec, arrays in zip(specs, gradients, strict=True)
    ]


def tell_optimizer(
    servers: Servers,
    sent: dict[Any, Any],
    config: Mapping[str, Any],
    specs: Sequence[VariableSpec],
    options: Mapping[str, Any],
    only: int | None = None,
) -> str:
    """Register an optimizer with the servers, if they do not know it; again after a restart.

    ``only`` names one server. Returns the name of the group of these variables.
    """
    names = sorted(spec.name for spec in specs)
    identity = json.dumps([config, names], sort_keys=True, default=str)
    group = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    generations = tuple(map(servers.generation, range(len(servers))))
    if sent.get(("optimizer", group)) == generations:
        return group
    heads = optimizer_heads(config, specs, group, compensation="compensation" in options)
    for server, head in heads.items():
        if only in (None, server):
            servers.ask(server, Message("optimizer", head))
    sent["optimizer", group] = generations
    return group


def _spec_of(pair: Any) -> VariableSpec:
    """That of the variable of a pair."""
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    gradient, variable = pair if is_pair else (None, None)
    spec = getattr(variable, "spec", None)
    if gradient is None or not isinstance(spec, VariableSpec):
        raise ArrayError(
            "apply_gradients takes pairs of a gradient and a variable that strategy.variable made; "
            f"received {reprlib.repr(pair)}."
        )
    return spec


def _arrays(gradient: Any, spec: VariableSpec) -> tuple[np.ndarray, ...]:
    if isinstance(gradient, tuple):
        rows, values = _by_rows(gradient, spec)
        return checked_rows(spec, rows), _floats(values, spec)
    array = _array(gradient, spec)
    if array.shape != spec.shape:
        raise ArrayError(
            f"the gradient of {spec.name!r} has shape {array.shape}, the variable {spec.shape}."
        )
    return (_floats(array, spec),)


def _by_rows(gradient: tuple[Any, ...], spec: VariableSpec) -> tuple[np.ndarray, np.ndarray]:
    parts = [_array(part, spec) for part in gradient]
    if len(parts) == 2 and parts[0].ndim == 1:
        rows, values = parts
        if values.shape == (*rows.shape, *spec.shape[1:]):
            return rows, values
    received = " and ".join(str(part.shape) for part in parts) or "nothing"
    raise ArrayError(
        f"a gradient of {spec.name!r} (shape {spec.shape}) by rows is a pair of row numbers and "
        f"values of shape (rows, *{spec.shape[1:]}); received {received}."
    )


def _array(value: Any, spec: VariableSpec) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of several lengths
        raise ArrayError(
            f"the gradient of {spec.name!r} is not an array: {error}. Pass an array of shape "
            f"{spec.shape}, or a pair of row numbers and values."
        ) from error


def _floats(values: np.ndarray, spec: VariableSpec) -> np.ndarray:
    """A gradient as servers take it: as float32, where they lack its type, such as bfloat16."""
    if values.dtype.kind == "V" and not values.dtype.name.startswith(("void", "int", "uint")):
        return values.astype(np.float32)
    if values.dtype.kind != "f":
        raise ArrayError(
            f"the gradient of {spec.name!r} must be of floats; received {values.dtype}. Convert "
            "it: gradient.astype('float32')."
        )
    return values


def _clipped(
    gradients: list[tuple[np.ndarray, ...]], own: float | None, together: float | None
) -> list[tuple[np.ndarray, ...]]:
    """As Keras clips: each gradient to a norm, or all of them together."""
    if own is None and together is None:
        return gradients
    # A repeated row has one gradient, the sum; so the norm is that of the whole gradient.
    gradients = [arrays if len(arrays) == 1 else aggregate(*arrays) for arrays in gradients]
    squares = [float(np.sum(np.square(arrays[-1], dtype=np.float64))) for arrays in gradients]
    if own is not None:
        return [_to_norm(g, s**0.5, own) for g, s in zip(gradients, squares, strict=True)]
    assert together is not None
    return [_to_norm(arrays, sum(squares) ** 0.5, together) for arrays in gradients]


def _to_norm(arrays: tuple[np.ndarray, ...], norm: float, most: float) -> tuple[np.ndarray, ...]:
    if norm <= most:
        return arrays
    return (*arrays[:-1], (arrays[-1] * (most / norm)).astype(arrays[-1].dtype))


def worker_strategy() -> WorkerStrategy:
    """What a strategy becomes on a worker: unpickling calls this."""
    return WorkerStrategy()
