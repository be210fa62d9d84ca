"""What to know of stages, beside how they were cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from ..jaxprs.row_sums import Meeting, Sum, of_rows
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
        "micro-batches. Use micro_batches=1, GroupNormalization, or all devices for the batch",
    )


class LossNote(NamedTuple):
    """What a loss is that is not one device's in micro-batches; ``is_sum`` if it is a sum, of which
    a step takes the mean."""

    text: str
    is_sum: bool = False


class TracedLoss(NamedTuple):
    """The equations of a loss, and the variables with rows in front that they begin with."""

    eqns: Sequence[Any]
    read: Sequence[Var]
    loss: Any

    @property
    def of_rows(self) -> Sum | Meeting | None:
        """What it is of the rows; ``None`` where nothing is certain."""
        sizes = {var.aval.shape[0] if var.aval.shape else 0 for var in self.read}
        if len(sizes) != 1 or min(sizes) < 2:
            return None
        return of_rows(self.eqns, dict.fromkeys(self.read, 0), self.loss)


def note_of_loss(
    what: Sum | Meeting | None,
    rows: int,
    count: int,
    reduction: Literal["mean", "sum"],
    what_of_more: Callable[[], Sum | Meeting | None] | None = None,
) -> LossNote | None:
    """A note on the loss of one of ``count`` micro-batches of ``rows`` rows; ``None`` where nothing
    is certain.

    ``what_of_more`` is what it is with more rows: a mean is then divided by another number.
    """
    if count == 1:
        return None
    if isinstance(what, Meeting):
        mean = "the sum" if reduction == "sum" else "the mean"
        return LossNote(
            f"rows meet in the loss before they are summed ({what.kind}), so it is taken of each "
            f"micro-batch by itself: {mean} of those is not the loss of the whole batch"
        )
    if what is None or None in what.scales or reduction == "sum":
        return None
    if not what.is_plain:
        is_like_a_mean = any(_divides(rows, scale) for scale in what.scales)
        if is_like_a_mean or what_of_more is None or what_of_more() != what:
            return None
    text = (
        f"the loss is a sum over rows, and a step takes the mean of {count} micro-batches, which "
        f"is 1/{count} of it. Take a mean over the rows, as jnp.mean does, or multiply the loss by "
        f"{count}"
    )
    return LossNote(text, is_sum=True)


def _divides(rows: int, scale: float | None) -> bool:
    """Whether a number is one by a multiple of the rows, as a mean's is."""
    times = 1 / (abs(scale) * rows) if scale else 0.0
    return times > 0.5 and abs(times - round(times)) < 1e-4 * times
