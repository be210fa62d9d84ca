"""What devices tell each other: bars per axis of the mesh, and every collective in a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..collectives import KINDS
from ..tables import remedies_of
from .bars import Part, bar, key
from .grid import Cell, Column, grid
from .markup import Child, Html, breakable, section, tag
from .words import in_words, ms, spelled

if TYPE_CHECKING:
    from ..report import DryRun
    from ..traffic import Transfer

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


def moved_bytes(transfers: Iterable[Transfer]) -> int:
    """Bytes of one device in one step; those of a loop of unknown length count once."""
    return sum(each.bytes_per_step or each.bytes_per_device for each in transfers)


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
        told = in_words(nbytes) + ("" if time_s is None else f", {ms(time_s)}")
        drawn = bar(_parts(found), whole, f"over {spelled(axes)}")
        rows.append(tag("div", tag("b", spelled(axes)), drawn, tag("span", told), class_="hbar"))
    kinds = [kind for kind in KINDS if any(each.kind == kind for each in run.collectives)]
    told = "Bytes of the arrays in one device and one step, by the axes that they travel along"
    return tag(
        "figure", tag("figcaption", told), rows, key([(kind, _PAINTS[kind]) for kind in kinds])
    )


def _parts(found: Sequence[Transfer]) -> list[Part]:
    sums = {kind: moved_bytes(each for each in found if each.kind == kind) for kind in _PAINTS}
    return [Part(kind, size, in_words(size), _PAINTS[kind]) for kind, size in sums.items() if size]


def _unexpected(found: Sequence[Transfer]) -> Child:
    if not found:
        return tag("p", tag("b", "✓ None of them is unexpected", class_="good"), ".")
    remedies = remedies_of(found)
    items = [
        tag("li", remedy, " ", tag("small", f"({in_words(moved_bytes(each))} in one step)"))
        for remedy, each in sorted(remedies.items(), key=lambda item: -moved_bytes(item[1]))
    ]
    title = f"! {len(found)} unexpected, and what would remove them"
    return tag("div", tag("h3", title), tag("ul", items), class_="warning")


def _table(transfers: Sequence[Transfer]) -> Html:
    """Those that are alike in one row, as in the terminal."""
    alike: dict[tuple[object, ...], list[Transfer]] = defaultdict(list)
    for each in transfers:
        names = each.variables or each.paths
        folded = (*names[:_NAMED], len(names))
        key = each.is_unexpected, each.kind, each.axes, each.phases, folded, each.lines
        alike[key].append(each)
    groups = sorted(alike.values(), key=lambda found: -moved_bytes(found))
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
            row.append(Cell(_places([each.lines for each in found])))
    return grid(
        "collectives-table",
        "Collectives; bytes are those of one device in one step",
        columns,
        rows,
        marks=[found[0].is_unexpected for found in groups],
    )


def _row(found: Sequence[Transfer]) -> list[Cell]:
    first = found[0]
    known = all(each.count is not None for each in found)
    count = sum(each.count or 0 for each in found)
    nbytes = moved_bytes(found)
    dtypes = dict.fromkeys(dtype for each in found for dtype in each.dtypes)
    return [
        Cell(first.kind),
        Cell(spelled(first.axes)),
        Cell(_places([each.variables or each.paths for each in found])),
        Cell(", ".join(first.phases) or "-"),
        Cell(", ".join(dtypes)),
        Cell(f"{count:,}" if known else "?", count),
        Cell(in_words(nbytes) + ("" if known else " each time"), nbytes),
        Cell("! unexpected" if first.is_unexpected else "yes"),
    ]


def _places(lists: Sequence[Sequence[str]]) -> Child:
    """The first places, and the rest folded away."""
    names = list(dict.fromkeys(name for names in lists for name in names))
    if len(names) <= _NAMED + 1:
        return [[", " if i else "", breakable(name)] for i, name in enumerate(names)] or "-"
    more = tag("summary", breakable(", ".join(names[:_NAMED])), f" and {len(names) - _NAMED} more")
    return tag("details", more, breakable(", ".join(names[_NAMED:])))
