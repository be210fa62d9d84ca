"""FLOPs of each layer, by the part of the step, and the instructions that take longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...equal_layers import grouped, pattern, without_numbers
from ...units import bytes_text, flops_text, seconds_text, share_text
from .elements import Cell, Column, Part, element

if TYPE_CHECKING:
    from markupsafe import Markup

    from ...hlo.costs import LayerCost
    from ...planning.estimate import Estimate, Heavy

# What belongs to no pass is chiefly the update of the parameters.
PAINTS = (("forward", "blue"), ("backward", "orange"), ("recompute", "pink"), ("other", "grey"))


def layers_section(estimate: Estimate | None) -> dict[str, object] | None:
    """The section on the work of the layers."""
    if estimate is None or not estimate.layers:
        return None
    text = f"{flops_text(estimate.flops)}s of products and convolutions in one device and one step"
    if estimate.recompute_flops:
        text += f", {flops_text(estimate.recompute_flops)}s of them computed again"
    if estimate.replicated_share is not None:
        text += f"; {share_text(estimate.replicated_share)} of all devices' FLOPs are replicated: "
        text += "others compute them as well"
    layers = _grouped(estimate.layers)
    whole = max(1.0, *(len(row) * row[0].flops for row in layers))
    columns = (
        Column("layer", "path"),
        Column("how many", "num"),
        Column("FLOPs", "num"),
        Column("of all", "num"),
        Column("by pass"),
        Column("bytes", "num"),
    )
    rows = [_row(layer, whole, estimate.flops) for layer in layers]
    caption = "FLOPs and bytes read and written, of one device"
    return {
        "text": f"{text}.",
        "paints": PAINTS,
        "table": element("table", "layers-table", caption, columns, rows),
        "heaviest": _heaviest(estimate.heaviest),
        "heaviest_count": len(estimate.heaviest),
    }


def passes(layer: LayerCost) -> tuple[float, float, float, float]:
    """FLOPs in the order of the paints."""
    return layer.forward_flops, layer.backward_flops, layer.recompute_flops, layer.other_flops


def _grouped(layers: Sequence[LayerCost]) -> list[list[LayerCost]]:
    """Layers of equal blocks, which compute the same, together; the heaviest row first."""
    rows = grouped(layers, lambda layer: (without_numbers(layer.layer), passes(layer)))
    return sorted(rows, key=lambda row: (-sum(e.flops for e in row), -sum(e.bytes for e in row)))


def _row(layers: Sequence[LayerCost], whole: float, total: float) -> tuple[Cell, ...]:
    first, count = layers[0], len(layers)
    parts = [
        Part(name, count * size, flops_text(count * size), paint)
        for (name, paint), size in zip(PAINTS, passes(first), strict=True)
    ]
    flops, nbytes = count * first.flops, sum(layer.bytes for layer in layers)
    paths = [layer.layer or "-" for layer in layers]
    return (
        Cell(element("several", paths, pattern(paths))),
        Cell(f"{count} ×", count),
        Cell(flops_text(flops), flops),
        Cell(share_text(flops / total if total else 0.0), flops),
        Cell(element("bar", parts, whole, "FLOPs"), flops),
        Cell(bytes_text(nbytes), nbytes),
    )


def _heaviest(heaviest: Sequence[Heavy]) -> Markup:
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
            layer.opcode,
            element("path", layer.layer or "-"),
            layer.phase,
            Cell("?" if layer.count is None else f"{layer.count:,}", layer.count or 0),
            Cell(seconds_text(layer.time_s) if layer.time_s else "-", layer.time_s),
            Cell(flops_text(layer.flops) if layer.flops else "-", layer.flops),
            Cell(bytes_text(layer.bytes), layer.bytes),
        )
        for layer in heaviest
    ]
    return element(
        "table", "heaviest-table", "Heaviest instructions, all their runs together", columns, rows
    )
