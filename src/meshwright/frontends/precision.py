"""A Program whose parameters are kept in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..program import Arrays, Program, shapes_of
from .eight_bits import in_eight_bits
from .kept_params import kept_as


def in_precision(program: Program, dtype: str) -> Program:
    """The program with its float32 parameters in another type, and outputs in their own.

    The functions of the program compute in whatever they make of these parameters. ``"int8"`` is
    that of :func:`~meshwright.frontends.eight_bits.in_eight_bits`.

    >>> import numpy as np, optax, meshwright as mw
    >>> params = {"w": np.ones([2, 2], "float32"), "ids": np.ones([2], "int32")}
    >>> program = mw.jax_program(lambda p, x: 0.0, params, optax.sgd(1.0))
    >>> [info.dtype for info in in_precision(program, "bfloat16").params]
    ['int32', 'bfloat16']
    """
    if dtype == "int8":
        return in_eight_bits(program)
    kept = {info.path: info for info in program.params if info.dtype == "float32"}
    itemsize = jnp.dtype(dtype).itemsize
    params = tuple(
        replace(info, dtype=dtype, itemsize=itemsize) if info.path in kept else info
        for info in program.params
    )
    own = shapes_of(program.params)

    def in_own_types(function: Callable[..., Any], params: Arrays, *rest: Any) -> Any:
        """The outputs of a function in the types that it gives for parameters of their own."""
        wanted = jax.eval_shape(function, own, *rest)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), function(params, *rest), wanted)

    return kept_as(program, params, in_own_types)
