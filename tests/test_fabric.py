"""``meshwright launch ... doctor``: what is measured between the processes of a group."""

from __future__ import annotations

import re

import jax
import pytest

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
    assert 'NCCL: pip install "meshwright[cuda]"' in out


@pytest.mark.parametrize(("asked", "used"), [("mpi", "mpi"), ("gloo", "gloo")])
def test_collectives_that_the_user_has_chosen_are_kept(asked, used):
    name = "jax_cpu_collectives_implementation"
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, asked)
        join._choose_collectives()
        assert getattr(jax.config, name) == used
    finally:
        jax.config.update(name, before)
