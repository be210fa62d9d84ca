"""What devices send each other: bars per axis of the mesh, and every collective in a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...hlo.collectives import KINDS
from ...hlo.traffic import Rows, alike, moved_bytes
from ...units import bytes_text, seconds_text
from ..figures import axes_list, remedies_of
from .elements import Cell, Column, Part, element

if TYPE_CHECKING:
    from markupsafe import Markup

    from ...hlo.traffic import Transfer
    from ...planning.report import DryRun

_COLOURS = ("blue", "orange", "green", "sky", "grey", "yellow", "pink")
_PAINTS: dict[str, str] = dict(zip(KINDS, _COLOURS, strict=True))
_NAMED = 2  # places that are written out before the rest is folded


def collectives_section(run: DryRun) -> dict[str, object] | None:
    """The section on collectives; none where nothing was compiled."""
    if not run.collectives and run.compiled is None and not run.is_analytic:
        return None
    remedies = [
        (remedy, moved_bytes(collectives))
        for remedy, collectives in remedies_of(run.unexpected).items()
    ]
    remedies.sort(key=lambda pair: -pair[1])
    return {
        "chart": _chart(run) if run.collectives else None,
        "unexpected": len(run.unexpected),
        "remedies": [(remedy, bytes_text(size)) for remedy, size in remedies],
        "table": _table(run.collectives),
    }


def _chart(run: DryRun) -> Markup:
    by_axes: dict[tuple[str, ...], list[Transfer]] = defaultdict(list)
    for collective in run.collectives:
        by_axes[collective.axes].append(collective)
    sizes = {axes: moved_bytes(some) for axes, some in by_axes.items()}
    times = dict(run.estimate.communication_s) if run.estimate else {}
    rows = []
    for axes in sorted(sizes, key=lambda axes: -sizes[axes]):
        time_s = times.get(axes)
        text = bytes_text(sizes[axes]) + ("" if time_s is None else f", {seconds_text(time_s)}")
        bar = element(
            "bar", _parts(by_axes[axes]), max(1, *sizes.values()), f"over {axes_list(axes)}"
        )
        rows.append((axes_list(axes), bar, text))
    kinds = {collective.kind for collective in run.collectives}
    key = [(kind, paint) for kind, paint in _PAINTS.items() if kind in kinds]
    caption = "Bytes of the arrays in one device and one step, by the axes that they travel along"
    return element("chart", caption, rows, key)


def _parts(transfers: Sequence[Transfer]) -> list[Part]:
    sizes = {
        kind: moved_bytes(transfer for transfer in transfers if transfer.kind == kind)
        for kind in _PAINTS
    }
    return [Part(kind, size, bytes_text(size), _PAINTS[kind]) for kind, size in sizes.items()]


def _table(transfers: Sequence[Transfer]) -> Markup:
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
    rows = [_row(group) for group in groups]
    if any(transfer.lines for transfer in transfers):
        columns.append(Column("written in", "path"))
        for row, group in zip(rows, groups, strict=True):
            row.append(_folded(group.first.lines))
    caption = "Collectives; bytes are those of one device in one step"
    marks = [group.first.is_unexpected for group in groups]
    return element("table", "collectives-table", caption, columns, rows, marks=marks)


def _row(group: Rows) -> list[Cell | str]:
    first, is_known = group.first, group.count is not None
    dtypes = dict.fromkeys(dtype for collective in group.all for dtype in collective.dtypes)
    return [
        first.kind,
        axes_list(first.axes),
        _places(group),
        ", ".join(first.phases) or "-",
        ", ".join(dtypes),
        Cell(f"{group.count:,}" if is_known else "?", group.count or 0),
        Cell(bytes_text(group.nbytes) + ("" if is_known else " each time"), group.nbytes),
        "! unexpected" if first.is_unexpected else "yes",
    ]


def _places(group: Rows) -> str:
    """What they are for; of equal layers their common name, and theirs folded away."""
    if len(group.alike) == 1:
        return _folded(group.places)
    names = dict.fromkeys(name for some in group.alike for name in some[0].places)
    common = ", ".join(group.places[:_NAMED])
    return element("folded", common, f" ({len(group.alike)} alike)", ", ".join(names))


def _folded(names: Sequence[str]) -> str:
    """The first names, and the rest folded away."""
    if len(names) <= _NAMED + 1:
        return element("path", ", ".join(names) or "-")
    more = f" and {len(names) - _NAMED} more"
    return element("folded", ", ".join(names[:_NAMED]), more, ", ".join(names[_NAMED:]))
