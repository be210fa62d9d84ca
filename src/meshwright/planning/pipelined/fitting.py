"""Which stage of a pipeline is too large for a device, by how much, and what would help."""

from __future__ import annotations

from ...units import bytes_text
from ..report import DryRun


def what_does_not_fit(run: DryRun) -> str:
    """The largest stage of a step that does not fit; empty for one that does.

    All devices run one program, so each has room for what the largest stage holds.
    """
    if run.fits is not False or not run.stages:
        return ""
    largest = max(run.stages, key=lambda share: share.held_bytes)
    free = run.memory.free_bytes
    lacks = f"lacks {bytes_text(-free)}" if free is not None else "has too little memory"
    ways = {
        "stage": "Use more stages or more micro-batches, or move layers off it with cuts=",
        "branches": "Use a larger axis, or stages: mw.Pipeline",
    }[largest.kind]
    return (
        f"a device {lacks}. Each device has room for the largest share of all, that of "
        f"{largest.kind} {largest.stage}: {bytes_text(largest.held_bytes)} of weights and slots. "
        f"{ways}"
    )
