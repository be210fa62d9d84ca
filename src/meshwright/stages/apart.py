"""Whether the rows of a micro-batch go through a block each by itself.

Where they do, every device of the batch axes takes the block's gradients of its own rows, and the
sum over devices is taken once a step. Left to XLA it would be taken for every micro-batch.
"""

from __future__ import annotations

from typing import Any

import jax

from ..jaxprs.rows import RowsMixError, row_dims
from .parts import Blocks


def apart(small: Blocks, large: Blocks, pieces: int) -> bool:
    """Whether blocks traced for fewer rows compute a piece of what those for all rows do."""
    if small.own != large.own or small.functions.counted or large.functions.counted:
        return False
    pairs = zip(_arrays(small), _arrays(large), strict=False)
    if len(_arrays(small)) != len(_arrays(large)) or not all(
        _is_piece(a.aval, b.aval, pieces) or _is_same(a.aval, b.aval) for a, b in pairs
    ):
        return False
    if list(map(str, _differing(small))) != list(map(str, _differing(large))):
        return False
    try:
        dims = row_dims(_traced(small), _traced(large))
    except RowsMixError:
        return False
    return set(dims) == {0}


def _arrays(blocks: Blocks) -> list[Any]:
    functions = blocks.functions
    return [*functions.enters, *functions.constant, *functions.of_batch]


def _differing(blocks: Blocks) -> list[Any]:
    return [row[1].aval for row in blocks.differing]


def _is_piece(small: Any, large: Any, pieces: int) -> bool:
    grown = (small.shape[0] * pieces, *small.shape[1:]) if small.shape else None
    return grown == large.shape and small.dtype == large.dtype


def _is_same(small: Any, large: Any) -> bool:
    return small.shape == large.shape and small.dtype == large.dtype


def _traced(blocks: Blocks) -> Any:
    """A block and the gradient of its input, which custom rules may compute in their own way."""
    functions, arguments = blocks.functions, blocks.traced.arguments
    by_name = {name: var for var, name in arguments.items()}
    own = [by_name[row[0]].aval for row in blocks.own] + _differing(blocks)
    own += [by_name["params", path].aval for path in functions.lent]
    shared = [*functions.constant, *functions.of_batch]
    x = [var.aval for var in functions.enters]

    def run(own: Any, read: Any, x: Any, gradient: Any) -> Any:
        shared_values = dict(zip(shared, read, strict=True))
        y, pull = jax.vjp(lambda x: functions.block(own, shared_values, x), x)
        return y, pull(gradient)

    shapes = [_shape(aval) for aval in x]
    read = [_shape(var.aval) for var in shared]
    return jax.make_jaxpr(run)([_shape(aval) for aval in own], read, shapes, shapes)


def _shape(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
