"""Which device holds which piece, and along which direction of a picture each dim runs.

Pure arithmetic on a layout; the pictures (SVG and terminal) are drawn from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...indices import ravel, unravel
from ...layouts.mesh import Mesh
from .sheet import Drawn


class Grid(NamedTuple):
    """Cells in row-major order: ``planes`` sheets of ``rows`` by ``columns``.

    The first ``filled`` cells are there; the rest of the last row is empty.
    """

    planes: int
    rows: int
    columns: int
    filled: int

    @classmethod
    def full(cls, planes: int, rows: int, columns: int) -> Grid:
        """A grid without empty cells."""
        return cls(planes, rows, columns, planes * rows * columns)


class Directions(NamedTuple):
    """The dims that run over planes, down the rows and along the columns; the rest is not drawn."""

    planes: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def hidden(self, rank: int) -> tuple[int, ...]:
        """The dims that the picture leaves out."""
        visible = {*self.planes, *self.rows, *self.columns}
        return tuple(dim for dim in range(rank) if dim not in visible)


@dataclass(frozen=True)
class Tiling:
    """How one tensor is cut, and who holds the pieces.

    ``counts`` is the number of pieces per dim; ``piece_of`` tells for each position of the mesh
    the piece there (row-major over ``counts``).

    >>> from meshwright import Layout
    >>> kernel = Drawn("kernel", (4, 6), Layout([None, "model"], Mesh({"batch": 2, "model": 2})))
    >>> Tiling.of(kernel).piece_of, Tiling.of(kernel).holders(1)
    ((0, 1, 0, 1), (1, 3))
    """

    drawn: Drawn
    mesh: Mesh
    counts: tuple[int, ...]
    piece_of: tuple[int, ...]

    @classmethod
    def of(cls, drawn: Drawn) -> Tiling:
        """Raises :class:`LayoutError` for an unbound layout or dims that do not divide."""
        layout, mesh = drawn.layout, drawn.layout.bound_mesh()
        layout.check(drawn.dims, drawn.name)
        counts = tuple(layout.num_shards(dim) for dim in range(layout.rank))
        # A tensor with one element per piece: there the offset of a piece is its index.
        pieces = tuple(ravel(index, counts) for index in layout.offsets(counts))
        return cls(drawn, mesh, counts, pieces)

    @property
    def pieces(self) -> int:
        """How many different pieces there are."""
        return math.prod(self.counts)

    @property
    def copies(self) -> int:
        """How many devices hold each piece."""
        return self.mesh.size // self.pieces

    @property
    def local_dims(self) -> tuple[int, ...]:
        """Dims of one piece."""
        return self.drawn.layout.local_dims(self.drawn.dims)

    @functools.cached_property
    def _holders(self) -> tuple[tuple[int, ...], ...]:
        devices: list[list[int]] = [[] for _ in range(self.pieces)]
        for position, piece in enumerate(self.piece_of):
            devices[piece].append(position)
        return tuple(tuple(positions) for positions in devices)

    def holders(self, piece: int) -> tuple[int, ...]:
        """Positions in the mesh that hold a piece, the first copy first."""
        return self._holders[piece]

    def is_first_copy(self, position: int) -> bool:
        """Whether no earlier device of the mesh holds the same piece."""
        return self.holders(self.piece_of[position])[0] == position

    def bounds(self, piece: int) -> tuple[tuple[int, int], ...]:
        """First index and the one after the last, per dim, of a piece."""
        index = unravel(piece, self.counts)
        return tuple((i * n, (i + 1) * n) for i, n in zip(index, self.local_dims, strict=True))

    @functools.cached_property
    def directions(self) -> Directions:
        """The dims that a picture shows; see :func:`directions`."""
        return directions(self.drawn.dims, self.counts)

    @property
    def grid(self) -> Grid:
        """The pieces as cells; cell numbers are piece numbers."""
        planes, rows, columns = (
            math.prod(self.counts[dim] for dim in dims) for dims in self.directions
        )
        return Grid.full(planes, rows, columns)


def directions(dims: Sequence[int], counts: Sequence[int]) -> Directions:
    """Along which directions the dims of a tensor are drawn.

    Two dims at most are rows and columns as in a matrix. Of more dims those that are cut are drawn,
    the last two of them as rows and columns, earlier ones as planes; with one cut or none, all the
    others share the second direction.

    >>> directions((8, 28, 28, 1), (2, 2, 2, 1))
    Directions(planes=(0,), rows=(1,), columns=(2,))
    >>> directions((8, 28, 28, 1), (8, 1, 1, 1))
    Directions(planes=(), rows=(0,), columns=(1, 2, 3))
    """
    rank = len(dims)
    cut = tuple(dim for dim in range(rank) if counts[dim] > 1)
    if rank <= 2:
        return Directions((), tuple(range(rank - 1)), (rank - 1,) if rank else ())
    if len(cut) >= 2:
        return Directions(cut[:-2], cut[-2:-1], cut[-1:])
    others = tuple(dim for dim in range(rank) if dim not in cut)
    if not cut:
        middle = _squarest(dims)
        return Directions((), others[:middle], others[middle:])
    if cut[0] == rank - 1:
        return Directions((), others, cut)
    return Directions((), cut, others)


def mesh_grid(mesh: Mesh) -> Grid:
    """The devices as cells, in the mesh's order; a long single axis is wrapped into rows.

    >>> mesh_grid(Mesh({"batch": 2, "rows": 3, "columns": 4}))
    Grid(planes=2, rows=3, columns=4, filled=24)
    """
    sizes = mesh.shape
    if len(sizes) == 1:
        row = min(sizes[0], 8 if sizes[0] <= 64 else 32)
        return Grid(1, -(-sizes[0] // row), row, sizes[0])
    return Grid.full(math.prod(sizes[:-2]), sizes[-2], sizes[-1])


def device_numbers(mesh: Mesh) -> tuple[int, ...]:
    """The number to show for each position: the device's id, or the position while abstract."""
    return tuple(range(mesh.size)) if mesh.is_abstract else mesh.global_device_ids


def _squarest(dims: Sequence[int]) -> int:
    """After how many dims to break, so that rows and columns are nearest to equally many."""
    sizes = [max(size, 1) for size in dims]

    def imbalance(middle: int) -> float:
        return abs(math.log(math.prod(sizes[:middle])) - math.log(math.prod(sizes[middle:])))

    return min(range(1, len(dims)), key=imbalance)
