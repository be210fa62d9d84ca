"""The time line of a step: a lane for compute, for memory, and for the axes that carry something.

A lane is cut into slots. A column in it is as high as the lane is busy during that slot, and
stacked by the part of the step: thousands of instructions become a picture that stays small.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...units import bytes_text, flops_text, seconds_text, share_text
from ..tables import how_to_know
from .bars import key
from .grid import Cell, Column, grid, spelled
from .layers import PAINTS
from .markup import Html, section, tag
from .moments import COMPUTE, MEMORY, Moments, Span, moments_of

if TYPE_CHECKING:
    from ..estimate import Estimate
    from ..report import DryRun

SLOTS = 400
_WIDE, _HIGH = 2, 40  # of a slot, in the units of the picture
_LEVELS = 20  # to which the height of a column is rounded, so that neighbours join
_MOST_TITLES = 120  # of a lane, shown where the reader points
_LABELLED_SLOTS = SLOTS // 12

_Lane = str | tuple[str, ...]


def time_section(run: DryRun) -> Html | None:
    """The section on time."""
    if run.estimate is None:
        return None
    moments = moments_of(run)
    return section(
        "time",
        "Time of one step, estimated",
        _missing(run.estimate, run.is_analytic) if moments is None else _picture(moments),
        tag(
            "p",
            f"The picture shows two of {run.blocks.count} equal blocks, the numbers are of all.",
        )
        if run.blocks is not None and moments is not None
        else None,
        _numbers(run.estimate),
    )


def _missing(found: Estimate, is_analytic: bool) -> Html:
    if not found.missing and is_analytic:
        return tag("p", "No time line: nothing was compiled.")
    if found.errors:
        return tag("p", "No time line: work is missing from the compiled program.")
    if not found.missing:
        return tag("p", "The step does nothing that takes time.")
    return tag(
        "p",
        f"No time line: no {', '.join(found.missing)} in the hardware table of {found.hardware}"
        f"{how_to_know(found.target)}",
        class_="warning",
    )


def _numbers(found: Estimate) -> Html:
    bound = f"bound by {found.bound_by}" if found.bound_by else ""
    flops = f"{flops_text(found.flops)} in one device"
    rows: list[tuple[str, float | None, str]] = [
        ("step time", found.step_time_s, bound),
        ("compute", found.compute_s, flops),
        ("memory", found.memory_s, f"{bytes_text(found.bytes)} read and written"),
    ]
    rows += [
        ("collectives", time_s, f"over {spelled(axes)}") for axes, time_s in found.communication_s
    ]
    if found.waiting_s is not None:
        rows.append(("waiting", found.waiting_s, "of the collectives, with nothing to do beside"))
    if found.overlap_s:
        rows.append(("overlap", found.overlap_s, "of the collectives, beside other work"))
    told = [(name, Cell(seconds_text(time_s), time_s or 0.0), why) for name, time_s, why in rows]
    if found.mfu is not None:
        told.append(("model FLOPs", Cell(share_text(found.mfu), found.mfu), "of the peak (MFU)"))
    columns = (Column("what"), Column("time", "num"), Column("which is"))
    return grid("time-table", "Times, each as if it were alone", columns, told, None)


# The picture


class Slot(NamedTuple):
    """How much of a slot of a lane each part of the step keeps busy, from 0 to 1."""

    shares: dict[str, float]
    layers: dict[tuple[str, str], float]  # (layer, phase) -> share

    @property
    def busiest(self) -> tuple[str, str] | None:
        """The layer and phase that take most of it; none if it is idle."""
        return max(self.layers, key=lambda each: self.layers[each], default=None)


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


def _picture(moments: Moments) -> Html:
    by_lane: dict[_Lane, list[Span]] = defaultdict(list)
    for span in moments.spans:
        by_lane[span.lane].append(span)
    talk = sorted(lane for lane in by_lane if isinstance(lane, tuple))
    lanes: list[_Lane] = [lane for lane in (COMPUTE, MEMORY) if lane in by_lane]
    rows = [_lane(lane, by_lane[lane], moments.length_s) for lane in [*lanes, *talk]]
    told = (
        "Each column is as high as its lane is busy. The device computes or waits for memory, one "
        "thing at a time; collectives run beside it where the schedule lets them."
    )
    return tag(
        "figure",
        _phases(moments),
        rows,
        _ruler(moments.length_s),
        key(PAINTS),
        tag("figcaption", told),
        class_="timeline",
    )


def _lane(lane: _Lane, spans: Sequence[Span], length_s: float) -> Html:
    slots = slots_of(spans, length_s)
    busy_s = sum(span.end_s - span.begin_s for span in spans)
    name = spelled(lane) if isinstance(lane, tuple) else lane
    kind = "collectives over " if isinstance(lane, tuple) else ""
    told = f"{seconds_text(busy_s)}, {share_text(busy_s / length_s)} of the step"
    drawn = tag(
        "svg",
        tag("title", f"{kind}{name}: busy {told}"),
        [tag("path", d=path, class_=f"f-{paint}") for path, paint in _columns(slots)],
        _titles(slots, length_s),
        viewBox=f"0 0 {_WIDE * SLOTS} {_HIGH}",
        preserveAspectRatio="none",
        role="img",
    )
    label = tag("div", tag("b", kind, name), tag("small", told), class_="lanename")
    return tag("div", label, drawn, class_="lane")


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


def _titles(slots: Sequence[Slot], length_s: float) -> Iterator[Html]:
    """What the reader sees who points at a lane: the layer that is busy there."""
    begin, found = 0, []
    for busiest, run in itertools.groupby(slot.busiest for slot in slots):
        count = len(list(run))
        if busiest is not None:
            found.append((count, begin, busiest))
        begin += count
    for count, begin, (layer, phase) in sorted(found, reverse=True)[:_MOST_TITLES]:
        first, last = (length_s * slot / SLOTS for slot in (begin, begin + count))
        at = f"{seconds_text(first)} to {seconds_text(last)}"
        title = tag("title", f"{layer or 'no layer'}, {phase}: {at}")
        yield tag(
            "rect",
            title,
            x=_WIDE * begin,
            y=0,
            width=_WIDE * count,
            height=_HIGH,
            class_="point",
        )


def _phases(moments: Moments) -> Html:
    """A strip over the lanes that names the part of the step, where it is one for long enough."""
    slots = slots_of(moments.spans, moments.length_s)
    paints = dict(PAINTS)
    most = [max(slot.shares, key=lambda p: slot.shares[p], default="") for slot in slots]
    strip, begin = [], 0
    for phase, run in itertools.groupby(most):
        count = len(list(run))
        if phase:
            strip.append(
                tag(
                    "span",
                    tag("b", phase) if count >= _LABELLED_SLOTS else None,
                    class_=f"part p-{paints[phase]}",
                    style=f"left:{100 * begin / SLOTS:g}%;width:{100 * count / SLOTS:g}%",
                    title=phase,
                )
            )
        begin += count
    label = tag("div", tag("b", "mostly"), class_="lanename")
    return tag("div", label, tag("div", strip, class_="strip"), class_="lane phases")


def _ruler(length_s: float) -> Html:
    marks = [
        tag("span", seconds_text(length_s * place / 4), style=f"left:{25 * place}%")
        for place in range(5)
    ]
    return tag(
        "div", tag("div", class_="lanename"), tag("div", marks, class_="ruler"), class_="lane"
    )
