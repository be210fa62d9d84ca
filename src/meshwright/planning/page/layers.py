"""FLOPs of each layer, by the part of the step, and the instructions that take longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...hlo.alike import grouped, pattern, without_numbers
from ...units import bytes_text, flops_text, seconds_text, share_text
from .bars import Part, bar, key
from .grid import Cell, Column, grid
from .markup import Child, Html, breakable, section, tag

if TYPE_CHECKING:
    from ...hlo.costs import LayerCost
    from ..estimate import Estimate, Heavy

# What belongs to no pass is chiefly the update of the parameters.
PAINTS = (("forward", "blue"), ("backward", "orange"), ("recompute", "pink"), ("other", "grey"))


def layers_section(found: Estimate | None) -> Html | None:
    """The section on the work of the layers."""
    if found is None or not found.layers:
        return None
    layers = _rows(found.layers)
    whole = max(1.0, *(len(row) * row[0].flops for row in layers))
    columns = (
        Column("layer", "path"),
        Column("how many", "num"),
        Column("FLOPs", "num"),
        Column("of all", "num"),
        Column("by pass"),
        Column("bytes", "num"),
    )
    rows = [_row(each, whole, found.flops) for each in layers]
    said = f"{flops_text(found.flops)}s of products and convolutions in one device and one step"
    if found.recompute_flops:
        said += f", {flops_text(found.recompute_flops)}s of them computed again"
    if found.replicated_share is not None:
        said += (
            f"; {share_text(found.replicated_share)} of all devices' FLOPs are replicated: others "
        )
        said += "compute them as well"
    return section(
        "layers",
        "FLOPs of the layers",
        tag("p", f"{said}."),
        key(PAINTS),
        grid("layers-table", "FLOPs and bytes read and written, of one device", columns, rows),
        _heaviest(found.heaviest),
    )


def _rows(layers: Sequence[LayerCost]) -> list[list[LayerCost]]:
    """Layers of equal blocks, which compute the same, together; the heaviest row first."""
    rows = grouped(
        layers,
        lambda each: (
            without_numbers(each.layer),
            *(each.forward_flops, each.backward_flops, each.recompute_flops, each.other_flops),
        ),
    )
    return sorted(rows, key=lambda row: (-sum(e.flops for e in row), -sum(e.bytes for e in row)))


def _row(found: Sequence[LayerCost], whole: float, total: float) -> tuple[Cell, ...]:
    first, count = found[0], len(found)
    sizes = (first.forward_flops, first.backward_flops, first.recompute_flops, first.other_flops)
    parts = [
        Part(name, count * size, flops_text(count * size), paint)
        for (name, paint), size in zip(PAINTS, sizes, strict=True)
    ]
    flops, nbytes = count * first.flops, sum(each.bytes for each in found)
    return (
        Cell(_names([each.layer or "-" for each in found])),
        Cell(f"{count} ×", count),
        Cell(flops_text(flops), flops),
        Cell(share_text(flops / total if total else 0.0), flops),
        Cell(bar(parts, whole, "FLOPs"), flops),
        Cell(bytes_text(nbytes), nbytes),
    )


def _names(layers: Sequence[str]) -> Child:
    if len(layers) == 1:
        return breakable(layers[0])
    return tag("details", tag("summary", breakable(pattern(layers))), ", ".join(layers))


def _heaviest(heaviest: Sequence[Heavy]) -> Html:
    columns = (
        Column("instruction", "path"),
        Column("layer", "path"),
        Column("when"),
        Column("count", "num"),
        Column("time", "num"),
        Column("FLOPs", "num"),
        Column("bytes", "num"),
    )
    rows = [
        (
            Cell(each.opcode),
            Cell(breakable(each.layer or "-")),
            Cell(each.phase),
            Cell("?" if each.count is None else f"{each.count:,}", each.count or 0),
            Cell(seconds_text(each.time_s) if each.time_s else "-", each.time_s),
            Cell(flops_text(each.flops) if each.flops else "-", each.flops),
            Cell(bytes_text(each.bytes), each.bytes),
        )
        for each in heaviest
    ]
    return tag(
        "details",
        tag("summary", f"The {len(rows)} heaviest instructions"),
        grid("heaviest-table", "Heaviest instructions, all their runs together", columns, rows),
    )
