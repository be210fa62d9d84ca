"""Where every variable lies: those that are alike together, a picture for each way to lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...drawing import Drawn
from ...drawing.words import dims_text, specs_text
from ...hlo.alike import pattern, without_numbers
from ...layouts.layout import Layout
from ...layouts.placement import Placed
from ...units import bytes_text
from .grid import Cell, Column, grid
from .markup import Child, Html, breakable, section, tag
from .pictures import tiling_picture

if TYPE_CHECKING:
    from ..report import DryRun

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
        return sum(each.bytes_per_device for each in self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, each counted once."""
        return sum(each.info.nbytes for each in self.members)


def alike(placed: Iterable[Placed]) -> tuple[Alike, ...]:
    """Variables grouped by equal layout and block, those with most bytes in a device first.

    >>> from meshwright import Layout, Mesh
    >>> from meshwright.layouts.placement import ParamInfo
    >>> lies = Layout(["model"], Mesh({"model": 2}))
    >>> paths = ("block_0/bias", "block_1/bias", "bias")
    >>> found = alike(Placed(ParamInfo(p, (p,), (4,), "float32", 4), lies, "rule") for p in paths)
    >>> [(each.pattern, len(each.members)) for each in found]
    [('block_*/bias', 2), ('bias', 1)]
    """
    found: dict[tuple[object, ...], list[Placed]] = defaultdict(list)
    for each in placed:
        info = each.info
        path = without_numbers(info.path)
        reason = without_numbers(each.reason)
        found[path, info.role, info.dims, info.dtype, each.layout, reason].append(each)
    groups = [
        Alike(pattern([each.info.path for each in members]), tuple(members))
        for members in found.values()
    ]
    return tuple(sorted(groups, key=_rank))


def _rank(each: Alike) -> tuple[int, bool, str]:
    """The largest first; slots after the parameter that is as large."""
    return -each.bytes_per_device, each.members[0].info.role != "parameter", each.pattern


def layouts_section(run: DryRun) -> Html | None:
    """The section on the layouts of variables."""
    if not run.placed:
        return None
    groups = alike(run.placed)
    return section(
        "layouts",
        "Where every variable lies",
        tag("p", *_told(run.placed, groups)),
        tag("div", _pictures(groups), class_="pictures"),
        _table(groups),
    )


def _told(placed: Sequence[Placed], groups: Sequence[Alike]) -> list[str]:
    said = f"{len(placed):,} variables"
    if len(groups) < len(placed):
        said += f" in {len(groups):,} rows: those that differ in the numbers of their paths alone"
        said += " share one"
    return [said, "."]


def _pictures(groups: Sequence[Alike]) -> list[Html]:
    """One picture for each way to lie, of the largest that lies so, as far as there is room."""
    ways: dict[Layout, list[Alike]] = defaultdict(list)
    for each in groups:
        if each.dims:
            ways[each.layout].append(each)
    drawn, room = [], _MOST_PICTURE_CHARACTERS
    for number, (layout, members) in enumerate(list(ways.items())[:_MOST_PICTURES]):
        picture = _picture(f"t{number}", layout, members)
        room -= len(picture)
        if room > 0 or not drawn:
            drawn.append(picture)
    left = len(ways) - len(drawn)
    if left:
        drawn.append(tag("p", f"and {left} more ways to lie, in the table", class_="more"))
    return drawn


def _picture(name: str, layout: Layout, members: Sequence[Alike]) -> Html:
    largest = members[0]
    info = largest.members[0].info
    tensor = Drawn(largest.pattern, largest.dims, layout, info.itemsize)
    count = sum(len(each.members) for each in members)
    held = bytes_text(sum(each.bytes_per_device for each in members))
    noun = "variable lies" if count == 1 else "variables lie"
    told = f"{count:,} {noun} so: {held} in each device."
    example = [tag("br"), "Drawn: ", tag("code", breakable(largest.pattern))]
    return tag("figure", tiling_picture(name, tensor), tag("figcaption", told, example))


def _table(groups: Sequence[Alike]) -> Html:
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
    rows = [_row(each) for each in groups]
    return grid("layouts-table", "Variables and their layouts", columns, rows)


def _row(each: Alike) -> tuple[Cell, ...]:
    info = each.members[0].info
    return (
        Cell(_paths(each)),
        Cell(f"{len(each.members)} ×", len(each.members)),
        Cell(info.role),
        Cell(dims_text(info.dims), info.nbytes),
        Cell(info.dtype),
        Cell(tag("code", specs_text(each.layout))),
        Cell(dims_text(each.layout.local_dims(each.dims))),
        Cell(bytes_text(each.bytes_per_device), each.bytes_per_device),
        Cell(pattern([member.reason for member in each.members])),
    )


def _paths(each: Alike) -> Child:
    if len(each.members) == 1:
        return breakable(each.pattern)
    return tag(
        "details",
        tag("summary", breakable(each.pattern)),
        ", ".join(member.info.path for member in each.members),
    )
