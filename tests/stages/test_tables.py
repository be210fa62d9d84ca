"""Tick tables of every schedule: laws that hold for any number of stages and micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.stages.plan import NOTHING, TickPlan
from meshwright.stages.table import TickTable, Work, table_of

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("circular", 2), ("circular", 3), ("zero_bubble", 1)]


@st.composite
def tables(draw, schedules=SCHEDULES):
    schedule, repeats = draw(st.sampled_from(schedules))
    stages = draw(st.integers(1, 6))
    micros = draw(st.integers(1, 12))
    if schedule == "circular":
        micros *= stages
    return table_of(schedule, stages, micros, repeats)


@given(tables())
def test_every_pass_is_done_once_and_after_what_it_needs(table):
    assert table.faults() == []


@given(tables(), st.data())
def test_a_table_with_a_pass_moved_or_missing_is_found_out(table, data):
    tick, stage, work = data.draw(st.sampled_from(list(table.works())))
    rows = [[list(works) for works in row] for row in table.ticks]
    rows[tick][stage].remove(work)
    as_ticks = lambda rows: tuple(tuple(map(tuple, row)) for row in rows)  # noqa: E731
    if table.micro_batches * table.repeats * table.stages > 1 or work.kind != "weights":
        assert replace(table, ticks=as_ticks(rows)).faults()
    rows[tick][stage] += [work, work]
    assert replace(table, ticks=as_ticks(rows)).faults()


@given(tables())
def test_what_is_idle_is_as_the_formula_says(table):
    stages, passes = table.stages, table.micro_batches * table.repeats
    share = (stages - 1) / (passes + stages - 1)
    if table.schedule == "zero_bubble":
        plain = table_of("1f1b", stages, table.micro_batches)
        for costs in itertools.product((1.0, 1.5, 2.0), repeat=3):
            assert table.idle_share(*costs) <= plain.idle_share(*costs) + 1e-9
        if passes >= 2 * stages:
            assert table.idle_share() == pytest.approx((stages - 1) / (3 * passes + stages - 1))
        return
    for costs in itertools.product((1.0, 2.0), repeat=3):
        assert table.idle_share(*costs) == pytest.approx(share)


@pytest.mark.parametrize(("stages", "micros"), [(4, 16), (8, 32), (16, 64)])
def test_zero_bubble_waits_at_most_six_tenths_of_1f1b(stages, micros):
    plain, zero = (table_of(name, stages, micros) for name in ("1f1b", "zero_bubble"))
    assert zero.idle_share() <= 0.6 * plain.idle_share()
    assert max(zero.in_flight) <= max(plain.in_flight)


@given(st.integers(1, 6), st.integers(1, 4))
def test_what_1f1b_keeps_does_not_grow_with_micro_batches(stages, more):
    few, many = (table_of("1f1b", stages, stages * (1 + n)) for n in (1, 1 + more))
    assert few.in_flight == many.in_flight
    assert many.in_flight == tuple(min(2 * (stages - 1 - s) + 1, 2 * stages) for s in range(stages))
    assert table_of("gpipe", stages, 7).in_flight == (7,) * stages


@given(tables(), st.booleans())
def test_a_plan_gives_every_pass_what_was_put_there_for_it(table, keeps_results):
    """Runs the plan with names in place of arrays, as the compiled step runs it with arrays."""
    plan = TickPlan.of(table, keeps_results)
    inputs, gradients, cuts = (
        [[None] * (count + 1) for _ in range(table.stages)]
        for count in (plan.slots, plan.gradient_slots, plan.cut_slots)
    )
    last = table.stages * table.repeats - 1
    sent = [None] * table.stages
    returned = [None] * table.stages
    record = []
    for tick in range(len(table.ticks)):
        out, back = [None] * table.stages, [None] * table.stages
        for stage in range(table.stages):
            row = plan.rows._make(values[tick, stage].tolist() for values in plan.rows)
            inputs[stage][row.arriving] = sent[stage - 1]
            gradients[stage][row.arriving_gradient] = returned[(stage + 1) % table.stages]
            if row.forward != NOTHING:
                first = stage == 0 and row.forward_repeat == 0
                x = (row.forward, 0) if first else inputs[stage][row.forward_slot]
                assert x == (row.forward, row.forward_repeat * table.stages + stage)
                inputs[stage][row.forward_slot] = x
                out[stage] = x[0], x[1] + 1
                gradients[stage][row.result_slot] = x if keeps_results else None
                record.append((tick, stage, Work("forward", row.forward, row.forward_repeat)))
            if row.backward != NOTHING:
                depth = row.backward_repeat * table.stages + stage
                assert inputs[stage][row.backward_slot] == (row.backward, depth)
                if depth < last or keeps_results:
                    arrived = gradients[stage][row.gradient_slot]
                    assert arrived == (row.backward, min(depth + 1, last))
                back[stage] = row.backward, depth
                record.append((tick, stage, Work("backward", row.backward, row.backward_repeat)))
                if row.cut_slot != NOTHING:
                    cuts[stage][row.cut_slot] = row.backward, depth
                elif table.splits_backward:
                    record.append((tick, stage, Work("weights", row.backward, row.backward_repeat)))
            late = row.weights, row.weights_repeat, row.weights_slot, row.weights_cut_slot
            for micro, repeat, slot, cut_slot in zip(*late, strict=True):
                if micro != NOTHING:
                    depth = repeat * table.stages + stage
                    assert inputs[stage][slot] == cuts[stage][cut_slot] == (micro, depth)
                    record.append((tick, stage, Work("weights", micro, repeat)))
        sent, returned = out, back
    assert record == list(table.works())


def test_a_plan_walks_through_its_table_equally_often_for_any_number_of_stages(monkeypatch):
    """A planner makes hundreds of plans of a thousand micro-batches in tens of stages."""
    works, walks = TickTable.works, []
    monkeypatch.setattr(TickTable, "works", lambda table: walks.append(table) or works(table))
    for stages in (2, 4, 8):
        TickPlan.of(replace(table_of("1f1b", stages, 16)), keeps_results=True)
    few, some, many = (sum(t.stages == stages for t in walks) for stages in (2, 4, 8))
    assert few == some == many


# What a user writes


@pytest.mark.parametrize(("stages", "repeats"), [(2, 2), (3, 4), (4, 2), (8, 3)])
def test_what_a_circular_schedule_keeps_does_not_grow_with_micro_batches(stages, repeats):
    for times in (2, 4, 16):
        table = table_of("circular", stages, times * stages, repeats)
        live = tuple((repeats + 1) * stages - 1 - 2 * stage for stage in range(stages))
        assert table.in_flight == live


def test_all_invalid_choices_are_listed():
    with pytest.raises(mw.PipelineError) as caught:
        mw.Pipeline("", micro_batches=0, schedule="1F1B", repeats=True)
    text = str(caught.value)
    assert all(f"{name} must" in text for name in ("axis", "micro_batches", "repeats", "schedule"))
    assert "did you mean '1f1b'?" in text


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"schedule": "circular"}, "needs repeats"),
        ({"schedule": "1f1b", "repeats": 2}, "use schedule='circular'"),
        (
            {"schedule": "zero_bubble", "remat_stages": True},
            "that wait read what a forward pass keeps",
        ),
        ({"remat_stages": "block"}, "remat_stages must be True, False or None; received 'block'"),
        (
            {"schedule": "zero_bubble", "remat_stages": True, "repeats": 3},
            r"repeats=3 is not[\s\S]*remat_stages=True is not",
        ),
    ],
)
def test_a_choice_that_does_not_go_with_a_schedule_is_refused(choice, message):
    with pytest.raises(mw.PipelineError, match=message):
        mw.Pipeline("stage", 8, **choice)


def test_circular_micro_batches_that_do_not_divide_name_the_nearest():
    with pytest.raises(mw.PipelineError, match="nearest that do: 8 and 12"):
        mw.Pipeline("stage", 10, "circular", repeats=2).table(4)


def test_few_micro_batches_warn_with_what_is_idle():
    with pytest.warns(mw.MeshwrightWarning, match="idle for 60% of a step. Use 16"):
        mw.Pipeline("stage", 2).table(4)


def test_a_table_is_a_text_and_a_picture():
    table = mw.Pipeline("stage", 4, "zero_bubble").table(2)
    lines = str(table).splitlines()
    assert lines[0].startswith("zero_bubble: 2 stages, 4 micro-batches, 6 ticks, idle 7.7%")
    assert lines[2].split()[:7] == ["stage", "0", "F0", "F1", "F2", "B0", "W0"]
    assert "data:image/svg+xml" in table._repr_html_()
    assert table.svg().count("<rect") == 1 + 2 * 4 * 3 + 3  # the sheet, the passes, the legend
