"""A Program whose matrices are kept in eight bits, with a scale for each output channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..errors import ModelError
from ..jaxprs.late import Late, made_late
from ..layouts.params import Follows, ParamInfo
from ..program import Arrays, Program, TrainState
from .kept_params import kept_as

_MOST = 127  # the same on both sides of zero
_SCALE = "scale"


def in_eight_bits(program: Program) -> Program:
    """The program with its matrices as int8, each with a scale for every index of its last dim.

    Floating-point parameters of two or more dims are matrices, and all others stay as they are.
    ``w`` becomes ``w`` and ``w/scale``, which lies as the last dim of ``w`` does. The functions of
    the program get values of the types that they know, made where they are used: in a ``scan`` over
    stacked weights, those of one turn. Raises :class:`~meshwright.ModelError` for a program without
    a matrix.

    >>> import numpy as np, optax, meshwright as mw
    >>> params = {"w": np.ones([4, 2], "float32"), "b": np.ones([2], "float32")}
    >>> program = mw.jax_program(lambda p, x: 0.0, params, optax.sgd(1.0))
    >>> [(i.path, i.dtype, i.dims) for i in in_eight_bits(program).params]
    [('b', 'float32', (2,)), ('w', 'int8', (4, 2)), ('w/scale', 'float32', (2,))]
    """
    if not any(map(is_matrix, program.params)):
        raise ModelError(
            "precision='int8' quantizes floating-point parameters of two or more dims, and "
            f"{program.name!r} has none. Use precision='bfloat16', or leave precision out."
        )

    def with_own(function: Callable[..., Any], params: Arrays, *rest: Any) -> Any:
        own = {info.path: _own_value(info, params) for info in program.params}
        return made_late(lambda inputs: function(*inputs), (own, *rest))

    def initial() -> TrainState:
        whole = program.initial()
        return whole._replace(params=quantized(program, whole.params))

    params = tuple(narrow for info in program.params for narrow in _narrow(info))
    return replace(kept_as(program, params, with_own), initial=initial)


def quantized(program: Program, params: Arrays) -> Arrays:
    """The values that :func:`in_eight_bits` takes, from those of the program itself, or some.

    >>> import numpy as np, optax, meshwright as mw
    >>> params = {"w": np.array([[0.5, -8.0], [-1.0, 2.0]], "float32")}
    >>> program = mw.jax_program(lambda p, x: 0.0, params, optax.sgd(1.0))
    >>> quantized(program, params)["w"].tolist()
    [[64, -127], [-127, 32]]
    """
    return {
        path: value
        for info in program.params
        if info.path in params
        for path, value in _narrow_values(info, params[info.path]).items()
    }


def made_of(program: Program) -> dict[str, tuple[str, ...]]:
    """The path of each parameter that :func:`in_eight_bits` keeps, and of what it is made.

    >>> import numpy as np, optax, meshwright as mw
    >>> params = {"w": np.ones([4, 2], "float32"), "b": np.ones([2], "float32")}
    >>> made_of(mw.jax_program(lambda p, x: 0.0, params, optax.sgd(1.0)))
    {'b': ('b',), 'w': ('w',), 'w/scale': ('w',)}
    """
    return {narrow.path: (info.path,) for info in program.params for narrow in _narrow(info)}


def is_matrix(info: ParamInfo) -> bool:
    """Whether a parameter is one that eight bits are for."""
    return len(info.dims) > 1 and bool(jnp.issubdtype(info.dtype, jnp.floating))


def _scale_path(info: ParamInfo) -> str:
    return f"{info.path}/{_SCALE}"


def _narrow(info: ParamInfo) -> tuple[ParamInfo, ...]:
    """What is kept of a parameter."""
    if not is_matrix(info):
        return (info,)
    last = len(info.dims) - 1
    scale = ParamInfo(
        _scale_path(info),
        tuple(f"{spelling}/{_SCALE}" for spelling in info.spellings),
        info.dims[last:],
        "float32",
        itemsize=4,
        names=info.names,  # of the matrix, which it follows
        follows=Follows(info.path, info.spellings, info.dims, (last,), info.asked),
    )
    return replace(info, dtype="int8", itemsize=1), scale


def _narrow_values(info: ParamInfo, value: Any) -> Arrays:
    if not is_matrix(info):
        return {info.path: value}
    wide = jnp.asarray(value).astype("float32")
    largest = jnp.abs(wide).max(axis=tuple(range(wide.ndim - 1)))
    scale = jnp.where(largest == 0, 1, largest / _MOST)
    rounded = jnp.clip(jnp.round(wide / scale), -_MOST, _MOST).astype("int8")
    return {info.path: rounded, _scale_path(info): scale}


def _own_value(info: ParamInfo, params: Arrays) -> Any:
    """A parameter as the functions of the program know it, or what makes it of less."""
    if not is_matrix(info):
        return params[info.path]

    def wide(narrow: Any, scale: Any) -> Any:
        return (narrow.astype("float32") * scale).astype(info.dtype)

    return Late(wide, params[info.path], params[_scale_path(info)])
