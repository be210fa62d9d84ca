"""Values for a Program from outside: a tree of its parameters, or the state of a Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ModelError
from ..layouts.params import ParamInfo
from ..named.array import NamedArray
from ..program import Arrays, Program, TrainState
from .flax_variables import is_variable
from .jax import arrays_of, makes_parameters
from .trees import Tree


def program_values(program: Program, params: Any) -> TrainState:
    """The arrays by path, where they lie; the state is empty unless ``params`` has one.

    Raises :class:`~meshwright.ModelError` that lists everything in which they do not fit.

    >>> import jax.numpy as jnp, optax, meshwright as mw
    >>> program = mw.jax_program(lambda p, x: jnp.mean(x @ p["w"]), {"w": np.ones(2)}, optax.sgd(1))
    >>> program_values(program, {"w": np.ones(3)})
    Traceback (most recent call last):
    ...
    meshwright.errors.ModelError: params= does not fit program 'program':
      w has shape (3,); the program has (2,)
    """
    if isinstance(params, str | PathLike):
        raise ModelError(
            "params= must be a tree of arrays or the state of a Trainer; received "
            f"{str(params)!r}. Pass the folder of a run as checkpoint=."
        )
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
    tree = arrays_of(params() if makes_parameters(params) else params)
    return Tree(tree, lambda node: isinstance(node, NamedArray) or is_variable(node)).named(tree)


def _faults(values: Mapping[str, Any], infos: Iterable[ParamInfo]) -> list[str]:
    infos = list(infos)
    dims = {info.path: tuple(info.dims) for info in infos}
    dtypes = {info.path: info.dtype for info in infos}
    faults = [f"{path} is missing, of shape {dims[path]}" for path in dims if path not in values]
    faults += [f"{path} is unknown" for path in values if path not in dims]
    for path in (path for path in dims if path in values):
        value = values[path]
        if np.shape(value) != dims[path]:
            faults.append(f"{path} has shape {np.shape(value)}; the program has {dims[path]}")
        elif not _holds(dtypes[path], value):
            dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
            faults.append(f"{path} has dtype {dtype}; the program has {dtypes[path]}")
        elif isinstance(value, jax.ShapeDtypeStruct):
            faults.append(f"{path} is a shape, without values")
        elif isinstance(value, jax.Array) and value.is_deleted():
            faults.append(f"{path} was donated to a later step: pass the state which that returned")
    return faults


_KINDS = (np.bool_, np.integer, jnp.floating, np.complexfloating)  # each holds those before it


def _holds(dtype: str, value: Any) -> bool:
    """Whether a type has a place for such values: fractions have none among integers."""
    own = getattr(value, "dtype", None)
    own = np.asarray(value).dtype if own is None else own
    if jnp.issubdtype(own, jax.dtypes.extended):
        return True  # random keys
    held = next((rank for rank, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), -1)
    return any(jnp.issubdtype(own, kind) for kind in _KINDS[: held + 1])
