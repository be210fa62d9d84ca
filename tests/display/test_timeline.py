"""The time line of a step is as long as its estimate and as busy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pages import GUESS, looped, page, report, text

from meshwright.display.moments import COMPUTE, MEMORY, Span, moments_of, record
from meshwright.display.page.timeline import SLOTS, slots_of
from meshwright.hlo.collectives import Collective
from meshwright.hlo.costs import Loop, Operation
from meshwright.hlo.links import AxisLink
from meshwright.hlo.schedule import Clock, run
from meshwright.hlo.text import Array
from meshwright.targets.hardware import Hardware, Link


@pytest.mark.full_for("loop")
@pytest.mark.parametrize("result", [report, looped], ids=["report", "loop"])
def test_the_time_line_is_as_long_as_the_estimate_and_as_busy(result):
    moments = moments_of(result())
    estimate = result().estimate
    assert moments.length_s == pytest.approx(estimate.step_time_s)

    def busy(lane):
        return sum(span.end_s - span.begin_s for span in moments.spans if span.lane == lane)

    for axes, time_s in estimate.communication_s:
        assert busy(axes) == pytest.approx(time_s)
    # One thing at a time: what the device does and waits for is all of the step.
    assert busy(COMPUTE) + busy(MEMORY) + estimate.waiting_s == pytest.approx(moments.length_s)


def product(name, **more):
    return Operation(name, "dot", f"jvp({name})/dot", flops=1e9, dtype="float32", **more)


def test_a_collective_that_is_begun_early_runs_beside_other_work():
    array = Array("float32", (250_000_000,), 32)
    talk = Collective("all-gather", (array,), ((0, 1),), ("batch",), 1, "jvp(gathered)/x", 0, 0)
    program = (
        Operation("start", "all-gather-start", "", collectives=(talk,)),
        product("first"),
        Operation("done", "all-gather-done", "", ends="start"),
        Loop("loop", 3, (product("inner"),)),
    )
    clock = Clock(GUESS, "cpu", (AxisLink("batch", 2, Link("shared", "shared", 1e9)),))
    moments = record(program, clock)
    assert moments.length_s == pytest.approx(run(program, clock).length) == pytest.approx(4.0)
    assert moments.spans[0] == Span(("batch",), 0.0, 0.5, "gathered", "forward")
    assert [(span.layer, span.begin_s, span.end_s) for span in moments.spans[1:]] == [
        ("first", 0.0, 1.0),
        ("inner", 1.0, 2.0),
        ("inner", 2.0, 3.0),
        ("inner", 3.0, 4.0),
    ]


def test_a_long_loop_is_drawn_once_and_stays_as_long():
    clock = Clock(GUESS, "cpu", ())
    moments = record((Loop("loop", 100_000, (product("inner"),)),), clock)
    assert moments.spans == (Span(COMPUTE, 0.0, 100_000.0, "inner", "forward"),)


def test_the_columns_of_a_lane_hold_all_of_its_time():
    spans = [Span(COMPUTE, 0.1, 0.35, "a", "forward"), Span(COMPUTE, 0.35, 0.9, "b", "backward")]
    slots = slots_of(spans, 1.0)
    widths = [sum(slot.shares.get(p, 0.0) for slot in slots) for p in ("forward", "backward")]
    assert widths == pytest.approx([0.25 * SLOTS, 0.55 * SLOTS])
    assert all(sum(slot.shares.values()) <= 1 + 1e-9 for slot in slots)


def test_without_the_numbers_of_the_hardware_the_missing_ones_are_named():
    result = replace(report(), hardware=Hardware("bare"))
    unknown = replace(report().estimate, step_time_s=None, missing=("links.shared.bytes_per_s",))
    visible = text(page(replace(result, estimate=unknown)))
    assert "No time line" in visible
    assert "links.shared.bytes_per_s" in visible
