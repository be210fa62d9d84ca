"""``meshwright launch ... doctor``: what is measured between the processes of a group."""

from __future__ import annotations

import re

import jax
import pytest

from meshwright.fabric import Backend, Timing, with_operations
from meshwright.launch import join
from meshwright.launch.group import run_module
from meshwright.launch.group_options import GroupOptions


@pytest.mark.alone
@pytest.mark.full
def test_doctor_measures_every_collective_between_processes(capfd):
    assert run_module("meshwright.fabric", GroupOptions(2, 2)) == 0
    out = capfd.readouterr().out
    assert "2 processes, started by Meshwright, over gloo" in out
    assert len(re.findall(r"rank:0\]\s+[01] .* 2 cpu", out)) == 2
    for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"):
        measured = re.findall(rf"{name} +(float32|bfloat16|int32) +\S+ .s +\S+ .iB/s", out)
        assert measured == ["float32", "bfloat16", "int32"], out
    assert len(re.findall(r"gloo +CPU( +measured){5}$", out, re.MULTILINE)) == 1
    assert re.search(r"shared memory: Linux, one CPU device in each", out)
    assert 'NCCL: pip install "meshwright[cuda]"' in out


def test_what_each_backend_can_do_is_measured_where_it_is_in_use():
    known = [Backend(name, "CPU", "always", "yes") for name in ("shared memory", "gloo", "MPI")]
    timings = [Timing("all-reduce", "int32"), Timing("permute", "bfloat16", fault="no such type")]
    shared, gloo, mpi = with_operations(known, "gloo", timings)
    assert (shared.operations["all-reduce"], shared.operations["permute"]) == (
        "float32 gradients",
        "no",
    )
    assert gloo.operations["all-reduce"] == "measured"
    assert gloo.operations["permute"] == "fails: bfloat16"
    assert set(mpi.operations.values()) == {"yes"}


@pytest.mark.parametrize(("flags", "used"), [("mpi", "mpi"), ("gloo", "gloo")])
def test_collectives_that_the_user_has_chosen_are_kept(flags, used):
    name = "jax_cpu_collectives_implementation"
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, flags)
        join._choose_collectives()
        assert getattr(jax.config, name) == used
    finally:
        jax.config.update(name, before)
