"""What to know of stages that differ, beside how they were cut."""

from __future__ import annotations

import math

from ..layouts.placement import Placement
from ..units import bytes_text
from .parts import listed
from .segments import Segments

_WORTH_SAYING = 4096  # bytes that are passed on whole


def notes_of(segments: Segments, placement: Placement, rows: int, count: int) -> tuple[str, ...]:
    """Notes on a step of ``count`` micro-batches of ``rows`` rows."""
    return *_without_rows(segments, placement), *_of_micro_batches(segments, rows, count)


def _without_rows(segments: Segments, placement: Placement) -> tuple[str, ...]:
    """A note on what crosses whole where the batch is split."""
    packed, pieces = segments.packed, placement.batch_shards
    nbytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in packed.shapes if a.shape[0] == 1)
    if pieces == 1 or nbytes < _WORTH_SAYING:
        return ()
    return (
        f"{bytes_text(nbytes)} of what a stage passes on of a micro-batch have no dim of its rows "
        f"in front, so each of the {pieces} pieces of the batch passes on all of them",
    )


def _of_micro_batches(segments: Segments, rows: int, count: int) -> tuple[str, ...]:
    """A note on statistics that a normalization takes of a part of the batch."""
    paths = segments.line.statistics
    if not paths or count == 1:
        return ()
    return (
        f"{listed(paths)}: statistics are those of a micro-batch of {rows} rows. Those of the "
        "whole batch are not possible in a pipeline, where a layer would wait for all of its "
        "micro-batches. Use micro_batches=1, GroupNormalization, or the devices for the batch",
    )
