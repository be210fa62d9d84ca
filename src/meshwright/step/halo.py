"""Convolution and pooling on split dims: each device takes a halo from its neighbours.

XLA partitions them by itself, but gets some wrong (``spatial.py`` says which), so here the exchange
is written out under ``shard_map``: each device fetches the rows that its windows reach beyond its
own piece, and runs the plain operation on what it holds. Automatic differentiation of this is
exact, and sums a kernel's gradient over just those axes that split its input. Halo exchange for
spatially split convolutions is known from GSPMD and, before it, from Mesh-TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ..jaxprs.edits import call_of
from ..jaxprs.link_rows import POOL_STEPS, conv_places
from ..layouts.mesh import Mesh

Entry = tuple[str, ...]  # the axes that split a dim; none if it is whole


@dataclass(frozen=True)
class Window:
    """How windows lie along one dim: their size, what is between them, what is put around."""

    size: int = 1
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    base_dilation: int = 1
    dilation: int = 1

    @property
    def is_trivial(self) -> bool:
        """Whether each result depends on the one element at its own place."""
        return self == Window() or self == Window(dilation=self.dilation)


@dataclass(frozen=True)
class Halo:
    """What each of ``pieces`` devices needs of its neighbours along a dim.

    ``left`` and ``right`` are rows fetched. Of those and its own, device ``i`` uses ``rows``, from
    ``first + i * slope`` on; ``padding`` is then put around them.
    """

    pieces: int
    left: int
    right: int
    first: int
    slope: int
    rows: int
    padding: tuple[int, int]


def halo(window: Window, size: int, results: int, pieces: int) -> Halo | None:
    """The halo for a dim of ``size`` rows that gives ``results`` rows, both cut into ``pieces``.

    ``None`` where they do not divide, where dilated rows do not begin alike on all devices, and
    where devices would need each other's rows whole anyway.

    >>> halo(Window(3, padding=(1, 1)), size=8, results=8, pieces=4)
    Halo(pieces=4, left=1, right=1, first=0, slope=0, rows=4, padding=(0, 0))
    """
    if size % pieces or results % pieces:
        return None
    own, own_results = size // pieces, results // pieces
    if own_results * window.stride % window.base_dilation:
        return None
    step = own_results * window.stride // window.base_dilation
    first = -(window.padding[0] // window.base_dilation)
    before = first * window.base_dilation + window.padding[0]
    span = (own_results - 1) * window.stride + (window.size - 1) * window.dilation - before
    if span < 0:
        return None
    rows = span // window.base_dilation + 1
    slope = step - own
    left = max(0, -first, -slope * (pieces - 1) - first)
    right = max(0, first + rows - own, slope * (pieces - 1) + first + rows - own)
    if left + right > size - own:
        return None
    after = span - (rows - 1) * window.base_dilation
    return Halo(pieces, left, right, first + left, slope, rows, (before, after))


def conv_windows(eqn: Any) -> list[Window]:
    """The windows of a convolution, per spatial dim."""
    places = conv_places(eqn.params["dimension_numbers"])
    sizes = [eqn.invars[1].aval.shape[j] for _, j, _ in places]
    return _windows(eqn.params, sizes, "lhs_dilation", "rhs_dilation")


def pool_windows(eqn: Any) -> list[Window]:
    """The windows of a pooling operation, per dim."""
    sizes = eqn.params["window_dimensions"]
    return _windows(eqn.params, sizes, "base_dilation", "window_dilation")


def _windows(params: Any, sizes: Sequence[int], base: str, dilation: str) -> list[Window]:
    padding = map(tuple, params["padding"])
    columns = sizes, params["window_strides"], padding, params[base], params[dilation]
    return [Window(*fields) for fields in zip(*columns, strict=True)]


def split_conv(
    eqn: Any, mesh: Mesh, batch: Entry, spatial: Sequence[Entry], features: Entry
) -> Any:
    """The equation of a convolution that is split so; ``features`` are those of the result."""
    params = dict(eqn.params)
    numbers = params["dimension_numbers"]
    groups = params.pop("feature_group_count")
    specs: list[list[Entry]] = [[()] * len(atom.aval.shape) for atom in (*eqn.invars, *eqn.outvars)]
    left, right, out = specs
    left[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = batch
    right[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = features
    left[numbers.lhs_spec[1]] = features if groups > 1 else ()
    halos: dict[int, tuple[Entry, Halo]] = {}
    padding = list(map(tuple, params.pop("padding")))
    for at, ((i, _, k), window, entry) in enumerate(
        zip(conv_places(numbers), conv_windows(eqn), spatial, strict=True)
    ):
        left[i] = out[k] = entry
        if entry:
            sizes = eqn.invars[0].aval.shape[i], eqn.outvars[0].aval.shape[k]
            halos[i] = entry, _sure(halo(window, *sizes, _pieces(mesh, entry)))
            padding[at] = halos[i][1].padding
    here = groups // _pieces(mesh, features) if groups > 1 else 1

    def local(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            _fetch(x, halos, 0),
            kernel,
            **_named(params, _CONV_ARGUMENTS),
            padding=padding,
            feature_group_count=here,
        )

    return _sharded(eqn, mesh, local, [PartitionSpec(*map(_plain, spec)) for spec in specs])


def split_pool(eqn: Any, mesh: Mesh, entries: Sequence[Entry]) -> Any:
    """The equation of a pooling operation that is split so, one entry per dim."""
    params = eqn.params
    (x,), (out,) = eqn.invars, eqn.outvars
    init, combine = pooling(eqn)
    halos: dict[int, tuple[Entry, Halo]] = {}
    padding = list(map(tuple, params["padding"]))
    for dim, (window, entry) in enumerate(zip(pool_windows(eqn), entries, strict=True)):
        if entry and not window.is_trivial:
            sizes = x.aval.shape[dim], out.aval.shape[dim]
            halos[dim] = entry, _sure(halo(window, *sizes, _pieces(mesh, entry)))
            padding[dim] = halos[dim][1].padding

    def local(x: Any) -> Any:
        fetched = _fetch(x, halos, init)
        return jax.lax.reduce_window(
            fetched, init, combine, **_named(params, POOL_STEPS), padding=padding
        )

    spec = PartitionSpec(*map(_plain, entries))
    return _sharded(eqn, mesh, local, [spec, spec])


def pooling(eqn: Any) -> tuple[Any, Callable[..., Any]]:
    """What a pooling operation begins with, and what it combines elements by."""
    dtype = eqn.invars[0].aval.dtype
    if eqn.primitive.name == "reduce_window_sum":
        return np.zeros((), dtype)[()], jax.lax.add
    if jax.numpy.issubdtype(dtype, jax.numpy.floating):
        most = np.array(np.inf, dtype)[()]
        least = -most
    else:
        limits = jax.numpy.iinfo(dtype)
        least, most = np.array(limits.min, dtype)[()], np.array(limits.max, dtype)[()]
    return (
        (least, jax.lax.max) if eqn.primitive.name == "reduce_window_max" else (most, jax.lax.min)
    )


_CONV_ARGUMENTS = (
    *("window_strides", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("batch_group_count", "precision", "preferred_element_type"),
)


def _named(params: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: params[name] for name in names}


def _pieces(mesh: Mesh, entry: Entry) -> int:
    return math.prod(mesh[axis] for axis in entry)


def _plain(entry: Entry) -> Entry | None:
    return entry or None


def _sure(halo: Halo | None) -> Halo:
    assert halo is not None, "the layout was chosen so that there is a halo"
    return halo


def _fetch(x: Any, halos: dict[int, tuple[Entry, Halo]], fill: Any) -> Any:
    """Put the neighbours' rows around this device's, dim by dim, so that corners come along."""
    for dim, (entry, need) in halos.items():
        x = fetch_along(x, dim, entry, need, fill)
    return x


def fetch_along(x: Any, dim: int, axes: Entry, need: Halo, fill: Any) -> Any:
    index = jax.lax.axis_index(axes)
    before = _neighbours(x, dim, axes, need, need.left, fill, index, towards=1)
    after = _neighbours(x, dim, axes, need, need.right, fill, index, towards=-1)
    around = jax.lax.concatenate([*reversed(before), x, *after], dim)
    if need.slope:
        start = need.first + index * need.slope
        return jax.lax.dynamic_slice_in_dim(around, start, need.rows, dim)
    return jax.lax.slice_in_dim(around, need.first, need.first + need.rows, axis=dim)


def _neighbours(
    x: Any, dim: int, axes: Entry, need: Halo, rows: int, fill: Any, index: Any, towards: int
) -> list[Any]:
    """Rows of the devices before (``towards`` 1, upwards) or after this one, nearest first."""
    own = x.shape[dim]
    fetched = []
    for distance in range(1, -(-rows // own) + 1):
        count = min(own, rows - (distance - 1) * own)
        start = own - count if towards == 1 else 0
        piece = jax.lax.slice_in_dim(x, start, start + count, axis=dim)
        pairs = [
            (i, i + towards * distance)
            for i in range(need.pieces)
            if 0 <= i + towards * distance < need.pieces
        ]
        piece = jax.lax.ppermute(piece, axes, pairs)
        if fill != 0:  # who has no such neighbour received zeros
            has = index >= distance if towards == 1 else index < need.pieces - distance
            piece = jax.numpy.where(has, piece, fill)
        fetched.append(piece)
    return fetched


def _sharded(eqn: Any, mesh: Mesh, local: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """The equation of ``local`` on pieces, in the place of another one."""
    sharded = jax.shard_map(
        local, mesh=mesh.jax_mesh, in_specs=tuple(specs[:-1]), out_specs=specs[-1]
    )
    return call_of(sharded, eqn)
