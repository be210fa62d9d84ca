"""Stages and branches across processes, each in one of its own: one device's numbers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from meshwright.launch.group import GroupOptions, run_group

PROGRAM = str(Path(__file__).with_name("piped_processes.py"))


@pytest.mark.alone
@pytest.mark.full
def test_stages_in_two_processes_have_the_numbers_of_one_device(capfd):
    assert run_group([PROGRAM], GroupOptions(processes=2, devices=2)) == 0
    out, _ = capfd.readouterr()
    results = [
        ast.literal_eval(line.split(" ", 1)[1]) for line in out.splitlines() if "1f1b" in line
    ]
    assert len(results) == 2
    for errors in results:
        assert len(errors) == 6
        assert max(errors.values()) <= 5e-6, errors
