"""The time of a step: closed forms of collectives, the roofline, what overlaps, what is missing."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import keras
import pytest

import meshwright as mw
from meshwright.hlo.collectives import Collective
from meshwright.hlo.costs import Operation, read_costs
from meshwright.hlo.links import AxisLink, collective_s, links_of
from meshwright.hlo.schedule import Clock
from meshwright.hlo.text import Array
from meshwright.jaxprs.flops import least_flops, model_flops
from meshwright.planning import Compiled, Target, compile_ahead, reading
from meshwright.planning.estimate import estimate
from meshwright.planning.search.setting import setting_of
from meshwright.targets.calibrate import calibrate, handover_s, hardware_from
from meshwright.targets.hardware import Hardware, Link, hardware_of

RING = Link("ici", "ring", 100.0, 0.5)
SWITCH = Link("nvlink", "switch", 100.0, 0.5)
SHARED = Link("shared", "shared", 100.0, 0.5)


def collective(kind, nbytes, members, axes=("data",)):
    array = Array("int8", (nbytes,), 8)
    return Collective(kind, (array,), (tuple(range(members)),), axes, 1, "", 0, 0)


@pytest.mark.parametrize(
    ("kind", "link", "seconds"),
    [
        ("all-reduce", RING, 2 * 7 / 8 * 800 / 100 + 14 * 0.5),
        ("all-gather", RING, 7 / 8 * 800 / 100 + 7 * 0.5),
        ("reduce-scatter", RING, 7 / 8 * 800 / 100 + 7 * 0.5),
        ("all-to-all", RING, 8 / 4 * 800 / 100 + 7 * 0.5),
        ("all-to-all", SWITCH, 7 / 8 * 800 / 100 + 7 * 0.5),
        ("collective-permute", RING, 800 / 50 + 0.5),
        ("collective-permute", SWITCH, 800 / 100 + 0.5),
        ("all-reduce", SHARED, 2 * 7 / 8 * 800 / 100 + 0.5),
    ],
)
def test_collectives_take_their_closed_forms(kind, link, seconds):
    assert collective_s(collective(kind, 800, 8), [AxisLink("data", 8, link)]) == seconds


def test_two_dims_of_a_torus_carry_twice_as_much_and_a_slow_link_carries_what_is_left():
    links = [AxisLink("data", 4, RING), AxisLink("model", 2, RING)]
    both = collective("all-reduce", 800, 8, ("data", "model"))
    assert collective_s(both, links) == 2 * 7 / 8 * 800 / 200 + 2 * (3 + 1) * 0.5
    slow = [AxisLink("data", 4, Link("network", "switch", 10.0)), AxisLink("model", 2, SWITCH)]
    within = 2 * 1 / 2 * 800 / 100 + 2 * 0.5
    assert collective_s(both, slow) == within + 2 * 3 / 4 * 400 / 10
    exchange = collective("all-to-all", 800, 8, ("data", "model"))
    assert collective_s(exchange, slow) == 1 / 2 * 800 / 100 + 0.5 + 3 / 4 * 800 / 10
    mixed = [AxisLink("data", 8, slow[0].link, inside=AxisLink("data", 2, SWITCH))]
    assert collective_s(collective("all-reduce", 800, 8), mixed) == collective_s(both, slow)
    assert collective_s(both, [AxisLink("data", 4, Link("network")), slow[1]]) is None
    assert collective_s(collective("all-reduce", 800, 1), links) == 0.0


def test_a_group_along_a_part_of_an_axis_takes_the_links_of_that_part():
    """XLA gathers along one axis of ours within TPU slices, and then between them."""
    network = Link("network", "switch", 10.0)
    links = [
        AxisLink("data", 8, network, inside=AxisLink("data", 4, SWITCH)),  # two slices of four
        AxisLink("model", 2, SWITCH),
    ]

    def seconds(kind, *groups):
        array = Array("int8", (800,), 8)
        return collective_s(Collective(kind, (array,), groups, ("data",), 1, "", 0, 0), links)

    within = tuple(tuple(2 * n + at for n in range(4)) for at in (0, 1, 8, 9))
    between = tuple((at, at + 8) for at in range(8))
    assert seconds("all-gather", *within) == 3 / 4 * 800 / 100 + 3 * 0.5
    assert seconds("all-gather", *between) == 1 / 2 * 800 / 10
    neighbours = seconds("collective-permute", (0, 2), (4, 6))
    assert neighbours == 800 / 100 + 0.5
    assert seconds("collective-permute", (0, 2), (6, 8)) > 800 / 10


@pytest.mark.parametrize(
    ("target", "axes", "lies"),
    [
        ("v5p:4x4x4", (("data", 16), ("model", 4)), ["ici over 2", "ici"]),
        ("v5p:4x4x4", (("data", 8), ("model", 8)), ["ici", "ici"]),
        ("v4:2x2x2", (("data", 2), ("model", 4)), ["ici", "ici over 2"]),
        ("h100:16", (("data", 2), ("model", 8)), ["network", "nvlink"]),
        ("h100:16", (("data", 4), ("model", 4)), ["network + nvlink", "nvlink"]),
        ("h100:8", (("data", 4), ("model", 2)), ["nvlink", "nvlink"]),
        ("h100:2x4", (("data", 2), ("model", 4)), ["network", "nvlink"]),
        ("h100:2x4", (("model", 8),), ["network + nvlink"]),
        ("h100:4x8", (("dcn", 4), ("batch", 8)), ["network", "nvlink"]),
        ("v5e:2x(4x4)", (("dcn", 2), ("batch", 4), ("model", 4)), ["network", "ici", "ici"]),
        ("v5e:2x(4x4)", (("batch", 8), ("model", 4)), ["network + ici", "ici"]),
        ("v5e:2x(4x4)", (("batch", 4), ("model", 4)), ["ici", "ici"]),  # of one slice
        ("cpu:8", (("data", 4), ("model", 2)), ["shared", "shared"]),
    ],
)
def test_which_link_an_axis_is_taken_to_lie_on(target, axes, lies):
    links = links_of(Target.of(target), hardware_of(target), axes)

    def level_text(level):
        return f"{level.link.kind} over {level.lanes}" if level.lanes > 1 else level.link.kind

    assert [" + ".join(map(level_text, reversed(link.levels))) for link in links] == lies


def test_a_mesh_whose_axes_share_dims_of_the_torus_says_so():
    v5e, axes = Target.of("v5e:4x4"), (("data", 4), ("fsdp", 2), ("model", 2))
    shared = [str(link) for link in links_of(v5e, hardware_of(v5e), axes)]
    assert all(link.endswith("on ici, where axes share dims of the torus") for link in shared)
    whole = links_of(v5e, hardware_of(v5e), (("data", 4), ("model", 4)))
    assert not any(link.shares_dims for link in whole)


# Schedules, in text that a compiler could have written

PLAIN = Hardware("plain", (("float32", 1.0),), memory_bandwidth_bytes_per_s=1e12, links=(SHARED,))
HEAD = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[10,10]) -> f32[10,10] {
  %x = f32[10,10]{1,0} parameter(0)
"""
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
SUM = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"


def compiled(body):
    target, axes = Target.of("cpu:8"), (("data", 8),)
    return Compiled(target, axes, 0, 0, 0, 0, 0, 0, text=f"{HEAD}{body}\n}}\n")


TALK_S = 2 * 7 / 8 * 400 / 100 + 0.5  # of an all-reduce of 10 x 10 float32
DOT_S = 2 * 10**3


def test_a_collective_that_nothing_hides_is_waited_for():
    result = estimate(
        compiled(f"""  %y = f32[10,10]{{1,0}} all-reduce(%x), {SUM}
  ROOT %z = f32[10,10]{{1,0}} dot(%y, %y), {DOT}"""),
        PLAIN,
    )
    assert result.step_time_s == DOT_S + TALK_S
    assert (result.compute_s, result.waiting_s, result.overlap_s) == (DOT_S, TALK_S, 0.0)
    assert result.communication_s == ((("data",), TALK_S),)
    assert result.bound_by == "compute"
    assert result.mfu == DOT_S / (DOT_S + TALK_S)
    assert [heavy.opcode for heavy in result.heaviest] == ["dot", "all-reduce"]


@pytest.mark.parametrize(("speed", "waited"), [(1.0, 0.0), (DOT_S / 4.0, TALK_S - 4.0)])
def test_what_lies_between_start_and_done_hides_it(speed, waited):
    hardware = Hardware("h", (("float32", speed),), None, 1e12, (SHARED,))
    result = estimate(
        compiled(f"""  %begun = f32[10,10]{{1,0}} all-reduce-start(%x), {SUM}
  %y = f32[10,10]{{1,0}} dot(%x, %x), {DOT}
  %sum = f32[10,10]{{1,0}} all-reduce-done(%begun)
  ROOT %z = f32[10,10]{{1,0}} add(%y, %sum)"""),
        hardware,
    )
    assert result.waiting_s == pytest.approx(waited, abs=1e-6)
    assert result.overlap_s == pytest.approx(TALK_S - waited, abs=1e-6)
    assert result.step_time_s == pytest.approx(DOT_S / speed + waited, rel=1e-6)


def test_collectives_over_the_same_axes_wait_for_each_other():
    result = estimate(
        compiled(f"""  %one = f32[10,10]{{1,0}} all-reduce-start(%x), {SUM}
  %two = f32[10,10]{{1,0}} all-reduce-start(%x), {SUM.replace("=1,", "=2,")}
  %first = f32[10,10]{{1,0}} all-reduce-done(%one)
  ROOT %second = f32[10,10]{{1,0}} all-reduce-done(%two)"""),
        PLAIN,
    )
    assert result.step_time_s == result.waiting_s == 2 * TALK_S
    assert result.bound_by == "communication"


def test_each_instruction_takes_the_longer_of_arithmetic_and_memory():
    dot = f"  ROOT %y = f32[10,10]{{1,0}} dot(%x, %x), {DOT}"
    fast = Hardware("fast", (("float32", 1e12),), None, 100.0, instruction_s=0.25)
    result = estimate(compiled(dot), fast)
    assert result.step_time_s == 0.25 + 3 * 400 / 100
    assert result.bound_by == "memory"
    slow = Hardware("slow", (("float32", 100.0),), None, 1e12)
    assert estimate(compiled(dot), slow).step_time_s == DOT_S / 100


def test_rates_of_a_kind_and_size_come_before_the_peak():
    convolution = (
        "  %w = f32[1,1,10,10]{3,2,1,0} bitcast(%x)\n  %i = f32[1,2,5,10]{3,2,1,0} bitcast(%x)\n"
        "  %c = f32[1,2,5,10]{3,2,1,0} convolution(%i, %w), window={size=1x1}, "
        "dim_labels=b01f_01io->b01f\n"
    )
    text = f"""{convolution}  %e = f32[10,10]{{1,0}} exponential(%x)
  %d = f32[10,10]{{1,0}} dot(%x, %x), {DOT}
  ROOT %y = f32[10,10]{{1,0}} add(%d, %e)"""
    rates = (
        ("product", ((DOT_S / 10, 10.0), (DOT_S * 10, 1000.0))),
        ("convolution", ((1.0, 50.0),)),
        ("transcendental", ((1.0, 4.0),)),
        ("arithmetic", ((1.0, 20.0),)),
        ("memory", ((1.0, 1e9),)),
    )
    measured = Hardware("mine", (("float32", 1e12),), None, 1e9, call_s=2.0, rates=rates)
    of_each = DOT_S / 100, DOT_S / 50, 100 / 4, 100 / 20
    assert estimate(compiled(text), measured).step_time_s == pytest.approx(sum(of_each) + 2.0)
    plain = replace(measured, rates=(), call_s=None)
    assert estimate(compiled(text), plain).step_time_s < 1e-3


@pytest.mark.parametrize(
    ("kind", "left", "right", "result", "summed"),
    [
        ("product", "16,100", "100,30", "16,30", (1, 0)),
        ("product_skinny", "16,100", "100,400", "16,400", (1, 0)),
        ("product_skinny", "16,100", "400,100", "16,400", (1, 1)),  # gradient of the rows
        ("product_transposed", "16,100", "16,400", "100,400", (0, 0)),  # of the weights
    ],
)
def test_products_of_other_shapes_have_rates_of_their_own(kind, left, right, result, summed):
    rows = [f"  %{n} = f32[{dims}]{{1,0}} bitcast(%x)\n" for n, dims in zip("lr", (left, right))]  # noqa: B905
    sums = f"lhs_contracting_dims={{{summed[0]}}}, rhs_contracting_dims={{{summed[1]}}}"
    text = f"{''.join(rows)}  ROOT %d = f32[{result}]{{1,0}} dot(%l, %r), {sums}"
    depth = int((left.split(",") if summed[0] else left.split(",")[::-1])[1])
    flops = 2.0 * depth * math.prod(map(int, result.split(",")))
    rates = {"product": 5.0, "product_skinny": 7.0, "product_transposed": 3.0}
    points = tuple((name, ((1.0, rate),)) for name, rate in rates.items())
    hardware = Hardware("mine", (("float32", 1e12),), None, 1e9, rates=points)
    assert estimate(compiled(text), hardware).step_time_s == pytest.approx(flops / rates[kind])
    square = replace(hardware, rates=points[:1])  # where no others were measured
    assert estimate(compiled(text), square).step_time_s == pytest.approx(flops / 5.0)


def test_a_start_of_a_copy_runs_beside_the_rest():
    result = estimate(
        compiled(f"""  %begun = (f32[10,10]{{1,0}}, f32[10,10]{{1,0}}, u32[]) copy-start(%x)
  %y = f32[10,10]{{1,0}} dot(%x, %x), {DOT}
  ROOT %z = f32[10,10]{{1,0}} copy-done(%begun)"""),
        Hardware("h", (("float32", 100.0),), None, 100.0),
    )
    assert result.step_time_s == DOT_S / 100  # the copy takes 8 s


# What is missing is said, and never made up


def test_a_chip_without_numbers_gives_no_time():
    result = estimate(
        compiled(f"  ROOT %y = f32[10,10]{{1,0}} dot(%x, %x), {DOT}"), hardware_of("cpu")
    )
    assert result.missing == ("peak_flops_per_s.float32", "memory_bandwidth_bytes_per_s")
    assert (result.step_time_s, result.mfu, result.bound_by, result.compute_s) == (None,) * 4
    assert result.flops == DOT_S
    assert "step time   unknown" in str(result)
    missing = "peak_flops_per_s.float32, memory_bandwidth_bytes_per_s"
    assert f"unknown              {missing}" in str(result)


def test_what_was_assumed_is_said():
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=layout(["data", None]))
    step = compile_ahead(jax.jit(lambda x: x.T @ x), [x], "cpu:8")
    result = estimate(step, Hardware("h", (("float32", 1e9),), None, 1e9, (Link("shared"),)))
    assert "links.shared.bytes_per_s" in result.missing
    assert "axis 'data' of 4 lies on shared." in result.assumptions
    assert "The latency of shared is unknown and counts as zero." in result.assumptions
    hash(result)


def layout(spec):
    return mw.Layout(spec, mw.Mesh({"data": 4, "model": 2})).sharding


def test_model_flops_tell_replicated_work_and_lower_the_mfu():
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=layout(["data", None]))
    step = compile_ahead(jax.jit(lambda x: x @ x.T @ x), [x], "cpu:8")
    hardware = Hardware("h", (("float32", 1e9),), None, 1e9, (Link("shared", "shared", 1e9, 0.0),))
    all_of_it = 2 * 2 * 64 * 64 * 32
    with_flops, untold = estimate(step, hardware, model_flops=all_of_it), estimate(step, hardware)
    assert with_flops.replicated_share == 0.5  # over the axis "model"
    assert untold.replicated_share is None
    assert with_flops.mfu == pytest.approx(untold.mfu / 2)
    for words in ("replicated     50.0%", "bound by", "heaviest layers", "over data"):
        assert words in str(with_flops)


def test_products_run_as_the_platform_runs_them():
    def peak(target, dtype, precision=""):
        from meshwright.hlo.schedule import Clock

        target = Target.of(target)
        return Clock(hardware_of(target), target.platform, ()).peak(dtype, precision)

    assert peak("v5p:2x2x1", "float32") == peak("v5p:2x2x1", "bfloat16") == 459e12
    assert peak("v5p:2x2x1", "float32", "highest") == 459e12 / 6
    assert peak("h100:8", "float32") == 494.7e12
    assert peak("h100:8", "float32", "highest") == 66.9e12
    assert peak("b200:8", "int8") is None


@pytest.mark.targets
def test_a_step_for_a_tpu_has_a_time_and_all_its_collectives():
    pytest.importorskip("libtpu", reason="pip install 'meshwright[tpu]'")
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=layout(["data", None]))
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=layout([None, "model"]))

    def step(x, w):
        loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).sum().astype(jnp.float32))(w)
        return w - grad, loss

    compiled = compile_ahead(jax.jit(step), [x, w], "v5p:2x2x2")
    result = estimate(compiled, hardware_of("v5p"))
    assert result.missing == ()
    assert result.flops == pytest.approx(2 * 2 * 4096**3 / 8, rel=0.01)
    assert result.compute_s == pytest.approx(result.flops / 459e12, rel=0.01)
    assert result.step_time_s >= max(result.compute_s, result.waiting_s)
    talk = sum(seconds for _, seconds in result.communication_s)
    links = links_of(compiled.target, hardware_of("v5p"), compiled.axes)
    assert talk == pytest.approx(sum(collective_s(c, links) for c in compiled.collectives))


# This machine


def test_the_numbers_of_a_machine_follow_from_what_was_timed():
    seconds = json.loads('{"product": 0.5, "stream": 0.25, "element": 1, "instruction": 1e-6}')
    seconds |= {"product 2000": 3e-6, "product 4000": 4e-6, "nothing": 1e-4}
    seconds["handover"] = 2e-5
    result = hardware_from(Target.of("cpu:8"), {**seconds, "small_sum": 1e-3, "large_sum": 1.001})
    assert result.rate("product", 10.0) == result.rate("product", 2000) == pytest.approx(1e9)
    assert result.rate("product", 4000) == pytest.approx(4000 / 3e-6)
    assert (result.rate("memory", 10.0), result.call_s) == (None, 1e-4)
    assert result.handover_s == 2e-5
    assert result.peak("float32") == 2 * 256**3 / 0.5
    assert result.instruction_s == 1e-6
    link = result.link("shared")
    again = [
        collective_s(collective("all-reduce", nbytes, 8), [AxisLink("data", 8, link)])
        for nbytes in (4 << 10, 4 << 20)
    ]
    assert again == pytest.approx([1e-3, 1.001])
    assert math.isclose(result.memory_bandwidth_bytes_per_s, 8 * (2 << 20) / 0.25)


def test_a_hand_over_is_measured_whatever_the_call_itself_takes():
    here = threading.current_thread()

    def call():  # slow here alone: as a difference of two calls a hand-over would be none
        time.sleep(0.01 if threading.current_thread() is here else 0.001)

    assert 1e-6 < handover_s(call, 5) < 0.5


def test_of_accelerators_only_what_is_here_is_measured_and_not_for_ever():
    with pytest.raises(mw.TargetError, match=r"JAX has \d+ x cpu.* mw\.hardware_of\('h100:1'\)"):
        calibrate("h100:1")
    with pytest.raises(mw.CompileError, match=r"measuring cpu:2 took longer than 0\.01 s"):
        calibrate("cpu:2", timeout_s=0.01)


def test_the_planner_counts_large_products_and_arrays_as_they_were_measured():
    seconds = {
        "instruction": 1e-6,
        **{"product_bfloat16 1000": 2e-6, "product_bfloat16 1000000": 2e-6},
        **{"memory 1000": 2e-6, "memory 1000000": 5e-6},
    }
    hardware = hardware_from(Target.of("h100:8"), seconds)
    setting = setting_of((("batch", 8),), Target.of("h100:8"), hardware)
    assert setting.seconds_per_flop["product"]["bfloat16"] == pytest.approx(
        1e-12
    )  # without its beginning
    assert setting.seconds_per_byte == pytest.approx(4e-12)
    assert setting.seconds_per_flop["product"]["float32"] == 1 / 494.7e12  # published
    in_cache = replace(hardware, memory_bandwidth_bytes_per_s=1e9)
    assert setting_of((("batch", 8),), Target.of("h100:8"), in_cache).seconds_per_byte == 1e-9


def test_the_planner_counts_convolutions_as_they_were_measured():
    slow, usual, fast = 1e6, 1e9, 1e12  # FLOP/s of depthwise filters, of others, of products

    with mw.abstract():
        convolution = keras.layers.Conv2D(8, 3, use_bias=False)
        of_depth = keras.layers.DepthwiseConv2D(3, use_bias=False)
        model = keras.Sequential([keras.Input([10, 10, 8]), convolution, of_depth])
    rates = ("product", fast), ("convolution", usual), ("grouped_convolution", slow)
    report = mw.dry_serve(
        model,
        jax.ShapeDtypeStruct((1, 10, 10, 8), "float32"),
        strategy=mw.Placement.of(mw.Mesh({"batch": 1}), batch="batch", unmatched="replicate"),
        target="cpu:1",
        rows=(1,),
        hardware=Hardware(
            "here",
            peak_flops_per_s=(("float32", fast),),
            memory_bandwidth_bytes_per_s=fast,
            rates=tuple((kind, ((1e3, rate),)) for kind, rate in rates),
        ),
        compile=False,
    )
    whole, depthwise = 2 * 8 * 8 * 8 * 9 * 8, 2 * 6 * 6 * 8 * 9
    (batch,) = report.batches
    assert batch.latency_s == pytest.approx(whole / usual + depthwise / slow, rel=0.01)


def test_what_an_accelerator_does_counts_before_what_is_published_of_it():
    seconds = {"instruction": 1e-6, "nothing": 1e-4, "product 1000000000": 1e-5}
    result = hardware_from(Target.of("h100:1"), seconds)
    published = hardware_of("h100")
    assert result.memory_bytes == published.memory_bytes
    assert result.links == published.links
    assert result.peak_flops_per_s == published.peak_flops_per_s  # which MFU is a share of
    assert result.source("memory_bytes") == published.source("memory_bytes")
    assert result.source("rates") == "mw.calibrate('h100:1') on this machine"


@pytest.mark.parametrize(
    ("dtype", "precision", "flops_per_s"),
    [
        ("float32", "", 1e9 / 9e-6),
        ("bfloat16", "", 1e9 / 4e-6),
        ("float32", "highest", 66.9e12),  # not what was measured
        ("float16", "", 989.4e12),
    ],
)
def test_products_take_as_long_as_those_of_their_type_that_were_measured(
    dtype, precision, flops_per_s
):
    seconds = {"instruction": 1e-6, "product 1000000000": 1e-5}
    seconds["product_bfloat16 1000000000"] = 5e-6
    clock = Clock(hardware_from(Target.of("h100:1"), seconds), "cuda", [])
    product = Operation("dot", "dot", "", flops=1e9, dtype=dtype, precision=precision)
    assert clock.compute_s(product) == pytest.approx(1e9 / flops_per_s, rel=1e-3)


# In words


def kernels(*targets):
    """A step that calls kernels of these names."""
    calls = "".join(
        f'  %k{i} = f32[8]{{0}} custom-call(%x), custom_call_target="{kernel}"\n'
        for i, kernel in enumerate(targets)
    )
    text = (
        "HloModule jit_step, is_scheduled=true\n\nENTRY %main (x: f32[8]) -> f32[8] {\n"
        f"  %x = f32[8]{{0}} parameter(0)\n{calls}  ROOT %y = f32[8]{{0}} negate(%x)\n}}\n"
    )
    return Compiled(Target.of("v5e:2x4"), (("data", 8),), 100, 0, 0, 0, 200, 0, text)


def test_kernels_of_the_users_are_unknown_and_those_around_collectives_are_not():
    result = estimate(kernels("AsyncCollectiveStart", "my_kernel"), hardware_of("v5e"))
    unknown = [assumption for assumption in result.assumptions if "Unknown kernel" in assumption]
    assert unknown == ["Unknown kernel my_kernel: its time counts as zero."]


def test_where_numbers_are_missing_it_says_how_to_know_them():
    step = replace(kernels(), target=Target.of("cpu:8"))
    bare = str(estimate(step, Hardware("cpu")))
    assert "hardware=mw.calibrate('cpu:8'), or --measure in the terminal, measures them" in bare
    assert "unknown  1 x  negate" in bare  # and not that it takes no time
    assert "Pass them as hardware=." in str(estimate(kernels(), Hardware("mine")))


def test_a_peak_that_is_more_than_its_parts_is_explained():
    assert reading._besides(kernels())[0].startswith("the compiler's peak has 100 B that no other")
    assert reading._besides(replace(kernels(), temporary_bytes=90)) == ()
    assert reading._besides(replace(kernels(), target=Target.of("cpu:8"))) == ()


LOOP = """HloModule jit_step, is_scheduled=true

%more (held: (s32[], f32[8,8])) -> pred[] {
  %held = (s32[], f32[8,8]) parameter(0)
  %at = s32[] get-tuple-element(%held), index=0
  %end = s32[] constant(8)
  ROOT %less = pred[] compare(%at, %end), direction=LT
}

%body (held.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %held.1 = (s32[], f32[8,8]) parameter(0)
  %at.1 = s32[] get-tuple-element(%held.1), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%held.1), index=1
  %next = s32[] CHANGE(%at.1, %at.1)
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %held.2 = (s32[], f32[8,8]) tuple(%next, %y)
}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %one = s32[] constant(1)
  %whole = (s32[], f32[8,8]) tuple(%one, %p)
  %loop = (s32[], f32[8,8]) while(%whole), condition=%more, body=%body
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_fewer_flops_than_the_models_own_are_an_error_and_give_no_time():
    step = replace(kernels(), text=LOOP.replace("CHANGE", "add"))  # 1, 2, 4: not a count of trips
    product = 2.0 * 8**3
    enough = estimate(step, hardware_of("v5e"), model_flops=8 * product, least_flops=8 * product)
    assert enough.errors == ()
    assert enough.step_time_s is not None
    assert "1 loop of unknown length counts once (loop)" in enough.uncertain[0]
    short = estimate(step, hardware_of("v5e"), model_flops=24 * product, least_flops=24 * product)
    assert (short.step_time_s, short.mfu, short.bound_by) == (None, None, None)
    (error,) = short.errors
    assert "has 1.02 kFLOP in each of 8 devices, and the model needs 3.07 kFLOP" in error
    assert "1 loop of unknown length" in error


def test_what_a_compiler_may_leave_out_is_not_missed():
    def convolved(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        strided = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dims)
        jnp.vdot(x, x) * 2.0  # of which no result depends
        return strided

    args = jnp.ones((2, 7, 7, 4)), jnp.ones((3, 3, 4, 8))
    for function in (convolved, jax.grad(lambda *args: (convolved(*args) ** 2).sum(), (0, 1))):
        counted = read_costs(jax.jit(function).lower(*args).compile().as_text()).flops
        least = least_flops(jax.make_jaxpr(function)(*args))
        assert least == pytest.approx(counted)
        assert least < model_flops(jax.make_jaxpr(function)(*args))
