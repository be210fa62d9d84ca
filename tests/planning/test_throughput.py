"""Samples and tokens per second, prices, and the time line as a trace."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from models import shapes as shape
from optax import sgd

import meshwright as mw
from meshwright.display.moments import moments_of
from meshwright.display.page.memory import heights_of, in_slots
from meshwright.display.text.beside import row_cells
from meshwright.targets.hardware import Hardware, Link

ROWS, LENGTH, WIDTH = 16, 8, 32
NUMBERS = Hardware("h", (("float32", 1e9),), None, 1e9, (Link("shared", "shared", 1e9, 0.0),))


@pytest.fixture(scope="module")
def report():
    def loss(params, ids):
        x = params["table"][ids]
        with jax.named_scope("up"):
            x = jax.nn.relu(x @ params["up"])
        return jnp.mean((x @ params["down"]) ** 2)

    params = {"table": shape(64, WIDTH), "up": shape(WIDTH, 64), "down": shape(64, WIDTH)}
    program = mw.jax_program(loss, params, sgd(0.1), name="net")
    placement = mw.Placement.of(mw.Mesh({"batch": 8}))
    batch = shape(ROWS, LENGTH, dtype="int32")
    return mw.dry_run(program, batch, strategy=placement, target="cpu:8", hardware=NUMBERS)


def test_a_step_is_worth_its_rows_and_tokens(report):
    assert report.samples_per_s == ROWS / report.step_time_s
    assert report.tokens_per_s == ROWS * LENGTH / report.step_time_s
    assert f"{ROWS * LENGTH} in a step" in str(report)
    result = report.price(1.8)
    assert result.per_step == pytest.approx(8 * 1.8 / 3600 * report.step_time_s)
    assert result.per_million_tokens == pytest.approx(1e6 / ROWS / LENGTH * result.per_step)
    assert result.per_million_samples == pytest.approx(LENGTH * result.per_million_tokens)


def test_without_a_time_there_is_no_price_and_no_trace(report, tmp_path):
    missing = replace(report.estimate, step_time_s=None, missing=("x",))
    timeless = replace(report, estimate=missing)
    assert timeless.samples_per_s is None
    with pytest.raises(mw.DataError, match="needs its time, which this report does not have"):
        timeless.price(1.0)
    with pytest.raises(mw.DataError, match="0 or more an hour; received -1"):
        report.price(-1)
    with pytest.raises(mw.DataError, match="no time line to trace: x"):
        timeless.save_trace(tmp_path / "trace.json")


def test_a_trace_has_the_spans_of_the_time_line(report, tmp_path):
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "collectives over batch"} <= {*names.values()}
    moments = moments_of(report)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(moments.spans)
    assert any(span["name"] == "up" for span in spans)
    lanes = defaultdict(list)
    for span in spans:
        lanes[span["tid"]].append(span)
    for lane in lanes.values():  # one after the other
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(lane))
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(
        1e6 * report.step_time_s, rel=0.01
    )


def test_the_course_of_the_memory_has_the_peak_of_the_tensors(report):
    heights = heights_of(report.compiled.text)
    assert max(heights) == max(in_slots(heights, 7)) == report.alive_bytes
    assert in_slots([], 3) == []
    assert "Memory in the course of a step" in report.to_html()


def test_two_reports_are_shown_side_by_side(report, tmp_path):
    slower = replace(
        report,
        axes=(("batch", 4), ("model", 2)),
        estimate=replace(report.estimate, step_time_s=2 * report.step_time_s),
    )
    pair = report.beside(slower)
    rows = {row.name: row for row in pair.rows}
    assert rows["step time"].ratio == pytest.approx(2)
    assert rows["samples per second"].ratio == pytest.approx(0.5)
    assert rows["peak"].first == rows["peak"].second == report.peak_bytes
    assert pair.titles == ("batch=8", "batch=4, model=2")
    lines = str(pair).splitlines()
    assert lines[:2] == ["net on cpu:8 (batch=8)", "net on cpu:8 (batch=4, model=2)"]
    assert lines[3].split() == ["batch=8", "batch=4,", "model=2", "ratio"]
    pair.save(tmp_path / "pair.html")
    visible = (tmp_path / "pair.html").read_text()
    assert all(cell in visible for row in pair.rows for cell in row_cells(row))
    with pytest.raises(mw.DataError, match="or beside another dry run; received something of type"):
        report.beside(3)
