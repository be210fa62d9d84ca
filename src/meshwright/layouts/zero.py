"""ZeRO: state that every data-parallel replica would hold whole is shared out among them.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020): level 1 shares out the optimizer's slots, level 2 the gradients too, level 3 the parameters
as well (which PyTorch calls fully sharded data parallel). It comes on top of whatever the layouts
split over other axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import LayoutError
from .layout import UNSHARDED, Layout

LEVELS = (0, 1, 2, 3)
TILE = (8, 128)  # of the last two dims, in which a TPU holds an array
SMALL_ELEMENTS = 2048  # of one device's piece; sharing out less saves little, and costs a message


def check_level(zero: int) -> None:
    """Raise :class:`LayoutError` unless it is a level of ZeRO."""
    if zero not in LEVELS or isinstance(zero, bool):
        raise LayoutError(
            "zero must be 0 (nothing is shared out), 1 (optimizer slots), 2 (gradients too) or 3 "
            f"(parameters as well); received {zero!r}."
        )


def share_out(layout: Layout, dims: Sequence[int], axes: tuple[str, ...]) -> Layout | None:
    """The layout with one dim split over the data axes besides, or ``None`` to leave it alone.

    The outermost dim that divides is taken, as one device holds it now: its pieces lie in one run
    of memory, which a reduce-scatter need not rearrange. Where its pieces would be thinner than a
    tile of a TPU, the largest dim is. ``None`` where no dim divides, where the array lies along one
    of the axes already, or where a device holds no more than ``SMALL_ELEMENTS`` elements. ``dims``
    are the stored ones of an array that is padded, and stay as they are.

    >>> import meshwright as mw
    >>> mesh = mw.create_mesh({"batch": 4, "model": 2})
    >>> print(share_out(mw.Layout([None, "model"], mesh), [784, 128], ("batch",)))
    [batch, model] on batch=4, model=2 @ cpu:0-7
    >>> print(share_out(mw.Layout([None, "model"], mesh), [3, 8192], ("batch",)).unbound())
    [unsharded, model+batch]
    """
    mesh = layout.bound_mesh()
    replicas = math.prod(mesh[axis] for axis in axes)
    local = layout.local_dims(dims)
    if replicas == 1 or set(axes) & set(layout.axes) or math.prod(local) <= SMALL_ELEMENTS:
        return None
    divisible = [dim for dim, size in enumerate(local) if size % replicas == 0]
    if not divisible:
        return None
    fills = [dim for dim in divisible if local[dim] // replicas >= _least(dim, len(local))]
    dim = fills[0] if fills else max(divisible, key=lambda dim: local[dim])
    specs = list(layout.specs)
    specs[dim] = (*layout.dim_axes(dim), *axes) or UNSHARDED
    return Layout(specs, mesh, pad=layout.pad)


def _least(dim: int, count: int) -> int:
    """The fewest elements of a dim that fill a tile; ``count`` is how many dims there are."""
    return TILE[dim - count] if count - dim <= len(TILE) else 1
