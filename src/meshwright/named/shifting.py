"""Moving a whole array along a dim: shift, and the exchange of margins between blocks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import DimError
from ..layouts.dim_rules import Dim, text_of
from .array import NamedArray, as_named, find
from .elementwise import where
from .indexing import arange, gather, whole_numbers
from .joining import concat
from .operation import operation
from .pieces import split_of
from .placing import place


@operation
def shift(x: Any, offset: Any, dim: str | Dim, *, wrap: bool = False) -> NamedArray:
    """Every element moved up by ``offset`` along a dim; what leaves comes back at the other end
    if ``wrap``, and else zeros come in.

    ``offset`` is a whole number of either sign, known now or only at run time, or a
    :class:`NamedArray` of them with some of the other dims. Along a split dim devices exchange what
    moves: at most two messages, or, with an offset known at run time, one or two per binary digit
    of the size. Raises :class:`DimError` if ``offset`` has ``dim``, or a dim that ``x`` has not.

    >>> from meshwright.named import named
    >>> shift(named(jnp.arange(4), "length:4"), 1, "length", wrap=True).array
    Array([3, 0, 1, 2], dtype=int32)
    """
    x = as_named(x)
    along = find(x.dims, dim)
    if isinstance(offset, (int, np.integer)):
        return _shifted(x, int(offset), along, wrap)
    offset = whole_numbers(offset, "shift: the offsets")
    if along in offset.dims or any(offset_dim not in x.dims for offset_dim in offset.dims):
        raise DimError(
            f"shift along {along} of [{text_of(x.dims)}]: the offset has dims "
            f"[{text_of(offset.dims)}], of which each must be another dim of the array."
        )
    source = arange(along) - offset
    turn = offset % max(along.size, 1)
    if not split_of(x.dims).get(along.name):
        return gather(x, source % max(along.size, 1) if wrap else source, along)
    moved = x
    for digit in range((along.size - 1).bit_length()):
        further = _shifted(moved, 2**digit, along, wrap=True)
        moved = where((turn // 2**digit) % 2 == 1, further, moved, out=x.dims)
    if wrap:
        return moved
    inside = (source >= 0) & (source < along.size)
    return where(inside, moved, jnp.zeros((), x.dtype), out=x.dims)


@operation
def halo_exchange(
    x: Any,
    dim: str | Dim,
    left: int = 0,
    right: int | None = None,
    *,
    blocks: str | Dim,
    wrap: bool = False,
) -> NamedArray:
    """To each block, the last ``left`` elements of what precedes and the first ``right`` of what
    follows it.

    ``dim`` runs within a block and ``blocks`` over the blocks of one sequence; ``dim`` becomes
    longer by ``left + right``. ``right`` is ``left`` unless given. Margins may be longer than a
    block. Beyond the first and the last block there are zeros, or, with ``wrap``, the other end.
    If ``blocks`` is split, neighbours send just the margins. (Mesh-TensorFlow's ``halo_exchange``.)

    >>> from meshwright.named import named
    >>> x = named(jnp.arange(6).reshape(3, 2), "blocks:3 length:2")
    >>> halo_exchange(x, "length", 1, blocks="blocks").array
    Array([[0, 0, 1, 2],
           [1, 2, 3, 4],
           [3, 4, 5, 0]], dtype=int32)
    """
    x = as_named(x)
    within, over = find(x.dims, dim), find(x.dims, blocks)
    right = left if right is None else right
    if left < 0 or right < 0:
        raise DimError(f"halo_exchange: margins must be at least 0; received {left} and {right}.")
    if within == over:
        raise DimError(
            f"halo_exchange: dim {within.name!r} is both the blocks and within a block; cut it "
            "first, with split_dim."
        )
    if (left or right) and not within.size:
        raise DimError(f"halo_exchange: blocks of [{within}] have no margins to exchange.")
    size = within.size
    before = [(size - n, n, i) for i, n in _margins(left, size)]
    after = [(0, n, -i) for i, n in _margins(right, size)]
    pieces = [
        _shifted(place([(x, -begin)], within.name, within.resized(n)), blocks_away, over, wrap)
        for begin, n, blocks_away in [*reversed(before), (0, size, 0), *after]
    ]
    return concat(pieces, within.name)


def _margins(margin: int, size: int) -> list[tuple[int, int]]:
    """How many blocks away, and how many elements of each, nearest first."""
    return [
        (i + 1, min(size, margin - i * size)) for i in range(-(-margin // size) if margin else 0)
    ]


def _shifted(x: NamedArray, offset: int, along: Dim, wrap: bool) -> NamedArray:
    size = along.size
    offset = offset % size if wrap and size else max(-size, min(size, offset))
    if not offset:
        return x
    return place([(x, offset), (x, offset - size)][: 1 + wrap], along.name, along)
