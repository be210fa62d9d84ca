"""What is read from optimized HLO: snippets in the words of each platform."""

from __future__ import annotations

import pytest

from meshwright.hlo.collectives import most_bytes_at_once, read_collectives
from meshwright.hlo.text import parse

AXES = (("batch", 4), ("model", 2))

# In the manner of XLA for CPU, where a loop says how often it runs.
LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], bf16[16,8])) -> (s32[], bf16[16,8]) {
  %state = (s32[], bf16[16,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = bf16[16,8]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %sum = bf16[16,8]{1,0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/while/body/dense/dot"}
  ROOT %out = (s32[], bf16[16,8]{1,0}) tuple(%next, %sum)
}

%condition (state: (s32[], bf16[16,8])) -> pred[] {
  %state = (s32[], bf16[16,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %bound = s32[] constant(12)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (p: bf16[16,8]) -> bf16[16,8] {
  %p = bf16[16,8]{1,0} parameter(0)
  %begin = s32[] constant(2)
  %copied = s32[] copy(%begin)
  %init = (s32[], bf16[16,8]{1,0}) tuple(%copied, %p)
  %while = (s32[], bf16[16,8]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %result = bf16[16,8]{1,0} get-tuple-element(%while), index=1
}
"""


def test_a_loop_is_counted_by_its_condition():
    (collectives,) = read_collectives(LOOP, AXES)
    assert (collectives.kind, collectives.axes, collectives.dtypes) == (
        "all-reduce",
        ("model",),
        ("bfloat16",),
    )
    assert (collectives.elements, collectives.bytes_per_device, collectives.group_size) == (
        128,
        256,
        2,
    )
    assert collectives.count == 10
    assert collectives.position == 4  # the loop's
    assert collectives.path == "jit(f)/while/body/dense/dot"
    assert collectives.reduces


def test_a_loop_is_counted_by_what_xla_noted():
    noted = LOOP.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"},"x":1}'
    )
    assert [c.count for c in read_collectives(noted, AXES)] == [7]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("add(%i, %one)", "multiply(%i, %one)"),
        ("copy(%begin)", "negate(%begin)"),
        ("%bound = s32[] constant(12)", "%bound = s32[] convert(%i)"),
    ],
)
def test_a_loop_that_does_not_tell_is_unknown_and_not_guessed(was, becomes):
    assert was in LOOP
    assert [c.count for c in read_collectives(LOOP.replace(was, becomes), AXES)] == [None]


def test_start_and_done_count_once_and_merged_arrays_are_kept_apart():
    text = """
ENTRY %main (p: f32[2,8], q: bf16[4], s: f32[]) -> f32[8,8] {
  %p = f32[2,8]{1,0} parameter(0)
  %q = bf16[4]{0} parameter(1)
  %s = f32[] parameter(2)
  %start = (f32[2,8], f32[8,8]) all-gather-start(%p), channel_id=1, \
replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
  %merged = (bf16[4], /*index=1*/f32[]) all-reduce(%q, %s), channel_id=2, \
replica_groups=mesh['axis_0'=8] {'axis_0'}
  %moved = f32[2,8] collective-permute(%p), channel_id=3, \
source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  ROOT %done = f32[8,8]{1,0} all-gather-done(%start)
}"""
    gather, merged, traffic = read_collectives(text, AXES)
    assert (gather.kind, gather.axes, gather.position) == ("all-gather", ("batch",), 3)
    assert gather.arrays[0].dims == (8, 8)
    assert (merged.dtypes, merged.elements) == (("bfloat16", "float32"), 5)
    assert (merged.axes, merged.bytes_per_device) == (("batch", "model"), 12)
    assert (traffic.kind, traffic.axes, traffic.count) == ("collective-permute", ("model",), 1)
    assert not traffic.reduces


def test_what_tpu_repeats_in_fusions_counts_once_and_two_alike_count_twice():
    gather = """%fused.NUMBER (p: bf16[2,8]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %g = bf16[8,8]{1,0} all-gather(%p), channel_id=1, \
replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={0}, \
frontend_attributes={chain_id="CHAIN"}
}
"""
    parts = [gather.replace("NUMBER", str(n)).replace("CHAIN", c) for n, c in enumerate("0001")]
    calls = "".join(
        f"  %f{n} = bf16[8,8] fusion(%x), kind=kOutput, calls=%fused.{n}, "
        f'metadata={{op_name="step/layer{n}"}}\n'
        for n in range(4)
    )
    text = "".join(parts) + f"ENTRY %main (x: bf16[2,8]) -> bf16[8,8] {{\n{calls}}}\n"
    collectives = read_collectives(text, AXES)
    assert [(c.path, c.position) for c in collectives] == [("step/layer0", 0), ("step/layer3", 3)]


def test_an_all_reduce_of_which_each_device_keeps_a_piece_is_a_reduce_scatter():
    text = """
%all-reduce-scatter.3 (input: f32[32]) -> f32[8] {
  %input = f32[32]{0} parameter(0)
  %sum = f32[32]{0} all-reduce(%input), channel_id=3, replica_groups={{0,2,4,6},{1,3,5,7}}
  ROOT %piece = f32[8]{0} dynamic-slice(%sum), dynamic_slice_sizes={8}
}
ENTRY %main (x: f32[32]) -> f32[8] {
  %x = f32[32]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
}"""
    (collectives,) = read_collectives(text, AXES)
    assert (collectives.kind, collectives.axes, collectives.elements) == (
        "reduce-scatter",
        ("batch",),
        32,
    )


def test_text_that_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="no entry computation"):
        parse("module @jit_f {}")


GATHERS = """
%fused (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=7, replica_groups=[4,2]<=[8], dimensions={0}
}
ENTRY %main (x: f32[4], y: f32[4]) -> f32[8] {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %first = (f32[4], f32[8]) all-gather-start(%x), channel_id=1, replica_groups=[4,2]<=[8], \
dimensions={0}
  %gathered = f32[8]{0} all-gather-done(%first)
  %view = f32[2,4]{1,0} bitcast(%gathered)
  %used = f32[2,4]{1,0} tanh(%view)
  %second = f32[8]{0} fusion(%y), kind=kCustom, calls=%fused
  %copied = f32[8]{0} copy(%second)
  LAST
  ROOT %sum = f32[8]{0} add(%copied, %copied)
}"""


def test_a_result_lives_from_its_start_to_its_last_reader():
    apart = read_collectives(GATHERS.replace("LAST", "%z = f32[2] constant(0)"), AXES)
    assert [(c.position, c.until) for c in apart] == [(2, 5), (6, 9)]
    assert most_bytes_at_once(apart) == 32
    collectives = read_collectives(GATHERS.replace("LAST", "%again = f32[2,4] tanh(%view)"), AXES)
    assert [(c.position, c.until) for c in collectives] == [(2, 8), (6, 9)]
    assert most_bytes_at_once(collectives) == 64
    assert most_bytes_at_once([]) == 0


PREFETCHED = """HloModule m, is_scheduled=true

ENTRY %main (w: f32[4,8], x: f32[4,8]) -> f32[8,8] {
  %w = f32[4,8]{1,0} parameter(0)
  %x = f32[4,8]{1,0} parameter(1)
  %begun.0 = ((f32[4,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]) slice-start(%w), slice={[0:2], [0:8]}
  %begun.1 = ((f32[4,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]) slice-start(%w), slice={[2:4], [0:8]}
  %part.0 = f32[2,8]{1,0:S(1)} slice-done(%begun.0)
  %part.1 = f32[2,8]{1,0:S(1)} slice-done(%begun.1)
  %here = f32[4,8]{1,0:S(1)} custom-call(%part.0, %part.1), custom_call_target="ConcatBitcast"
  %whole = f32[8,8]{1,0} all-gather(%here), replica_groups={{0,1}}, dimensions={0}
  %sum = f32[4,8]{1,0} add(%x, %x), metadata={op_name="jit(step)/add"}
  %other = f32[8,8]{1,0} all-gather(%sum), replica_groups={{0,1}}, dimensions={0}
  ROOT %y = f32[8,8]{1,0} dot(%other, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0},
    metadata={op_name="jit(step)/jvp(block_3)/dot_general"}
}
""".replace(",\n    metadata", ", metadata")


def test_what_a_tpu_fetches_in_slices_is_followed_and_the_rest_has_its_nearest_layer():
    first, second = read_collectives(PREFETCHED, (("batch", 2),))
    assert first.arguments == (0,)
    assert (second.arguments, second.op_names) == ((None,), ("jit(step)/add",))
    assert second.near == (None, "jit(step)/jvp(block_3)/dot_general")


INCREASED = """HloModule jit_step, is_scheduled=true, num_partitions=2

ENTRY %main (momentum: f32[4,8], weight: f32[8,8]) -> (f32[8,8], f32[8,8]) {
  %momentum = f32[8,8]{1,0} parameter(0), sharding={replicated}
  %weight = f32[8,8]{1,0} parameter(1), sharding={replicated}
  %piece = f32[4,8]{1,0} slice(%weight), slice={[0:4], [0:8]}
  %change = f32[4,8]{1,0} multiply(%piece, %piece), metadata={op_name="jit(step)/PLACE/mul"}
  %whole = f32[8,8]{1,0} all-gather(%change), replica_groups={{0,1}}, dimensions={0}, \
metadata={op_name="jit(step)/PLACE/mul"}
  %new = f32[8,8]{1,0} add(%momentum, %whole), metadata={op_name="jit(step)/adam/add"}
  ROOT %state = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%new, %weight)
}
"""


@pytest.mark.parametrize(
    ("place", "result"), [("adam", 0), ("transpose(jvp(dense))", None)], ids=["update", "gradient"]
)
def test_what_is_added_to_a_variable_after_the_gradient_makes_its_new_value(place, result):
    (gather,) = read_collectives(INCREASED.replace("PLACE", place), (("batch", 2),))
    assert gather.result == result
