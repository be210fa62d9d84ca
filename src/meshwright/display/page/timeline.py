"""The time line of a step: a lane for compute, for memory, and for the axes that carry something.

A lane is cut into slots. A column in it is as high as the lane is busy during that slot, and
stacked by the part of the step: thousands of instructions become a picture that stays small.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...units import seconds_text, share_text
from ..figures import axes_list, how_to_know, time_figures
from ..moments import COMPUTE, MEMORY, Moments, Span, moments_of
from .elements import Cell, Column, element
from .layers import PAINTS

if TYPE_CHECKING:
    from ...planning.estimate import Estimate
    from ...planning.report import DryRun

SLOTS = 400
_LITTLE = 0.01  # of a step
_WIDE, _HIGH = 2, 40  # of a slot, in the units of the picture
_LEVELS = 20  # to which the height of a column is rounded, so that neighbours join
_MOST_TITLES = 120  # of a lane, shown where the reader points
_LABELLED_SLOTS = SLOTS // 12

_Lane = str | tuple[str, ...]


def time_section(run: DryRun) -> dict[str, object] | None:
    """The section on time."""
    if run.estimate is None:
        return None
    moments = moments_of(run)
    columns = (Column("what"), Column("time", "num"), Column("which is"))
    rows = [
        (name, Cell(text, value or 0.0), meaning)
        for name, value, text, meaning in time_figures(run.estimate, not run.is_analytic)
    ]
    return {
        "says": time_says(run.estimate),
        "missing": _missing(run.estimate, run.is_analytic) if moments is None else None,
        "line": None if moments is None else _line(moments),
        "blocks": None if run.blocks is None or moments is None else run.blocks.count,
        "figures": element(
            "table", "time-table", "Times, each as if it were alone", columns, rows, None
        ),
    }


def time_says(estimate: Estimate) -> str:
    """Where most of a step's time goes, and what its collectives cost; empty if not known."""
    whole = estimate.step_time_s
    if not whole or estimate.bound_by is None:
        return ""
    sentence = f"Most of the {seconds_text(whole)} of a step goes to {estimate.bound_by}"
    if not estimate.communication_s:
        return f"{sentence}; it has no collectives."
    waiting_s = estimate.waiting_s or 0.0
    if waiting_s < _LITTLE * whole:
        return f"{sentence}; collectives hide behind other work."
    return f"{sentence}; {share_text(waiting_s / whole)} of it is waiting for collectives."


def _missing(estimate: Estimate, is_analytic: bool) -> str:
    """Why there is no time line."""
    if estimate.missing:
        missing = ", ".join(estimate.missing)
        where = f"no {missing} in the hardware table of {estimate.hardware}"
        return f"No time line: {where}{how_to_know(estimate.target)}"
    if is_analytic:
        return "No time line: nothing was compiled."
    if estimate.errors:
        return "No time line: work is missing from the compiled program."
    return "The step does nothing that takes time."


# The picture


class Slot(NamedTuple):
    """How much of a slot of a lane each part of the step keeps busy, from 0 to 1."""

    shares: dict[str, float]
    layers: dict[tuple[str, str], float]  # (layer, phase) -> share

    @property
    def busiest(self) -> tuple[str, str] | None:
        """The layer and phase that take most of it; none if it is idle."""
        return max(self.layers, key=lambda layer: self.layers[layer], default=None)


def slots_of(spans: Iterable[Span], length_s: float) -> list[Slot]:
    """What a lane does during each slot.

    >>> half = slots_of([Span("compute", 0.0, 0.5, "net", "forward")], 1.0)
    >>> half[0].shares, half[-1].shares
    ({'forward': 1.0}, {})
    """
    slots = [Slot(defaultdict(float), defaultdict(float)) for _ in range(SLOTS)]
    for span in spans:
        begin, end = (SLOTS * at / length_s for at in (span.begin_s, span.end_s))
        for number in range(max(0, int(begin)), min(SLOTS, int(end) + 1)):
            share = min(end, number + 1) - max(begin, number)
            if share > 0:
                slots[number].shares[span.phase] += share
                slots[number].layers[span.layer, span.phase] += share
    return [Slot(dict(shares), dict(layers)) for shares, layers in slots]


def _line(moments: Moments) -> dict[str, object]:
    """Everything that the picture of the time line shows."""
    by_lane: dict[_Lane, list[Span]] = defaultdict(list)
    for span in moments.spans:
        by_lane[span.lane].append(span)
    talk = sorted(lane for lane in by_lane if isinstance(lane, tuple))
    lanes: list[_Lane] = [*(lane for lane in (COMPUTE, MEMORY) if lane in by_lane), *talk]
    return {
        "strip": list(_strip(moments)),
        "lanes": [_lane(lane, by_lane[lane], moments.length_s) for lane in lanes],
        "marks": [(25 * place, seconds_text(moments.length_s * place / 4)) for place in range(5)],
        "paints": PAINTS,
        "box": f"0 0 {_WIDE * SLOTS} {_HIGH}",
        "height": _HIGH,
    }


def _lane(lane: _Lane, spans: Sequence[Span], length_s: float) -> dict[str, object]:
    slots = slots_of(spans, length_s)
    busy_s = sum(span.end_s - span.begin_s for span in spans)
    return {
        "kind": "collectives over " if isinstance(lane, tuple) else "",
        "name": axes_list(lane) if isinstance(lane, tuple) else lane,
        "text": f"{seconds_text(busy_s)}, {share_text(busy_s / length_s)} of the step",
        "paths": list(_columns(slots)),
        "points": list(_points(slots, length_s)),
    }


def _columns(slots: Sequence[Slot]) -> Iterator[tuple[str, str]]:
    """One path for each part of the step, and its paint; parts stand on those before them."""
    feet = [0.0] * len(slots)
    for phase, paint in PAINTS:
        boxes = []
        for foot, slot in zip(feet, slots, strict=True):
            head = min(1.0, foot + slot.shares.get(phase, 0.0))
            boxes.append((round(_LEVELS * foot), round(_LEVELS * head)))
        feet = [min(1.0, f + s.shares.get(phase, 0.0)) for f, s in zip(feet, slots, strict=True)]
        path = "".join(_boxes(boxes))
        if path:
            yield path, paint


def _boxes(boxes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Runs of columns of one height as closed shapes."""
    unit, begin = _HIGH // _LEVELS, 0
    for (foot, head), run in itertools.groupby(boxes):
        width = _WIDE * len(list(run))
        if head > foot:
            high = unit * (head - foot)
            yield f"M{begin} {_HIGH - unit * head}h{width}v{high}h-{width}z"
        begin += width


def _points(slots: Sequence[Slot], length_s: float) -> Iterator[tuple[int, int, str]]:
    """What the reader sees who points at a lane, the layer that is busy there: where that begins,
    how wide it is, and the text."""
    begin, stretches = 0, []
    for busiest, run in itertools.groupby(slot.busiest for slot in slots):
        count = len(list(run))
        if busiest is not None:
            stretches.append((count, begin, busiest))
        begin += count
    for count, begin, (layer, phase) in sorted(stretches, reverse=True)[:_MOST_TITLES]:
        first, last = (length_s * slot / SLOTS for slot in (begin, begin + count))
        at = f"{seconds_text(first)} to {seconds_text(last)}"
        yield _WIDE * begin, _WIDE * count, f"{layer or 'no layer'}, {phase}: {at}"


def _strip(moments: Moments) -> Iterator[dict[str, object]]:
    """The part of the step that each stretch of it mostly is, named where it is long enough."""
    slots = slots_of(moments.spans, moments.length_s)
    paints, begin = dict(PAINTS), 0
    most = [max(slot.shares, key=lambda p: slot.shares[p], default="") for slot in slots]
    for phase, run in itertools.groupby(most):
        count = len(list(run))
        if phase:
            place = f"left:{100 * begin / SLOTS:g}%;width:{100 * count / SLOTS:g}%"
            is_named = count >= _LABELLED_SLOTS
            yield {"phase": phase, "paint": paints[phase], "place": place, "is_named": is_named}
        begin += count
