"""Pipelines by the planner's model: sections of a model, ticks, dry runs without a compiler."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from models import shapes as shape

import meshwright as mw
from meshwright.display.drawing.ticks import tick_table_picture
from meshwright.frontends.plans import Plan
from meshwright.hlo.costs import Costs, Loop, Operation
from meshwright.hlo.links import Link
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.estimate import Turns, _with_shares
from meshwright.planning.graph import GraphTensor
from meshwright.planning.pipelined.cost import Staging, _is_cut
from meshwright.planning.pipelined.cutting import in_families_of
from meshwright.planning.pipelined.equal import equal_blocks
from meshwright.planning.pipelined.sections import Section, sections_of
from meshwright.planning.pipelined.ticking import Passes, step_s
from meshwright.planning.search.classics import classics
from meshwright.planning.search.request import Request, Space
from meshwright.planning.traced_graph import graph_of_step
from meshwright.stages.plan import TickPlan
from meshwright.stages.table import table_of
from meshwright.targets.hardware import Hardware, hardware_of
from meshwright.targets.target import Target
from meshwright.units import bytes_text

WIDTH, HIDDEN, WORDS, BLOCKS, TOKENS = 16, 64, 32, 8, 8
SPLIT = {"up": [None, "model"], "down": ["model", None]}


def loss(params, ids):
    x = params["first"][ids]
    for own in params["blocks"]:
        x = x + jnp.tanh(x @ own["up"]) @ own["down"]
    return jnp.mean((x @ params["last"]) ** 2)


def program_of(width=WIDTH, hidden=HIDDEN, words=WORDS, blocks=BLOCKS, optimizer=None, loss=loss):
    block = {"up": shape(width, hidden), "down": shape(hidden, width)}
    params = {
        "first": shape(words, width),
        "blocks": [dict(block) for _ in range(blocks)],
        "last": shape(width, words),
    }
    return mw.jax_program(loss, params, optimizer or optax.adam(1e-3))


def looped(params, ids):
    """The same with the blocks' weights stacked."""

    def block(x, own):
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    x, _ = jax.lax.scan(block, params["first"][ids], params["blocks"])
    return jnp.mean((x @ params["last"]) ** 2)


def looped_program_of(width=WIDTH, hidden=HIDDEN, words=WORDS, blocks=BLOCKS):
    stacked = {"up": shape(blocks, width, hidden), "down": shape(blocks, hidden, width)}
    params = {"first": shape(words, width), "blocks": stacked, "last": shape(width, words)}
    return mw.jax_program(looped, params, optax.adam(1e-3))


def asked(
    mesh, micro_batches, schedule="1f1b", layouts=None, target="v5p:2x2x2", hardware=None,
    program=None, **more
):  # fmt: skip
    """An analytic dry run with two rows in each micro-batch of a device."""
    pipeline = mw.Pipeline("stage", micro_batches, schedule, **more)
    strategy = mw.Sharded(
        mw.Mesh(mesh), layouts, batch="data", unmatched="replicate", pipeline=pipeline
    )
    ids = shape(2 * mesh["data"] * micro_batches, TOKENS, dtype="int32")
    return mw.dry_run(
        program or program_of(), ids, strategy=strategy, target=target, hardware=hardware,
        compile=False,
    )  # fmt: skip


# Ticks


@pytest.mark.parametrize(
    ("schedule", "repeats"), [("gpipe", 1), ("1f1b", 1), ("circular", 2), ("zero_bubble", 1)]
)
def test_equal_passes_take_what_the_table_says(schedule, repeats):
    table = table_of(schedule, stages=4, micro_batches=16, repeats=repeats)
    even = Passes(0, 1, 2, 3, 0, 0, 0, recomputes=0, waits_for_loss=False, skips=True)
    assert step_s(table, even).work == pytest.approx(table.time(1, 2, 3))


def test_ends_are_passes_of_the_first_and_last_stage_and_recompute_of_every_one():
    table = table_of("1f1b", stages=2, micro_batches=3)
    passes = Passes(10, 1, 1, 1, 100, 1000, 0, recomputes=1, waits_for_loss=True, skips=True)
    # F0 | F1 beside F0 B0 | F2 B0 beside F1 B1 | B1 beside F2 B2 | B2
    assert step_s(table, passes).work == 11 + 103 + (11 + 1003) + 1003 + 1003
    together = replace(passes, skips=False)
    every = 3 + 100 + 1000
    assert step_s(table, together).work == 11 + 3 * (11 + every) + every


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("shares_loss", [False, True])
@pytest.mark.parametrize(("schedule", "repeats"), [("gpipe", 1), ("1f1b", 1), ("circular", 2)])
def test_neighbours_exchange_something_in_the_ticks_of_loops(schedule, repeats, shares_loss, skips):
    pipeline = mw.Pipeline("stage", 16, schedule, repeats=repeats)
    staging = Staging(pipeline, 4, 2, frozenset(), (), skips=skips, shares_loss=shares_loss)
    loops = TickPlan.of(staging.table).loops(skips)
    ticks = sum((loop.end - loop.first) * (loop.forward + loop.backward) for loop in loops)
    assert staging.permutes == (1 + shares_loss) * ticks


def test_transfers_are_waited_for_where_nothing_hides_them():
    table = table_of("gpipe", stages=2, micro_batches=4)  # 5 ticks forward, 5 backward
    passes = Passes(0, 1, 1, 1, 0, 0, 3, recomputes=0, waits_for_loss=False, skips=True)
    assert step_s(table, passes).waiting == 5 * (3 + 2) + 5 * (1 + 3)
    assert step_s(table, replace(passes, overlaps=False)).waiting == 10 * 2 * 3


# Memory


def test_the_largest_stage_of_a_step_that_does_not_fit_is_named_with_what_a_device_lacks():
    small = replace(hardware_of(Target.of("v5p:2x2x2")), memory_bytes=20_000)
    run = asked({"stage": 2, "data": 4}, 4, hardware=small)
    assert run.fits is False
    (note,) = (note for note in run.notes if "lacks" in note)
    assert bytes_text(run.peak_bytes - 20_000) in note
    nbytes = BLOCKS // 2 * 2 * WIDTH * HIDDEN * 4 * 3  # with two slots
    assert f"stage 0: {bytes_text(nbytes)} of weights and slots" in note
    assert "cuts=" in note


# Sections


def test_every_product_is_in_its_section():
    step = abstract_step(
        program_of(), shape(4, TOKENS, dtype="int32"), mw.Placement.of(mw.Mesh({"batch": 1}))
    )
    graph = graph_of_step(step)
    own = [t.path for t in graph.tensors if t.role == "parameter" and "blocks" in t.path]
    assert len(own) == 2 * BLOCKS
    flops: dict[Section, float] = {}
    for section, operation in zip(sections_of(graph, own), graph.operations, strict=True):
        flops[section] = flops.get(section, 0.0) + operation.flops
    block = BLOCKS * 2 * 2 * 4 * TOKENS * WIDTH * HIDDEN
    head = 2 * 4 * TOKENS * WIDTH * WORDS
    assert {section: count for section, count in flops.items() if count} == {
        Section("blocks", "forward"): block,
        Section("blocks", "backward"): block,
        Section("blocks", "weights"): block,
        Section("after", "forward"): head,
        Section("after", "backward"): head,
        Section("after", "weights"): head,
    }


# Dry runs


@pytest.mark.parametrize(
    ("schedule", "more"),
    [("gpipe", {}), ("1f1b", {}), ("circular", {"repeats": 2}), ("zero_bubble", {})],
)
def test_transfers_between_stages_are_those_of_the_table(schedule, more):
    mesh = {"stage": 4, "data": 2}
    report = asked(mesh, 8, schedule, **more)
    (sent,) = [c for c in report.collectives if c.kind == "collective-permute"]
    assert sent.axes == ("stage",)
    assert sent.bytes_per_device == 2 * TOKENS * WIDTH * 4
    assert sent.count == (1 if schedule == "gpipe" else 2) * len(report.ticks.ticks)
    assert [share.stage for share in report.stages] == [0, 1, 2, 3]


def test_state_lies_on_its_stage_and_what_is_in_flight_grows_with_gpipe_alone():
    mesh = {"stage": 4, "data": 2}
    few, many, gpipe = (
        asked(mesh, count, schedule)
        for count, schedule in ((8, "1f1b"), (32, "1f1b"), (32, "gpipe"))
    )
    blocks = BLOCKS * 2 * WIDTH * HIDDEN * 4
    ends = 2 * WIDTH * WORDS * 4
    assert few.parameter_bytes == blocks // 4 + ends  # which are too small to be cut
    assert many.memory.temporary_bytes == few.memory.temporary_bytes
    assert gpipe.memory.temporary_bytes > many.memory.temporary_bytes
    assert few.peak_bytes == few.memory.argument_bytes + few.memory.temporary_bytes


def test_gradients_of_embedding_and_head_have_one_room_where_no_stage_makes_both():
    def reads_both_first(params, ids):
        return loss({**params, "first": params["first"] + params["last"].T}, ids)

    mesh = {"stage": 4, "data": 2}
    plain, twice = (
        asked(mesh, 8, program=program_of(loss=of)).memory.temporary_bytes
        for of in (loss, reads_both_first)
    )
    assert twice - plain == WIDTH * WORDS * 4


def test_zero_shares_the_slots_of_stacked_blocks():
    pipeline = mw.Pipeline("stage", 4)
    strategy = mw.Sharded(
        mw.Mesh({"stage": 2, "data": 4}),
        batch="data",
        unmatched="replicate",
        zero=1,
        pipeline=pipeline,
    )
    program, ids = program_of(width=128, hidden=256), shape(16, TOKENS, dtype="int32")
    how = {"strategy": strategy, "target": "v5p:2x2x2", "compile": False}
    report = mw.dry_run(program, ids, **how)
    assert report.slot_bytes < report.parameter_bytes  # two slots each, over four devices


def test_a_model_axis_costs_what_is_computed_for_nothing():
    split = asked({"stage": 2, "data": 2, "model": 2}, 4, layouts=SPLIT)
    assert any(c.axes == ("model",) for c in split.collectives)
    assert "micro-batches: 6 ticks" in str(split)
    assert split.step_time_s > 0
    assert 0 < split.mfu < 1


def test_layers_of_a_loop_are_estimated_as_layers_one_after_the_other():
    mesh = {"stage": 2, "data": 2, "model": 2}
    stacked = {f"blocks/{name}": [None, *axes] for name, axes in SPLIT.items()}
    reports = [
        asked(mesh, 4, layouts=layouts, program=program)
        for layouts, program in ((SPLIT, program_of()), (stacked, looped_program_of()))
    ]
    assert len({(r.step_time_s, r.peak_bytes, r.mfu, r.estimate.flops) for r in reports}) == 1
    sent = [Counter((c.kind, c.axes, c.bytes_per_device) for c in r.collectives) for r in reports]
    assert sent[0] == sent[1]


def test_blocks_without_slots_are_estimated_as_those_that_have_some():
    """A stack of weights has slots for all blocks if it has them for one."""
    ways = {"adam": optax.adam(1e-3), "none": optax.set_to_zero()}

    def labels(params):
        of_blocks = ["none", "adam"] * (BLOCKS // 2)
        blocks = [dict.fromkeys(b, of) for b, of in zip(params["blocks"], of_blocks, strict=True)]
        return {"first": "adam", "blocks": blocks, "last": "adam"}

    mesh = {"stage": 4, "data": 2}
    plain = asked(mesh, 8)
    some = asked(mesh, 8, program=program_of(optimizer=optax.multi_transform(ways, labels)))
    assert (some.step_time_s, some.peak_bytes) == (plain.step_time_s, plain.peak_bytes)


def test_what_a_models_own_checkpoint_computes_again_is_not_counted_as_kept():
    def checkpointed(params, ids):
        x = params["first"][ids]
        inner = jax.checkpoint(lambda own, x: jnp.tanh(x @ own["up"]) @ own["down"])
        for own in params["blocks"]:
            x = x + inner(own, x)
        return jnp.mean((x @ params["last"]) ** 2)

    mesh, more = {"stage": 4, "data": 2}, {"remat_stages": False}
    reports = [asked(mesh, 8, program=program_of(loss=of), **more) for of in (loss, checkpointed)]
    plain, less = (report.memory.temporary_bytes for report in reports)
    in_flight, of_a_stage = 7, 2 * BLOCKS // 4 // 2
    assert plain - less == in_flight * of_a_stage * 2 * TOKENS * HIDDEN * 4


GUESS = Hardware(
    "guess",
    (("float32", 1e9),),
    memory_bandwidth_bytes_per_s=1e12,
    links=(Link("shared", "switch", 1e10, 1e-6),),
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "repeats", "words"),
    [
        ("gpipe", 1, 256),  # of two loops
        ("1f1b", 1, 256),
        ("zero_bubble", 1, 256),
        ("circular", 2, 256),
        ("gpipe", 1, 2048),  # whose loss all stages compute
        ("1f1b", 1, 2048),
    ],
)
def test_a_compiled_step_takes_what_its_stages_take_and_sends_as_often(schedule, repeats, words):
    """Of ten blocks on four stages."""
    program, ids = program_of(width=32, words=words, blocks=10), shape(16, TOKENS, dtype="int32")
    strategy = mw.Sharded(
        mw.Mesh({"stage": 4, "data": 2}),
        batch="data",
        unmatched="replicate",
        pipeline=mw.Pipeline("stage", 4, schedule, repeats),
    )
    how = {"strategy": strategy, "target": "cpu:8", "hardware": GUESS}
    reports = [mw.dry_run(program, ids, **how, compile=compiles) for compiles in (True, False)]
    sent = [Counter[int](), Counter[int]()]
    for counted, report in zip(sent, reports, strict=True):
        for one in report.collectives:
            if one.kind == "collective-permute" and one.bytes_per_device > 8:  # that is the loss
                counted[one.bytes_per_device] += one.count
    ticks, shares = reports[0].ticks.ticks, reports[0].ticks.shares_loss
    assert shares == (words > 256)  # with one micro-batch a stage, all forward passes come first
    times = (1 if schedule == "gpipe" and not shares else 2) * len(ticks)
    assert sent == [{2 * TOKENS * 32 * 4: times}] * 2
    compiled, modelled = (report.estimate for report in reports)
    block, head = 3 * 2 * 2 * 16 * TOKENS * 32 * HIDDEN, 3 * 2 * 16 * TOKENS * 32 * words
    for result in (compiled, modelled):
        assert result.sums.own_flops * 8 == pytest.approx(10 * block + head)
    assert compiled.compute_s == pytest.approx(modelled.step_time_s, rel=0.15)
    assert compiled.step_time_s == pytest.approx(modelled.step_time_s, rel=0.15)
    assert compiled.mfu == pytest.approx(modelled.mfu, rel=0.15)


def test_a_loop_of_the_loss_that_runs_as_often_as_there_are_ticks_counts_whole():
    work = Operation("dot", "dot", "", flops=8.0, count=5)
    body = work, replace(work, is_chosen=True)
    of_loss, of_ticks = (
        Loop("while", 5, body, path) for path in ("jit(step)/while", "jit(step)/shard_map/while")
    )
    result = _with_shares(Costs((of_loss, of_ticks)), [Turns(5, 0.25)])
    assert result.flops == 2 * 40 + 40 + 40 / 4


def test_a_table_is_as_idle_and_as_wide_as_the_shares_of_its_stages_say():
    report = asked({"stage": 4, "data": 2}, 8)
    shares = [share.flops_share for share in report.stages]
    assert max(shares) > 1.05 * min(shares)  # the last one has the head
    idle = report.ticks.idle_share(of_stages=shares)
    assert idle > report.ticks.idle_share()
    assert f"idle {idle:.1%}" in str(report)
    assert f"idle {idle:.1%}" in report.to_html()
    widths = {
        float(width)
        for width in re.findall(
            r'width="([\d.]+)" height="20', tick_table_picture(report.ticks, shares)
        )
    }
    assert len(widths) == 2
    busy = sum(shares) / 4 * report.ticks.time() / report.ticks.time(of_stages=shares)
    assert 1 - idle == pytest.approx(busy * (1 - report.ticks.idle_share()))


def test_the_picture_of_the_guide_is_what_its_tool_draws():
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("ticks", root / "tools" / "tick_pictures.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (root / "docs" / "pictures" / "ticks_1f1b.svg").read_text() == tool.drawn("1f1b")


def test_what_is_of_a_block_is_told_by_its_path_and_the_rest_is_cut_where_it_divides():
    tensor = functools.partial(GraphTensor, dims=(None, None), itemsize=4)
    staging = Staging(mw.Pipeline("stage", 4), 4, 2, frozenset(["block/kernel"]), ())

    def is_cut(shape, path, role="parameter", owner=""):
        of = tensor(path, shape=shape, role=role, owner=owner)
        return _is_cut(of, of.nbytes, staging)

    assert is_cut((512, 512), "head/kernel")  # of the dims that a block's kernel has
    assert is_cut((512, 512), "m/head/kernel", "slot", "head/kernel")
    assert not is_cut((512, 512), "block/kernel")
    assert not is_cut((512, 512), "m/block/kernel", "slot", "block/kernel")
    assert not is_cut((511, 513), "head/kernel")
    assert not is_cut((4, 4), "head/bias")


# Plans


def planned(network_bytes_per_s, blocks=BLOCKS, program_of=program_of, **more):
    hardware = hardware_of(Target.of("h100:2x4"))
    links = [link for link in hardware.links if link.kind != "network"]
    network = Link("network", "switch", network_bytes_per_s, 1e-6)
    hardware = replace(hardware, links=(*links, network))
    program = program_of(width=4096, hidden=16384, words=1024, blocks=blocks)
    ids = shape(128, 128, dtype="int32")
    return mw.plan(program, ids, target="h100:2x4", hardware=hardware, **more)


@pytest.mark.full
def test_a_pipeline_is_chosen_where_the_network_is_slow_and_only_there():
    slow, fast = planned(1.5e10), planned(1e12)
    assert slow.axes[0][0] == "stage"
    assert slow.how.pipeline == slow.chosen.pipeline
    assert slow.chosen.time_s < min(o.time_s for o in slow.named.values())
    assert slow.mesh.size == 8
    lies = slow.placement().layouts
    assert {rule.pattern for rule in lies} >= {f"blocks/{n}/up" for n in range(BLOCKS)}
    assert Plan.from_json(slow.to_json()) == slow
    assert "schedule" in str(slow)
    assert "make it with mw.jax_program(..., batch=example)" in str(slow)
    assert fast.how.pipeline is None
    (note,) = [note for note in fast.notes if note.startswith("no pipeline")]
    assert "stages, takes" in note
    assert fast.named["pipeline"].pipeline is not None
    least_s = max(fast.chosen.compute_s, fast.chosen.communication_s)
    assert least_s <= fast.named["pipeline"].time_s


@pytest.mark.full
@pytest.mark.parametrize("blocks", [BLOCKS, BLOCKS + 1])  # whose stages are equal, and are not
def test_a_plan_with_a_pipeline_is_what_a_dry_run_takes(blocks):
    plan = planned(1.5e10, blocks)
    strategy = mw.Sharded.from_placement(plan.placement(), plan.how)
    report = mw.dry_run(
        program_of(width=4096, hidden=16384, words=1024, blocks=blocks),
        shape(128, 128, dtype="int32"),
        strategy=strategy,
        target="h100:2x4",
        compile=False,
    )
    assert report.ticks.schedule == plan.chosen.pipeline.schedule
    assert report.step_time_s == pytest.approx(plan.chosen.time_s, rel=0.1)
    assert report.peak_bytes == pytest.approx(plan.chosen.peak_bytes, rel=0.25)


@pytest.mark.full
def test_layers_of_a_loop_are_planned_as_layers_one_after_the_other():
    one, other = (planned(1.5e10, program_of=of) for of in (program_of, looped_program_of))
    assert other.chosen.pipeline == one.chosen.pipeline
    assert other.chosen.axes == one.chosen.axes
    assert other.chosen.time_s == pytest.approx(one.chosen.time_s)
    assert other.chosen.peak_bytes == pytest.approx(one.chosen.peak_bytes)
    assert [rule.pattern for rule in other.placement().layouts] == [
        "blocks/down", "blocks/up", "first", "last",
    ]  # fmt: skip


def test_the_dims_of_entries_have_the_families_of_their_stacks():
    """So that a layout of a stage's layers is one of the stacked weights."""
    program = looped_program_of()
    step = abstract_step(
        program, shape(4, TOKENS, dtype="int32"), mw.Placement.of(mw.Mesh({"batch": 1}))
    )
    blocks, reason = equal_blocks(step)
    assert not reason
    whole = graph_of_step(step)
    part = in_families_of(whole, graph_of_step(blocks.repeats.with_blocks(2)), blocks.entries)

    def families(graph, path):
        (dims,) = [t.dims for t in graph.tensors if t.path == path and t.role == "parameter"]
        return [graph.dims[dim].family for dim in dims]

    for name in ("up", "down"):
        expected = families(whole, f"blocks/{name}")[1:]
        assert [families(part, f"blocks/{n}/{name}") for n in range(2)] == [expected] * 2


@pytest.mark.full
def test_no_pipeline_is_looked_for_where_the_mesh_is_given():
    assert planned(1.5e10, axes={"batch": 8}).how.pipeline is None


def test_the_page_shows_stages_and_ticks():
    page = asked({"stage": 4, "data": 2}, 8).to_html()
    assert 'id="stages"' in page
    assert "1f1b: 4 stages, 8 micro-batches" in page
    assert "what comes before, block" in page
    many = asked({"stage": 4, "data": 2}, 64).to_html()
    assert len(many) < len(page) + 20_000  # drawn without numbers


def test_schedules_are_tried_with_and_without_remat_and_zero_bubble_only_where_stages_skip() -> (
    None
):
    """Beside an axis that splits more than rows zero-bubble is refused, and with remat as well."""
    from meshwright.planning.pipelined.searching import _schedules

    skips, other = (
        {(pipeline.schedule, remat) for pipeline, remat in _schedules(8, 2, 4, is_skipping)}
        for is_skipping in (True, False)
    )
    assert skips - other == {("zero_bubble", "none")}
    assert other == {(s, r) for s in ("1f1b", "gpipe", "circular") for r in ("none", "block")}


def test_a_stage_has_rows_over_all_its_devices_with_zero_1_among_its_first_layouts() -> None:
    """However short the search: without ZeRO, stages of large models only fit with their dims
    split over many devices, which on slow networks takes ten times as long."""
    program = program_of()
    ids = shape(64, TOKENS, dtype="int32")
    step = abstract_step(program, ids, mw.Placement.of(mw.Mesh({"batch": 1})))
    target = Target.of("h100:8")
    space = Space(zero=(0, 1))
    request = Request(graph_of_step(step), target, hardware_of(target), "time", None, space)
    ways = classics(request, fsdp_zero=1)
    assert ways["FSDP"].layouts.choices.zero == 1
    assert ways["FSDP"].layouts.axes == (("batch", 8),)
    assert ways["FSDP × tensor parallel"].layouts.choices.zero == 1
    assert "FSDP" not in classics(request)
