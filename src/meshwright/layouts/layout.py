"""The layout: for each dim of one tensor, the axis or axes that it lies on.

A :class:`Layout` is a value. Without a mesh it is *unbound*: it names axes that some mesh will
have, and a strategy binds it. Nothing here touches a device. The vocabulary (a spec per dim,
``UNSHARDED``, ``MATCH``) is TensorFlow DTensor's; several axes on one dim are JAX's.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DivisibilityError, LayoutError
from ..views import Viewable
from .mesh import Mesh, is_axis_name

UNSHARDED = "unsharded"
MATCH = "match"

Spec = str | tuple[str, ...]  # one dim: an axis, several axes (slowest first), UNSHARDED or MATCH
Specs = Sequence[str | Sequence[str] | None]


@dataclass(frozen=True, repr=False)
class Layout(Viewable):
    """How a tensor lies on a mesh: one entry per dim, an axis, a tuple of axes or ``UNSHARDED``.

    ``specs`` has the entries; ``None`` is read as ``UNSHARDED``. Axes that no dim names hold
    copies. Without ``mesh`` the layout is unbound. ``pad=True`` is for weights: where a dim does
    not divide, a training step stores them with zeros behind it. Raises :class:`LayoutError` and
    names every fault.

    >>> mesh = Mesh({"batch": 4, "model": 2})
    >>> print(Layout([UNSHARDED, "model"], mesh))
    [unsharded, model] on batch=4, model=2
    """

    specs: tuple[Spec, ...]
    mesh: Mesh | None = None
    pad: bool = False

    def __init__(self, specs: Specs, mesh: Mesh | None = None, *, pad: bool = False) -> None:
        if mesh is not None and not isinstance(mesh, Mesh):
            raise LayoutError(
                f"expected a meshwright Mesh; received {mesh!r}. "
                "Mesh.from_jax(mesh) makes one from a JAX mesh."
            )
        if not isinstance(pad, bool):
            raise LayoutError(
                f"pad must be True (weights may be padded) or False; received {pad!r}."
            )
        entries = _normalised(specs)
        faults = _spec_faults(entries, mesh)
        if faults:
            raise LayoutError("\n".join(faults))
        object.__setattr__(self, "specs", entries)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "pad", pad)

    def __eq__(self, other: object) -> bool:
        # Answers for every other object itself, for the reason given at Mesh.__eq__.
        mine = self.specs, self.mesh, self.pad
        return isinstance(other, Layout) and mine == (other.specs, other.mesh, other.pad)

    @classmethod
    def replicated(cls, mesh: Mesh | None, rank: int) -> Layout:
        """Every device holds the whole tensor.

        >>> print(Layout.replicated(Mesh({"batch": 8}), rank=2))
        [unsharded, unsharded] on batch=8
        """
        return cls([UNSHARDED] * _whole_rank(rank), mesh)

    @classmethod
    def batch_sharded(
        cls, mesh: Mesh | None, batch: str | Sequence[str], rank: int, dim: int = 0
    ) -> Layout:
        """One dim (the first, unless ``dim`` says otherwise) lies on ``batch``.

        >>> print(Layout.batch_sharded(Mesh({"batch": 8}), "batch", rank=2))
        [batch, unsharded] on batch=8
        """
        specs: list[Any] = [UNSHARDED] * _whole_rank(rank)
        specs[_dim_index(dim, rank)] = batch
        return cls(specs, mesh)

    @classmethod
    def inner_sharded(cls, mesh: Mesh | None, inner: str | Sequence[str], rank: int) -> Layout:
        """The last dim lies on ``inner``."""
        return cls.batch_sharded(mesh, inner, rank, dim=-1)

    # What it says

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.specs)

    @property
    def is_bound(self) -> bool:
        """Whether the layout names a mesh."""
        return self.mesh is not None

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that some dim lies on, in order of the dims."""
        return tuple(axis for spec in self.specs for axis in _axes(spec))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that one dim lies on; none if it is unsharded.

        >>> Layout([("batch", "model"), UNSHARDED]).dim_axes(0)
        ('batch', 'model')
        """
        return _axes(self.specs[_dim_index(dim, self.rank)])

    def num_shards(self, dim: int) -> int:
        """Into how many pieces one dim is cut. Raises :class:`LayoutError` while unbound."""
        mesh = self.bound_mesh()
        return math.prod(mesh[axis] for axis in self.dim_axes(dim))

    @property
    def total_shards(self) -> int:
        """How many different pieces there are; every other device holds a copy."""
        return math.prod(self.num_shards(dim) for dim in range(self.rank))

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole tensor."""
        if self.mesh is None:
            return not self.axes
        return all(self.mesh[axis] == 1 for axis in self.axes)

    def is_batch_parallel(self) -> bool:
        """Whether the first dim, and only the first, is cut."""
        return self.rank > 0 and bool(self.dim_axes(0)) and self.axes == self.dim_axes(0)

    def bound_mesh(self) -> Mesh:
        """The mesh. Raises :class:`LayoutError` while the layout is unbound."""
        if self.mesh is None:
            raise LayoutError(f"layout {self} is unbound; bind it with layout.on(mesh).")
        return self.mesh

    # Other layouts from this one

    def on(self, mesh: Mesh) -> Layout:
        """The same specs on this mesh. Raises :class:`LayoutError` for axes it does not have."""
        return self if mesh is self.mesh else Layout(self.specs, mesh, pad=self.pad)

    def unbound(self) -> Layout:
        """The same specs without a mesh."""
        return Layout(self.specs, pad=self.pad)

    def delete(self, dims: Iterable[int]) -> Layout:
        """The layout that is left when some dims are reduced away.

        >>> print(Layout(["batch", UNSHARDED, "model"]).delete([1]))
        [batch, model]
        """
        indices = {_dim_index(dim, self.rank) for dim in dims}
        specs = [s for i, s in enumerate(self.specs) if i not in indices]
        return Layout(specs, self.mesh, pad=self.pad)

    def matching(self, present: Layout) -> Layout:
        """This layout with each ``MATCH`` filled in from ``present``.

        Raises :class:`LayoutError` if ``present`` has another number of dims.
        """
        if MATCH not in self.specs:
            return self
        if present.rank != self.rank:
            raise LayoutError(
                f"MATCH keeps a dim as it is, but {self} has {self.rank} dims and the array "
                f"lies as {present}, with {present.rank}."
            )
        specs = [p if s == MATCH else s for s, p in zip(self.specs, present.specs, strict=True)]
        return Layout(specs, self.mesh, pad=self.pad)

    def fitting(self, dims: Sequence[int]) -> Layout:
        """This layout, not padded, with every dim that does not divide left ``UNSHARDED``.

        >>> print(Layout(["batch", "model"], Mesh({"batch": 2, "model": 4})).fitting([64, 10]))
        [batch, unsharded] on batch=2, model=4
        """
        self._check_rank(dims)
        fits = [size % self.num_shards(dim) == 0 for dim, size in enumerate(dims)]
        specs = [s if fit else UNSHARDED for s, fit in zip(self.specs, fits, strict=True)]
        return Layout(specs, self.mesh)

    # Shapes

    def stored_dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Dims with which a weight with ``dims`` is stored: larger where it is padded.

        >>> layout = Layout([UNSHARDED, "model"], Mesh({"model": 4}), pad=True)
        >>> layout.stored_dims([64, 10])
        (64, 12)
        """
        if not self.pad:
            return tuple(dims)
        self._check_rank(dims)
        shards = [self.num_shards(dim) for dim in range(self.rank)]
        return tuple(-(-size // n) * n for size, n in zip(dims, shards, strict=True))

    def faults(self, dims: Sequence[int], name: str = "array") -> list[str]:
        """What keeps a tensor with these dims from lying so; empty if nothing does."""
        if len(dims) != self.rank:
            return [
                f"{name} has {len(dims)} dims {tuple(dims)}, but its layout {self} has "
                f"{self.rank}: write one entry per dim."
            ]
        if not _are_sizes(dims):
            return [f"{name} has dims {tuple(dims)}; sizes must be whole numbers, at least 0."]
        return [
            _indivisible(name, dims, dim, self)
            for dim in range(self.rank)
            if dims[dim] % self.num_shards(dim)
        ]

    def check(self, dims: Sequence[int], name: str = "array") -> None:
        """Raise :class:`LayoutError` if a tensor with these dims does not fit.

        >>> Layout(["batch"], Mesh({"batch": 4})).check([30], name="x")
        Traceback (most recent call last):
            ...
        meshwright.errors.DivisibilityError: dim 0 of x (size 30) does not divide over axis 'batch'
        (size 4). Pad it to 32, or leave it UNSHARDED.
        """
        faults = self.faults(dims, name)
        if faults:
            fitting = len(dims) == self.rank and _are_sizes(dims)
            raise (DivisibilityError if fitting else LayoutError)("\n".join(faults))

    def local_dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Dims of the piece that one device holds. Raises where a dim does not divide.

        >>> Layout(["batch", UNSHARDED], Mesh({"batch": 4})).local_dims([8, 3])
        (2, 3)
        """
        self.check(dims)
        return tuple(size // self.num_shards(dim) for dim, size in enumerate(dims))

    def global_dims(self, local: Sequence[int]) -> tuple[int, ...]:
        """Dims of the tensor whose piece on one device has dims ``local``.

        Raises :class:`LayoutError` if they are not as many as those of the layout.
        """
        if len(local) != self.rank:
            raise LayoutError(f"a piece with dims {tuple(local)} does not fit layout {self}.")
        return tuple(size * self.num_shards(dim) for dim, size in enumerate(local))

    def offsets(self, dims: Sequence[int]) -> list[tuple[int, ...]]:
        """Where the piece of each device begins, in row-major order of the mesh.

        >>> Layout(["batch"], Mesh({"batch": 2, "model": 2})).offsets([6])
        [(0,), (0,), (3,), (3,)]
        """
        mesh = self.bound_mesh()
        local = self.local_dims(dims)
        return [
            tuple(
                _shard_index(self.dim_axes(dim), coords, mesh) * size
                for dim, size in enumerate(local)
            )
            for coords in mesh.unravel_index().values()
        ]

    def shard_bytes(self, dims: Sequence[int], itemsize: int) -> int:
        """Bytes that one device holds."""
        return math.prod(self.local_dims(dims)) * itemsize

    def _check_rank(self, dims: Sequence[int]) -> None:
        if len(dims) != self.rank:
            raise LayoutError("\n".join(self.faults(dims)))

    # JAX's words for it

    @functools.cached_property
    def partition_spec(self) -> Any:
        """The same as ``jax.sharding.PartitionSpec``."""
        import jax

        if MATCH in self.specs:
            raise LayoutError(f"layout {self} holds MATCH, which only relayout can fill in.")
        return jax.sharding.PartitionSpec(*(None if s == UNSHARDED else s for s in self.specs))

    @functools.cached_property
    def sharding(self) -> Any:
        """The same as ``jax.sharding.NamedSharding``. Raises :class:`LayoutError` while unbound."""
        import jax

        return jax.sharding.NamedSharding(self.bound_mesh().jax_mesh, self.partition_spec)

    @classmethod
    def from_sharding(cls, sharding: Any, rank: int) -> Layout:
        """The layout of an array with ``rank`` dims and this ``NamedSharding``.

        A single device counts as a mesh of one; JAX's meshes have no name. Raises
        :class:`LayoutError` for other shardings.
        """
        import jax

        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            (device,) = sharding.device_set
            return cls.replicated(Mesh.from_device(device), rank)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise LayoutError(
                f"a {type(sharding).__name__} has no named axes and cannot become a Layout; lay "
                "the array out with relayout first."
            )
        if sharding.spec.unreduced or len(sharding.spec) > _whole_rank(rank):
            raise LayoutError(
                f"{sharding.spec} does not fit an array with {rank} dims: a layout has one entry "
                "per dim and no pending sums."
            )
        specs = list(sharding.spec) + [None] * (rank - len(sharding.spec))
        return cls(specs, Mesh.from_jax(sharding.mesh))

    # As text and as pickle

    def __str__(self) -> str:
        specs = ", ".join(s if isinstance(s, str) else "+".join(s) for s in self.specs)
        text = f"[{specs}] padded" if self.pad else f"[{specs}]"
        return text if self.mesh is None else f"{text} on {self.mesh}"

    def __repr__(self) -> str:
        mesh = "" if self.mesh is None else f", {self.mesh!r}"
        pad = ", pad=True" if self.pad else ""
        return f"Layout({list(self.specs)!r}{mesh}{pad})"

    @classmethod
    def from_string(cls, text: str) -> Layout:
        """Read what ``str(layout)`` wrote; :meth:`Mesh.from_string` explains which mesh comes back.

        Raises :class:`LayoutError` for any other text.

        >>> Layout.from_string("[batch+model, unsharded] on batch=4, model=2").num_shards(0)
        8
        """
        match = re.fullmatch(r"\s*\[([^\]]*)\](\s+padded)?(?:\s+on\s+(.*))?", text, re.DOTALL)
        if match is None:
            raise LayoutError(
                f"expected a layout such as '[unsharded, model] on model=2'; received {text!r}."
            )
        entries, padded, mesh = match.groups()
        specs = [e.strip().split("+") for e in entries.split(",")] if entries.strip() else []
        return cls(specs, None if mesh is None else Mesh.from_string(mesh), pad=bool(padded))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.specs, self.mesh, self.pad)


def _unpickled(specs: Specs, mesh: Mesh | None, pad: bool) -> Layout:
    return Layout(specs, mesh, pad=pad)


def as_layout(specs: Layout | Specs) -> Layout:
    """A :class:`Layout` from one, or from a bare sequence of axes (unbound)."""
    return specs if isinstance(specs, Layout) else Layout(specs)


# The checks, each returning the faults it found


def _normalised(specs: Specs) -> tuple[Spec, ...]:
    if isinstance(specs, str) or not isinstance(specs, Iterable):
        is_sharding = hasattr(specs, "memory_kind")
        way = " mw.Layout.from_sharding(sharding, rank) makes one from it." if is_sharding else ""
        raise LayoutError(
            f"a layout is a sequence with one entry per dim, such as [UNSHARDED, 'model']; "
            f"received {specs!r}.{way}"
        )
    return tuple(_entry(spec) for spec in specs)


def _entry(spec: Any) -> Spec:
    if spec is None:
        return UNSHARDED
    if isinstance(spec, str):
        return spec
    if not isinstance(spec, Sequence) or not all(isinstance(axis, str) for axis in spec):
        raise LayoutError(
            f"an entry must be an axis, a tuple of axes, or UNSHARDED; received {spec!r}."
        )
    axes = tuple(spec)
    return UNSHARDED if not axes else axes[0] if len(axes) == 1 else axes


def _axes(spec: Spec) -> tuple[str, ...]:
    if isinstance(spec, str):
        return () if spec in (UNSHARDED, MATCH) else (spec,)
    return spec


def _spec_faults(specs: tuple[Spec, ...], mesh: Mesh | None) -> list[str]:
    faults = []
    where: dict[str, list[int]] = {}
    for dim, spec in enumerate(specs):
        for axis in _axes(spec):
            if axis in (UNSHARDED, MATCH):
                faults.append(f"dim {dim} lies on {spec!r}: {axis!r} must stand alone.")
            elif not is_axis_name(axis):
                faults.append(f"dim {dim} lies on {axis!r}, which is not a valid axis name.")
            else:
                where.setdefault(axis, []).append(dim)
    for axis, dims in where.items():
        if len(dims) > 1:
            faults.append(
                f"axis {axis!r} is used {len(dims)} times, on dims {dims}. One axis can split only "
                "one dim of a tensor; leave the others UNSHARDED."
            )
        if mesh is not None and axis not in mesh:
            faults.append(
                f"dim {dims[0]} lies on axis {axis!r}, which the mesh ({mesh.axes_text}) does not "
                f"have. Its axes are {', '.join(map(repr, mesh.axis_names))}."
            )
    return faults


def _indivisible(name: str, dims: Sequence[int], dim: int, layout: Layout) -> str:
    mesh, axes, size = layout.bound_mesh(), layout.dim_axes(dim), dims[dim]
    shards = layout.num_shards(dim)
    over = " x ".join(f"axis {axis!r} (size {mesh[axis]})" for axis in axes)
    padded = -(-size // shards) * shards
    return (
        f"dim {dim} of {name} (size {size}) does not divide over {over}. "
        f"Pad it to {padded}, or leave it UNSHARDED."
    )


def _are_sizes(dims: Sequence[int]) -> bool:
    return all(size >= 0 if hasattr(size, "__index__") else _is_symbol(size) for size in dims)


def _is_symbol(size: Any) -> bool:
    """Whether it stands for any size, as in a step that is exported for any number of rows."""
    from jax.export import is_symbolic_dim

    return is_symbolic_dim(size)


def _whole_rank(rank: int) -> int:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise LayoutError(f"rank must be an integer, at least 0; received {rank!r}.")
    return rank


def _dim_index(dim: int, rank: int) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or not -rank <= dim < rank:
        there = f"{rank} dim(s), 0 to {rank - 1}" if rank else "no dims"
        raise LayoutError(f"there is no dim {dim!r}: the tensor has {there}.")
    return dim % rank


def _shard_index(axes: tuple[str, ...], coords: dict[str, int], mesh: Mesh) -> int:
    index = 0
    for axis in axes:
        index = index * mesh[axis] + coords[axis]
    return index
