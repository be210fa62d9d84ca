"""What devices tell each other: bars per axis of the mesh, and every collective in a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...hlo.collectives import KINDS
from ...hlo.traffic import Rows, alike, moved_bytes
from ...units import bytes_text, seconds_text
from ..tables import remedies_of
from .bars import Part, bar, key
from .grid import Cell, Column, grid, spelled
from .markup import Child, Html, breakable, section, tag

if TYPE_CHECKING:
    from ...hlo.traffic import Transfer
    from ..report import DryRun

_COLOURS = ("blue", "orange", "green", "sky", "grey", "yellow", "pink")
_PAINTS: dict[str, str] = dict(zip(KINDS, _COLOURS, strict=True))
_NAMED = 2  # places that are written out before the rest is folded


def collectives_section(run: DryRun) -> Html | None:
    """The section on collectives; none where nothing was compiled."""
    if not run.collectives:
        is_told = run.compiled is not None or run.is_analytic
        says = "One step of a device tells the others nothing." if is_told else None
        return section("collectives", "Collectives", tag("p", says)) if says else None
    return section(
        "collectives",
        "Collectives of one step",
        _axes(run),
        _unexpected(run.unexpected),
        _table(run.collectives),
    )


def _axes(run: DryRun) -> Html:
    by_axes: dict[tuple[str, ...], list[Transfer]] = defaultdict(list)
    for each in run.collectives:
        by_axes[each.axes].append(each)
    whole = max(1, *(moved_bytes(found) for found in by_axes.values()))
    times = dict(run.estimate.communication_s) if run.estimate else {}
    rows = []
    for axes, found in sorted(by_axes.items(), key=lambda item: -moved_bytes(item[1])):
        nbytes = moved_bytes(found)
        time_s = times.get(axes)
        told = bytes_text(nbytes) + ("" if time_s is None else f", {seconds_text(time_s)}")
        drawn = bar(_parts(found), whole, f"over {spelled(axes)}")
        rows.append(tag("div", tag("b", spelled(axes)), drawn, tag("span", told), class_="hbar"))
    kinds = [kind for kind in KINDS if any(each.kind == kind for each in run.collectives)]
    told = "Bytes of the arrays in one device and one step, by the axes that they travel along"
    return tag(
        "figure", tag("figcaption", told), rows, key([(kind, _PAINTS[kind]) for kind in kinds])
    )


def _parts(found: Sequence[Transfer]) -> list[Part]:
    sums = {kind: moved_bytes(each for each in found if each.kind == kind) for kind in _PAINTS}
    return [
        Part(kind, size, bytes_text(size), _PAINTS[kind]) for kind, size in sums.items() if size
    ]


def _unexpected(found: Sequence[Transfer]) -> Child:
    if not found:
        return tag("p", tag("b", "✓ None of them is unexpected", class_="good"), ".")
    remedies = remedies_of(found)
    items = [
        tag("li", remedy, " ", tag("small", f"({bytes_text(moved_bytes(each))} in one step)"))
        for remedy, each in sorted(remedies.items(), key=lambda item: -moved_bytes(item[1]))
    ]
    title = f"! {len(found)} unexpected, and what would remove them"
    return tag("div", tag("h3", title), tag("ul", items), class_="warning")


def _table(transfers: Sequence[Transfer]) -> Html:
    """Those that are alike in one row, as in the terminal."""
    groups = alike(transfers)
    columns = [
        Column("kind", "word"),
        Column("axes"),
        Column("for", "path"),
        Column("when"),
        Column("dtype"),
        Column("count", "num"),
        Column("bytes per device", "num"),
        Column("asked for?"),
    ]
    rows = [_row(found) for found in groups]
    if any(each.lines for each in transfers):
        columns.append(Column("written in", "path"))
        for row, found in zip(rows, groups, strict=True):
            row.append(Cell(_folded(found.first.lines)))
    return grid(
        "collectives-table",
        "Collectives; bytes are those of one device in one step",
        columns,
        rows,
        marks=[found.first.is_unexpected for found in groups],
    )


def _row(found: Rows) -> list[Cell]:
    first, known = found.first, found.count is not None
    dtypes = dict.fromkeys(dtype for each in found.all for dtype in each.dtypes)
    return [
        Cell(first.kind),
        Cell(spelled(first.axes)),
        Cell(_places(found)),
        Cell(", ".join(first.phases) or "-"),
        Cell(", ".join(dtypes)),
        Cell(f"{found.count:,}" if known else "?", found.count or 0),
        Cell(bytes_text(found.nbytes) + ("" if known else " each time"), found.nbytes),
        Cell("! unexpected" if first.is_unexpected else "yes"),
    ]


def _places(found: Rows) -> Child:
    """What they are for; of equal layers their common name, and theirs folded away."""
    if len(found.each) == 1:
        return _folded(found.places)
    names = dict.fromkeys(name for some in found.each for name in some[0].places)
    common = breakable(", ".join(found.places[:_NAMED]))
    more = tag("summary", common, f" ({len(found.each)} alike)")
    return tag("details", more, breakable(", ".join(names)))


def _folded(names: Sequence[str]) -> Child:
    """The first names, and the rest folded away."""
    if len(names) <= _NAMED + 1:
        return [[", " if i else "", breakable(name)] for i, name in enumerate(names)] or "-"
    more = tag("summary", breakable(", ".join(names[:_NAMED])), f" and {len(names) - _NAMED} more")
    return tag("details", more, breakable(", ".join(names[_NAMED:])))
