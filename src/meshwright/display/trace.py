"""The time line of a report as a trace: Chrome's format, which Perfetto reads.

(Trace Event Format, Google: complete events with a begin and a length in microseconds.)
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from .moments import COMPUTE, MEMORY, Moments, moments_of

if TYPE_CHECKING:
    from ..planning.report import DryRun

_NO_LINE = (
    "this report has no time line to trace: {}. A trace needs a compiled step "
    "and all numbers of the hardware (hardware=)."
)


def trace_of(run: DryRun) -> str:
    """The text of the file. Raises :class:`~meshwright.DataError` where there is no time line."""
    moments = moments_of(run)
    if moments is None:
        missing = () if run.estimate is None else run.estimate.missing
        why = run.not_compiled or ", ".join(missing) or "the step does not fit or was misread"
        raise DataError(_NO_LINE.format(why))
    title = f"{run.name} on {run.target}, one device, estimated"
    return json.dumps({"traceEvents": events(moments, title), "displayTimeUnit": "ms"})


def events(moments: Moments, title: str) -> list[dict[str, Any]]:
    """A thread for each lane: compute, memory, and the axes that collectives run over."""
    lanes = dict.fromkeys(span.lane for span in moments.spans)
    order = sorted(lanes, key=lambda lane: (lane != COMPUTE, lane != MEMORY, str(lane)))
    number = {lane: place for place, lane in enumerate(order, start=1)}
    named = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    named += [
        {"ph": "M", "pid": 1, "tid": place, "name": "thread_name", "args": {"name": _name(lane)}}
        for lane, place in number.items()
    ]
    return named + [
        {
            "ph": "X",
            "pid": 1,
            "tid": number[span.lane],
            "name": span.layer or span.phase,
            "cat": span.phase,
            "ts": round(1e6 * span.begin_s, 4),
            "dur": round(1e6 * (span.end_s - span.begin_s), 4),
        }
        for span in sorted(moments.spans, key=lambda span: (number[span.lane], span.begin_s))
    ]


def _name(lane: str | tuple[str, ...]) -> str:
    return lane if isinstance(lane, str) else f"collectives over {', '.join(lane)}"
