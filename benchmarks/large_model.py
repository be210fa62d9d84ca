"""A GPT of 175 thousand million parameters, dry-run on a machine that could not hold one in ten.

The widths of GPT-3 (Brown et al. 2020): 96 blocks of width 12288, 2,048 tokens. Nothing of it is
allocated; recorded is also the most memory that this process and the compiling one had.

    python benchmarks/large_model.py     # some minutes; `pip install "meshwright[tpu]"`
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import plan_models

import meshwright as mw

RESULTS = Path(__file__).with_name("results") / "large_model.json"
TARGET, AXES, ROWS = "v5p:8x8x8", {"batch": 64, "model": 8}, 512


def main() -> None:
    mw.virtual_devices(1)  # nothing runs here
    begin = time.monotonic()
    program = plan_models.gpt(96, 12288, 96, 2048)
    built_s = time.monotonic() - begin
    placement = plan_models.Hand(AXES, plan_models.MEGATRON, zero=3).placement()
    strategy = mw.Sharded.from_placement(placement, mw.StepOptions(remat="block"))
    run = mw.dry_run(program, plan_models.ids(ROWS, 2048), strategy=strategy, target=TARGET)
    print(run)
    assert run.blocks is not None
    found = {
        "parameters": sum(info.nbytes for info in program.params) // 4,
        "target": TARGET,
        "axes": AXES,
        "zero": 3,
        "remat": "block",
        "tokens": ROWS * 2048,
        "blocks": run.blocks.count,
        "peak_bytes": run.peak_bytes,
        "fits": run.fits,
        "step_time_s": run.step_time_s,
        "mfu": run.mfu,
        "bound_by": run.bound_by,
        "unexpected": len(run.unexpected),
        "built_s": round(built_s, 2),
        "took_s": round(time.monotonic() - begin),
        "resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "compiler_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
