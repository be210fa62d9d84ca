"""Where every variable lies: those that are alike together, a picture for each way to lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...equal_layers import grouped, pattern, without_numbers
from ...layouts.layout import Layout
from ...layouts.params import Placed
from ...units import bytes_text
from ..drawing import Drawn
from ..drawing.words import dims_text, specs_text
from .elements import Cell, Column, element
from .pictures import tiling_picture

if TYPE_CHECKING:
    from markupsafe import Markup

_MOST_PICTURES = 12
_MOST_PICTURE_CHARACTERS = 400_000


@dataclass(frozen=True)
class Alike:
    """Variables of equal blocks: they differ in the numbers of their paths alone.

    ``pattern`` is their path with ``*`` for these numbers.
    """

    pattern: str
    members: tuple[Placed, ...]

    @property
    def layout(self) -> Layout:
        return self.members[0].layout

    @property
    def dims(self) -> tuple[int, ...]:
        """As a step stores them."""
        return self.members[0].stored_dims

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all of them in one device."""
        return sum(member.bytes_per_device for member in self.members)


def alike(placed: Iterable[Placed]) -> tuple[Alike, ...]:
    """Variables grouped by equal layout and block, those with most bytes in a device first.

    >>> from meshwright import Layout, Mesh
    >>> from meshwright.layouts.params import ParamInfo
    >>> lies = Layout(["model"], Mesh({"model": 2}))
    >>> paths = ("block_0/bias", "block_1/bias", "bias")
    >>> groups = alike(Placed(ParamInfo(p, (p,), (4,), "float32", 4), lies, "-") for p in paths)
    >>> [(group.pattern, len(group.members)) for group in groups]
    [('block_*/bias', 2), ('bias', 1)]
    """

    def kind(variable: Placed) -> tuple[object, ...]:
        path, reason = without_numbers(variable.info.path), without_numbers(variable.reason)
        return (
            path,
            variable.info.role,
            variable.info.dims,
            variable.info.dtype,
            variable.layout,
            reason,
        )

    groups = [
        Alike(pattern([member.info.path for member in members]), tuple(members))
        for members in grouped(placed, kind)
    ]
    return tuple(sorted(groups, key=_rank))


def _rank(alike: Alike) -> tuple[int, bool, str]:
    """The largest first; slots after the parameter that is as large."""
    return -alike.bytes_per_device, alike.members[0].info.role != "parameter", alike.pattern


def layouts_section(placed: Sequence[Placed]) -> dict[str, object] | None:
    """The section on the layouts of variables."""
    if not placed:
        return None
    groups = alike(placed)
    text = f"{len(placed):,} variables"
    if len(groups) < len(placed):
        text += f" in {len(groups):,} rows: those that differ in the numbers of their paths alone"
        text += " share one"
    figures, others = _figures(groups)
    return {"text": f"{text}.", "figures": figures, "left": others, "table": _table(groups)}


def _figures(groups: Sequence[Alike]) -> tuple[list[dict[str, object]], int]:
    """A picture of each layout, with the largest array that has it, as far as there is room; and
    the number of layouts left out."""
    ways: dict[Layout, list[Alike]] = defaultdict(list)
    for group in groups:
        if group.dims:
            ways[group.layout].append(group)
    figures, room = [], _MOST_PICTURE_CHARACTERS
    for number, (layout, members) in enumerate(list(ways.items())[:_MOST_PICTURES]):
        largest = members[0]
        itemsize = largest.members[0].info.itemsize
        tensor = Drawn(largest.pattern, largest.dims, layout, itemsize)
        picture = tiling_picture(f"t{number}", tensor)
        room -= len(picture)
        if room > 0 or not figures:
            count = sum(len(member.members) for member in members)
            nbytes = bytes_text(sum(member.bytes_per_device for member in members))
            noun = "variable lies" if count == 1 else "variables lie"
            text = f"{count:,} {noun} so: {nbytes} in each device."
            figures.append(
                {"picture": picture, "text": text, "drawn": element("path", largest.pattern)}
            )
    return figures, len(ways) - len(figures)


def _table(groups: Sequence[Alike]) -> Markup:
    columns = (
        Column("variable", "path"),
        Column("how many", "num"),
        Column("role", "word"),
        Column("dims", "dims"),
        Column("dtype"),
        Column("layout", "path"),
        Column("piece", "dims"),
        Column("bytes per device", "num"),
        Column("why", "words"),
    )
    rows = [_row(group) for group in groups]
    return element("table", "layouts-table", "Variables and their layouts", columns, rows)


def _row(alike: Alike) -> tuple[Cell, ...]:
    info = alike.members[0].info
    return (
        Cell(element("several", [member.info.path for member in alike.members], alike.pattern)),
        Cell(f"{len(alike.members)} ×", len(alike.members)),
        Cell(info.role),
        Cell(dims_text(info.dims), info.nbytes),
        Cell(info.dtype),
        Cell(element("code", specs_text(alike.layout))),
        Cell(dims_text(alike.layout.local_dims(alike.dims))),
        Cell(bytes_text(alike.bytes_per_device), alike.bytes_per_device),
        Cell(pattern([member.reason for member in alike.members])),
    )
