"""What to know of stages, beside how they were cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ..jaxprs.row_sums import Meeting, of_rows
from ..jaxprs.slices import Var
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


class LossNote(NamedTuple):
    """What a loss is that is not one device's in micro-batches; ``is_sum`` if it is a sum, of which
    a step takes the mean."""

    text: str
    is_sum: bool


def note_of_loss(
    eqns: Sequence[Any],
    read: Sequence[Var],
    loss: Any,
    count: int,
    reduction: Literal["mean", "sum"],
) -> LossNote | None:
    """A note on the loss of one of ``count`` micro-batches, whose equations begin with variables
    that have its rows in front; ``None`` where nothing is certain."""
    sizes = {var.aval.shape[0] if var.aval.shape else 0 for var in read}
    if count == 1 or len(sizes) != 1 or min(sizes) < 2:
        return None
    what = of_rows(eqns, dict.fromkeys(read, 0), loss)
    if isinstance(what, Meeting):
        text = (
            f"rows meet in the loss before they are summed ({what.kind}), so it is taken of each "
            f"micro-batch by itself: {'the sum' if reduction == 'sum' else 'the mean'} of those is "
            "not the loss of the whole batch"
        )
        return LossNote(text, is_sum=False)
    if what is None or not what.is_plain or reduction == "sum":
        return None
    text = (
        f"the loss is a sum over rows, and a step takes the mean of {count} micro-batches, which "
        f"is 1/{count} of it. Take a mean over the rows, as jnp.mean does, or multiply the loss by "
        f"{count}"
    )
    return LossNote(text, is_sum=True)
