"""What is to be drawn, as values: tensors, sections of one mesh each, a sheet of sections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ...errors import LayoutError
from ...layouts.layout import MATCH, Layout
from ...layouts.mesh import Mesh


@dataclass(frozen=True)
class Drawn:
    """One tensor: its name, its dims, how it lies, and the bytes of one element.

    ``layout`` may be unbound where a :class:`Section` gives the mesh. ``dim_names``, one per dim,
    are shown beside the sizes. Raises :class:`LayoutError` if the layout does not fit the dims, or
    holds ``MATCH``.

    >>> Drawn("kernel", (784, 128), Layout([None, "model"])).nbytes
    401408
    """

    name: str
    dims: tuple[int, ...]
    layout: Layout
    itemsize: int = 4
    dim_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(self.dims))
        object.__setattr__(self, "dim_names", tuple(self.dim_names))
        faults = []
        if MATCH in self.layout.specs:
            faults.append(
                f"{self.name}: layout {self.layout} contains MATCH, which must be resolved first."
            )
        if self.layout.rank != len(self.dims):
            faults.append(
                f"{self.name} has {len(self.dims)} dims {self.dims}, but its layout "
                f"{self.layout} has {self.layout.rank}: write one entry per dim."
            )
        if self.dim_names and len(self.dim_names) != len(self.dims):
            faults.append(
                f"{self.name} has {len(self.dims)} dims {self.dims} and {len(self.dim_names)} "
                f"dim_names {self.dim_names}: pass one name per dim, or none."
            )
        if faults:
            raise LayoutError("\n".join(faults))
        if self.layout.is_bound:
            self.layout.check(self.dims, self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        total = self.itemsize
        for size in self.dims:
            total *= size
        return total

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds. Raises :class:`LayoutError` while unbound."""
        return self.layout.shard_bytes(self.dims, self.itemsize)

    def on(self, mesh: Mesh) -> Drawn:
        """The same tensor on this mesh. Raises :class:`LayoutError` where it does not fit."""
        return replace(self, layout=self.layout.on(mesh))


@dataclass(frozen=True)
class Section:
    """One mesh and the tensors that lie on it; their layouts are bound to it."""

    title: str
    mesh: Mesh
    tensors: tuple[Drawn, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(t.on(self.mesh) for t in self.tensors))

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all the tensors that each device holds."""
        return sum(tensor.bytes_per_device for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors, each counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Sheet:
    """Several sections under one title."""

    title: str
    sections: tuple[Section, ...]
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(self.sections))


Items = Sheet | Section | Drawn | Iterable[Section | Drawn]


def as_sheet(items: Items, title: str = "") -> Sheet:
    """A :class:`Sheet` from one, or from its parts; neighbouring tensors on a mesh share a section.

    >>> layout = Layout(["batch"], Mesh({"batch": 4}))
    >>> sheet = as_sheet([Drawn("x", (8,), layout), Drawn("y", (4,), layout)])
    >>> [tensor.name for section in sheet.sections for tensor in section.tensors]
    ['x', 'y']
    """
    if isinstance(items, Sheet):
        return replace(items, title=title) if title else items
    parts: Sequence[Section | Drawn] = (
        [items] if isinstance(items, Section | Drawn) else list(items)
    )
    for part in parts:
        if not isinstance(part, Section | Drawn):
            raise LayoutError(f"a sheet is made of Drawn and Section values; received {part!r}.")
    sections: list[Section] = []
    for mesh, group in groupby(parts, key=_mesh_of):
        members = list(group)
        if mesh is None:
            sections += [member for member in members if isinstance(member, Section)]
        else:
            sections.append(
                Section("", mesh, tuple(member for member in members if isinstance(member, Drawn)))
            )
    return Sheet(title, tuple(sections))


def _mesh_of(part: Section | Drawn) -> Mesh | None:
    """The mesh by which tensors are grouped; ``None`` for what is a section already."""
    return None if isinstance(part, Section) else part.layout.bound_mesh()
