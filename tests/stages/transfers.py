"""What a dry run says of the transfers between stages."""

from __future__ import annotations

from collections import Counter

from meshwright import DryRun


def permutes(report: DryRun) -> Counter[int]:
    """Transfers to a neighbour by their bytes per device; scalars apart."""
    counted = Counter[int]()
    for sent in report.collectives:
        if sent.kind == "collective-permute" and sent.bytes_per_device > 8:
            assert sent.axes == ("stage",)
            counted[sent.bytes_per_device] += sent.count
    return counted
