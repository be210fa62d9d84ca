"""Gradients summed over devices as a few flat vectors, and other ways to sum them.

XLA sums all gradients of a step in one all-reduce of a tuple, which gloo takes array by array: one
flat vector was 1.7 times as fast between two processes. The other ways are those that users of
Horovod know (Sergeev and Del Balso, 2018): numbers that travel in a narrower type, sums within a
host before those between hosts, and Adasum (Maleki et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..errors import LayoutError, ModelError
from ..layouts.placement import Placement
from ..program import Arrays
from .compression import Compress
from .flat import cut, joined
from .host_sums import sum_on_host, sums_on_host

Wire = Literal["float32", "bfloat16", "float16"]
Op = Literal["sum", "adasum"]


@dataclass(frozen=True)
class GradientSum:
    """How gradients of replicated parameters are summed over the devices of the batch axes.

    They are joined to flat vectors of at most ``fusion_bytes`` each, one or more per dtype; with 0
    each goes alone. CPUs of several processes do so by themselves wherever they can.
    ``wire`` is the type that they travel in; ``"bfloat16"`` and ``"float16"`` halve the bytes, and
    sums are still made in float32. ``inner`` names the axes of the batch that lie within one host:
    sums are made there first, and what is left travels between hosts. ``op="adasum"`` combines
    gradients by their angles (Maleki et al. 2021): parallel ones are averaged, orthogonal ones
    added. ``compress`` is a :class:`~meshwright.PowerSGD` or :class:`~meshwright.TopK`: only a part
    of the gradients travels in each step, and every device keeps the rest for the next one.
    Raises :class:`~meshwright.ModelError` that lists every invalid choice.

    >>> import meshwright as mw
    >>> strategy = mw.DataParallel(
    ...     mw.Mesh({"batch": 8}), sums=mw.GradientSum(wire="bfloat16")
    ... )
    >>> strategy.how.sums
    GradientSum(fusion_bytes=67108864, wire='bfloat16', inner=(), op='sum', compress=None)
    """

    fusion_bytes: int = 64 << 20
    wire: Wire | None = None
    inner: str | tuple[str, ...] = ()
    op: Op = "sum"
    compress: Compress | None = None

    def __post_init__(self) -> None:
        if isinstance(self.inner, str):
            object.__setattr__(self, "inner", (self.inner,))
        faults = []
        if not isinstance(self.fusion_bytes, int) or self.fusion_bytes < 0:
            faults.append(
                "fusion_bytes must be the bytes of a flat vector, or 0 for each gradient alone; "
                f"received {self.fusion_bytes!r}."
            )
        if self.wire is not None and self.wire not in get_args(Wire):
            faults.append(f"wire must be None or one of {get_args(Wire)}; received {self.wire!r}.")
        if self.op not in get_args(Op):
            faults.append(f"op must be one of {get_args(Op)}; received {self.op!r}.")
        if self.op == "adasum" and (self.inner or self.is_narrow):
            faults.append("op='adasum' is not supported together with inner= or a narrow wire=.")
        if self.compress is not None and not isinstance(self.compress, Compress):
            faults.append(
                "compress must be mw.PowerSGD(rank), mw.TopK(share) or None; received "
                f"{self.compress!r}."
            )
        elif self.compress is not None and (self.inner or self.wire or self.op != "sum"):
            faults.append("compress= is not supported together with inner=, wire= or op=.")
        if faults:
            raise ModelError("\n".join(f"GradientSum: {fault}" for fault in faults))

    @property
    def is_narrow(self) -> bool:
        """Whether numbers travel in 16 bits."""
        return self.wire in ("bfloat16", "float16")

    def check(self, placement: Placement) -> None:
        """Raise :class:`~meshwright.LayoutError` where gradients cannot be summed so."""
        axes = placement.batch_axes
        faults = _split(placement)
        inner = [axis for axis in self.inner if axis not in axes]
        if inner:
            faults.append(
                f"inner={self.inner!r} names {', '.join(inner)}, which the batch does not lie "
                f"along; its axes are {axes!r}."
            )
        count = placement.batch_shards
        if self.op == "adasum" and count & (count - 1):
            faults.append(
                f"op='adasum' combines gradients in pairs, and {count} pieces of the batch are "
                "not a power of two."
            )
        if faults:
            raise LayoutError("\n".join(f"sums=GradientSum: {fault}" for fault in faults))


PLAIN_SUM, APART = GradientSum(), GradientSum(fusion_bytes=0)  # XLA sums them apart by itself


def refuse_split(placement: Placement, what: str) -> None:
    """Raise :class:`~meshwright.LayoutError` unless every device holds all parameters whole."""
    if faults := _split(placement):
        raise LayoutError("\n".join(f"{what}: {fault}" for fault in faults))


def _split(placement: Placement) -> list[str]:
    mesh, faults = placement.mesh, []
    if placement.zero:
        faults.append(
            f"zero={placement.zero} keeps and updates state in pieces, and every device must hold "
            "it whole. Set zero=0, or leave this option out."
        )
    others = [axis for axis, size in mesh.axes if size > 1 and axis not in placement.batch_axes]
    if others:
        faults.append(
            f"every device must hold the parameters whole, and the mesh ({mesh.axes_text}) splits "
            f"more than the batch: {', '.join(others)}. Leave this option out, or make the batch "
            "lie along all axes."
        )
    return faults


def way_of(sums: Any, placement: Placement) -> GradientSum | None:
    """How gradients are summed by this option of a step; ``None`` leaves it to XLA.

    CPUs of several processes sum flat vectors without being asked, wherever they can.
    """
    if isinstance(sums, GradientSum):
        sums.check(placement)
        return None if replace(sums, wire=None) == APART and not sums.is_narrow else sums
    devices = placement.mesh.devices
    if devices is None or devices[0].platform != "cpu":
        return None
    if len({device.process_index for device in devices}) < 2:
        return None
    try:
        PLAIN_SUM.check(placement)
    except LayoutError:
        return None
    return PLAIN_SUM


def sum_flat(parts: Arrays, mesh: Any, axes: tuple[str, ...], how: GradientSum) -> Arrays:
    """The sums over devices of gradients in parts, see ``row_parts.py``; each has one more dim
    before its own, of which every device holds one piece.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> mesh = mw.create_mesh({"batch": 8}).jax_mesh
    >>> parts = {"w": jnp.ones([8, 2, 3]), "b": jnp.arange(8.0)[:, None]}
    >>> {name: x.shape for name, x in jax.jit(
    ...     lambda parts: sum_flat(parts, mesh, ("batch",), PLAIN_SUM))(parts).items()}
    {'b': (1,), 'w': (2, 3)}
    """
    import jax

    from ..arrays.by_hand import over_axes

    if not parts:
        return {}
    spec = jax.sharding.PartitionSpec
    paths = list(parts)

    def summed(*pieces: Any) -> list[Any]:
        return sum_within([piece[0] for piece in pieces], mesh, axes, how)

    with jax.named_scope("gradients"):  # what a dry run calls the collective
        sums = over_axes(
            summed,
            mesh=mesh,
            in_specs=(spec(axes),) * len(paths),
            out_specs=spec(),
            axis_names=axes,
        )(*parts.values())
    return dict(zip(paths, sums, strict=True))


def sum_within(
    pieces: Sequence[Any], mesh: Any, axes: tuple[str, ...], how: GradientSum
) -> list[Any]:
    """The sums of arrays of which each device along ``axes`` has one, for use in ``shard_map``."""
    if how.op == "sum" and not how.is_narrow and sums_on_host(mesh, axes):
        sums = sum_on_host(pieces)
        if sums is not None:
            return sums
    results: list[Any] = [None] * len(pieces)
    for bucket in _buckets(pieces, how.fusion_bytes):
        sums = _sum_of([pieces[i] for i in bucket], mesh, axes, how)
        for i, value in zip(bucket, sums, strict=True):
            results[i] = value
    return results


def _buckets(pieces: Sequence[Any], fusion_bytes: int) -> Iterator[list[int]]:
    """Numbers of the gradients that go together: of one dtype, and not too many bytes."""
    for dtype in dict.fromkeys(piece.dtype for piece in pieces):
        bucket, filled = list[int](), 0
        for i, piece in enumerate(pieces):
            if piece.dtype != dtype:
                continue
            nbytes = piece.size * dtype.itemsize
            if bucket and filled + nbytes > fusion_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(i)
            filled += nbytes
        yield bucket


def _sum_of(pieces: Sequence[Any], mesh: Any, axes: tuple[str, ...], how: GradientSum) -> list[Any]:
    """The sums of one bucket."""
    import jax

    if how.op == "adasum":
        return _adasum(pieces, mesh, axes)
    flat, shapes = joined(pieces), [piece.shape for piece in pieces]
    outer = tuple(axis for axis in axes if axis not in how.inner)
    if not how.inner or not outer:
        return cut(_across(flat, mesh, axes, how.wire), shapes)
    within = tuple(axis for axis in axes if axis in how.inner)
    padded = _padded(flat, _size(mesh, within))
    share = jax.lax.psum_scatter(padded, within, tiled=True)
    share = _across(share, mesh, outer, how.wire)
    return cut(jax.lax.all_gather(share, within, tiled=True)[: flat.size], shapes)


def _across(flat: Any, mesh: Any, axes: tuple[str, ...], wire: str | None) -> Any:
    """The sum of a vector over axes; narrow numbers travel, and float32 is summed.

    Each device sums its piece of the rounded vectors, and its sum is rounded once more. Numbers
    travel as whole numbers of 16 bits: XLA's CPU compiler would make a sum of bfloat16 one of
    float32 again.
    """
    import jax
    import jax.numpy as jnp

    if wire not in ("bfloat16", "float16") or flat.dtype.itemsize <= 2:
        return jax.lax.psum(flat, axes)
    count = _size(mesh, axes)
    if count == 1:
        return flat

    def narrow(values: Any) -> Any:
        return jax.lax.bitcast_convert_type(values.astype(wire), jnp.uint16)

    def wide(bits: Any) -> Any:
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(wire)).astype(flat.dtype)

    pieces = narrow(_padded(flat, count).reshape(count, -1))
    mine = wide(jax.lax.all_to_all(pieces, axes, 0, 0)).sum(0)
    return wide(jax.lax.all_gather(narrow(mine), axes, tiled=True))[: flat.size]


def _adasum(pieces: Sequence[Any], mesh: Any, axes: tuple[str, ...]) -> list[Any]:
    """The pieces of all devices combined in pairs, pairs of pairs and so on, array by array.

    A piece is a device's share of the mean over all rows; what is combined are means over its own.
    """
    import jax
    import jax.numpy as jnp

    count = _size(mesh, axes)
    mine = [piece.astype(jnp.float32) * count for piece in pieces]
    distance = 1
    while distance < count:
        pairs = [(i, i ^ distance) for i in range(count)]
        theirs = cut(jax.lax.ppermute(joined(mine), axes, pairs), [a.shape for a in mine])
        mine = [_combined(a, b) for a, b in zip(mine, theirs, strict=True)]
        distance *= 2
    return [a.astype(piece.dtype) for a, piece in zip(mine, pieces, strict=True)]


def _combined(a: Any, b: Any) -> Any:
    """Adasum of two gradients, with the same result whichever comes first."""
    import jax.numpy as jnp

    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    tiny = jnp.finfo(jnp.float32).tiny
    return (1 - dot / (2 * aa + tiny)) * a + (1 - dot / (2 * bb + tiny)) * b


def _padded(flat: Any, count: int) -> Any:
    """The vector with zeros behind, so that it divides into ``count`` pieces."""
    import jax.numpy as jnp

    return jnp.pad(flat, (0, -flat.size % count))


def _size(mesh: Any, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
