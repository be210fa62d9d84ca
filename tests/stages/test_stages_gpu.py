"""Pipelines compiled for GPUs that are not there: transfers of each schedule, state and buffers.

``MESHWRIGHT_ALL_ROWS=1`` compiles every schedule on both meshes; each takes half a minute or more.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from compiled_blocks import report
from transfers import permutes

import meshwright as mw

pytestmark = [pytest.mark.targets, pytest.mark.full]

SIZES = WIDTH, HIDDEN, TOKENS = 512, 1024, 256
ROWS, MICRO_BATCHES = 8, 8
SENT_BYTES = 4 * ROWS * TOKENS * WIDTH
LAYOUTS = {"up": [None, "model"], "down": ["model", None]}
BY_ROWS, BESIDE = {"stage": 4, "data": 2}, {"stage": 2, "data": 2, "model": 2}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "circular": 2, "zero_bubble": 1}  # with their repeats
ALL = [
    *((BY_ROWS, schedule) for schedule in SCHEDULES),
    *((BESIDE, schedule) for schedule in SCHEDULES if schedule != "zero_bubble"),
]
SOME = [(BY_ROWS, "1f1b"), (BY_ROWS, "zero_bubble"), (BESIDE, "circular")]
CASES = ALL if os.environ.get("MESHWRIGHT_ALL_ROWS") else SOME
PEAKS = 0.6, 1.1  # by the model over compiled: XLA for GPUs holds more than is counted


@pytest.mark.parametrize(("mesh", "schedule"), CASES)
def test_each_schedule_sends_what_its_table_says(mesh: dict[str, int], schedule: Any) -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="pip install 'meshwright[cuda]'")
    repeats, layouts = SCHEDULES[schedule], LAYOUTS if "model" in mesh else None
    compiled, modelled = (
        report(mesh, schedule, MICRO_BATCHES, "h100:8", layouts, ahead, SIZES, ROWS, repeats)
        for ahead in (True, False)
    )
    table = mw.Pipeline("stage", MICRO_BATCHES, schedule, repeats).table(mesh["stage"])
    each_way = MICRO_BATCHES * repeats + mesh["stage"] - 1
    one_way = schedule == "gpipe" or "model" in mesh  # of a loop over ticks
    count = 2 * (each_way if one_way else len(table.ticks))
    assert permutes(modelled) == {SENT_BYTES: count}
    assert sum(permutes(compiled).values()) == count
    # XLA for GPUs may join a transfer with that of a scalar.
    assert all(0 <= nbytes - SENT_BYTES <= 8 for nbytes in permutes(compiled))
    for one in (compiled, modelled):
        assert one.ticks is not None
        assert one.ticks.idle_share() == table.idle_share()
    assert modelled.memory.argument_bytes == compiled.memory.argument_bytes
    assert modelled.peak_bytes
    assert compiled.peak_bytes
    assert PEAKS[0] <= modelled.peak_bytes / compiled.peak_bytes <= PEAKS[1]
    assert modelled.step_time_s
    assert compiled.step_time_s
    assert compiled.compiled
    assert modelled.step_time_s <= compiled.step_time_s <= 3 * modelled.step_time_s
    assert largest_copy_bytes(compiled.compiled.text) <= 4 * SENT_BYTES  # no buffer of many passes


def largest_copy_bytes(text: str) -> int:
    """Of the copies of float32 arrays in a compiled step."""
    sizes = [0]
    for dims in re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text):
        nbytes = 4
        for size in dims.split(","):
            nbytes *= int(size)
        sizes.append(nbytes)
    return max(sizes)
