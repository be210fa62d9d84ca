"""Values for a Program from outside: a tree of its parameters, or the state of a Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ..errors import ModelError
from ..layouts.params import ParamInfo
from ..named.array import NamedArray
from ..program import Arrays, Program, TrainState
from .jax import arrays_of, makes_parameters
from .trees import Tree


def given_values(program: Program, params: Any) -> TrainState:
    """The arrays by path, where they lie; the state is empty unless ``params`` has one.

    Raises :class:`~meshwright.ModelError` that lists everything in which they do not fit.

    >>> import jax.numpy as jnp, optax, meshwright as mw
    >>> program = mw.jax_program(lambda p, x: jnp.mean(x @ p["w"]), {"w": np.ones(2)}, optax.sgd(1))
    >>> given_values(program, {"w": np.ones(3)})
    Traceback (most recent call last):
    ...
    meshwright.errors.ModelError: params= does not fit program 'program':
      w has shape (3,); the program has (2,)
    """
    if isinstance(params, TrainState):
        values = TrainState(dict(params.params), dict(params.state), {}, {})
    else:
        values = TrainState(arrays_by_path(params), {}, {}, {})
    faults = _faults(values.params, program.params)
    if values.state:
        faults += _faults(values.state, program.state)
    if faults:
        is_padded = isinstance(params, TrainState) and any("has shape" in f for f in faults)
        hint = " Of a layout with pad=True, pass trainer.unpadded(state)." if is_padded else ""
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise ModelError(f"params= does not fit program {program.name!r}:{lines}{hint}")
    return values


def arrays_by_path(params: Any) -> Arrays:
    """The arrays of a tree by the paths that they have in a Program.

    >>> arrays_by_path({"layer": {"w": 1.0}})
    {'layer/w': 1.0}
    """
    tree = params() if makes_parameters(params) else arrays_of(params)
    return Tree(tree, lambda node: isinstance(node, NamedArray)).named(tree)


def _faults(values: Mapping[str, Any], infos: Iterable[ParamInfo]) -> list[str]:
    dims = {info.path: tuple(info.dims) for info in infos}
    faults = [f"{path} is missing, of shape {dims[path]}" for path in dims if path not in values]
    faults += [f"{path} is unknown" for path in values if path not in dims]
    for path in (path for path in dims if path in values):
        value = values[path]
        if np.shape(value) != dims[path]:
            faults.append(f"{path} has shape {np.shape(value)}; the program has {dims[path]}")
        elif isinstance(value, jax.ShapeDtypeStruct):
            faults.append(f"{path} is a shape, without values")
        elif isinstance(value, jax.Array) and value.is_deleted():
            faults.append(f"{path} was donated to a later step: pass the state which that returned")
    return faults
