"""A target is read from text, and says how many devices JAX would see there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.planning import Target
from meshwright.targets.hardware import hardware_of
from meshwright.testing import run_in_fresh_process

# As get_topology_desc (libtpu 0.0.42) counts them; test_ahead_tpu.py asks it again.
DEVICES = {
    "cpu:8": 8,
    "v2:2x2": 8,
    "v3:2x2": 8,
    "v4:2x2x1": 4,
    "v4:2x2x2": 8,
    "v5e:2x4": 8,
    "v5e:16x16": 256,
    "v5p:2x2x2": 8,
    "v6e:2x4": 8,
    "tpu7x:2x2x1": 8,
    "h200:8": 8,
    "v5e:2x(2x4)": 16,
    "v4:3x(2x2x1)": 12,
}


@pytest.mark.parametrize("text", DEVICES)
def test_the_number_of_devices_follows_from_the_topology(text):
    target = Target.from_string(text)
    assert target.num_devices == DEVICES[text]
    assert str(target) == text


@given(kind=st.sampled_from(["v4", "v5p", "tpu7x"]), grid=st.tuples(*[st.integers(1, 64)] * 3))
def test_text_and_target_are_the_same(kind, grid):
    target = Target(kind, grid)
    assert Target.from_string(str(target)) == target
    assert Target.of(target) is target
    assert hash(Target.of(str(target))) == hash(target)


def test_one_slice_is_a_target_without_slices():
    assert Target.of("v5e:1x(4x4)") == Target.of("v5e:4x4")


def test_platforms():
    platforms = [Target.from_string(text).platform for text in ("cpu:8", "v5e:4x4", "h100:8")]
    assert platforms == ["cpu", "tpu", "cuda"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e", "received 'v5e'"),
        ("", "Known kinds are cpu, v2"),
        ("v5e:4x", "expected a target such as"),
        ("v7:4x4", "unknown kind of target 'v7'. Known are cpu, v2, v3, v4, v5e"),
        ("v5e:2x2x2", "'v5e' has 2 number.s., at least 1, such as 'v5e:2x4'.*; received '2x2x2'"),
        ("v5p:8", "has 3 number.s., at least 1, such as 'v5p:2x4x8'"),
        ("cpu:0", "received '0'"),
        ("v5e:2x4x4", "or, for two slices, 'v5e:2x.2x4.'; received '2x4x4'"),
        ("v5e:0x(4x4)", "1 slice or more; received 0"),
        ("v5e:2x(4x4", "expected a target such as 'v5e:4x4', 'v5e:2x.4x4.'"),
        ("h100:2x(8)", "only TPUs come in slices; .* nodes x GPUs of each, such as 'h100:2x8'"),
        ("cpu:2x(4)", "only TPUs come in slices; .* such as 'cpu:8'"),
    ],
)
def test_a_text_that_names_no_target_is_an_error_with_the_way_out(text, message):
    with pytest.raises(mw.TargetError, match=message):
        Target.from_string(text)


def test_targets_are_read_without_jax():
    out = run_in_fresh_process(
        """
        import sys
        from meshwright.planning import Target
        print(Target.from_string("v5p:8x8x8").num_devices, "jax" in sys.modules)
        """
    )
    assert out == "512 False\n"


def test_a_kind_that_there_is_not_is_told_the_nearest():
    with pytest.raises(mw.TargetError, match=r"unknown kind of target 'h10'. Did you mean 'h100'"):
        Target.of("h10:8")


@pytest.mark.parametrize("read", [Target.of, hardware_of])
def test_what_is_neither_a_target_nor_a_text_is_refused(read):
    with pytest.raises(mw.TargetError, match=r"expected a target such as 'h100:8'; received 8\."):
        read(8)
