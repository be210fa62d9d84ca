"""What a strategy does with a model, as a value that prints as a table."""

from __future__ import annotations

from dataclasses import dataclass

from ..views import Viewable
from .mesh import Mesh
from .placement import Placed

_HEADINGS = ("variable", "dims", "layout", "bytes per device", "why")


@dataclass(frozen=True)
class Explanation(Viewable):
    """Every variable of a model with its layout, the reason, and its bytes on one device."""

    mesh: Mesh
    placed: tuple[Placed, ...]

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all variables on one device."""
        return sum(each.bytes_per_device for each in self.placed)

    @property
    def parameter_bytes_per_device(self) -> int:
        """Bytes of the trained parameters on one device."""
        return sum(p.bytes_per_device for p in self.placed if p.info.role == "parameter")

    def __getitem__(self, path: str) -> Placed:
        """The variable with this path, in any of its spellings."""
        for each in self.placed:
            if path == each.info.path or path in each.info.spellings:
                return each
        raise KeyError(path)

    def rows(self) -> list[tuple[str, ...]]:
        """A row of texts for each variable, in the order of the printed columns."""
        return [_row(each) for each in self.placed]

    def __str__(self) -> str:
        rows = [_HEADINGS, *self.rows()]
        total = f"{self.bytes_per_device:,}"
        rows.append(("total", "", f"on {self.mesh.axes_text}", total, ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
        lines = [_line(row, widths) for row in rows]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _row(each: Placed) -> tuple[str, ...]:
    dims = "x".join(map(str, each.info.dims)) or "scalar"
    if each.names is not None and each.names.rank:
        dims = " ".join(map(str, each.names.of(each.info.dims)))
    layout = str(each.layout.unbound())
    return each.info.path, dims, layout, f"{each.bytes_per_device:,}", each.reason


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.rjust(width) if i == 3 else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
