"""What a step would take, and its price, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...units import bytes_text, seconds_text, share_text
from ..figures import how_to_know, time_figures
from .columns import Columns, Line, Paragraphs, paragraphs

if TYPE_CHECKING:
    from ...planning.estimate import Estimate
    from ...planning.throughput import Price

_LAYERS = 10


def estimate_text(estimate: Estimate) -> Paragraphs:
    """The estimate with its heaviest instructions and layers."""
    figures = [(name, text, meaning) for name, _, text, meaning in time_figures(estimate)]
    if estimate.missing:
        figures.append(("unknown", "", ", ".join(estimate.missing) + how_to_know(estimate.target)))
    instructions = [
        (
            "unknown" if estimate.missing else seconds_text(row.time_s),
            f"{'?' if row.count is None else row.count} x",
            row.opcode,
            f"{row.layer or '-'} ({row.phase})",
        )
        for row in estimate.heaviest
    ]
    layers = [
        (
            share_text(layer.flops / estimate.flops if estimate.flops else 0.0),
            bytes_text(layer.bytes),
            layer.layer or "-",
        )
        for layer in estimate.layers[:_LAYERS]
    ]
    by = f"by the numbers of {estimate.hardware}, one step of one device"
    return paragraphs(
        Line(f"estimate for {estimate.target} {by}", "bold"),
        Columns(figures, right=(1,)),
        "  heaviest instructions",
        Columns(instructions, right=(0, 1), indent=4) if instructions else [],
        "  heaviest layers",
        Columns(layers, right=(0, 1), indent=4) if layers else [],
        [f"  assumed: {assumption}" for assumption in estimate.assumptions],
    )


def price_text(price: Price) -> str:
    """The price in one line."""
    parts = [f"at {price.per_device_hour:g} for a device and hour: {price.per_step:.4g} for a step"]
    if price.per_million_samples is not None:
        parts.append(f"{price.per_million_samples:.4g} for a million samples")
    if price.per_million_tokens is not None:
        parts.append(f"{price.per_million_tokens:.4g} for a million tokens")
    return ", ".join(parts)
