"""How long ``mw.plan`` takes for GPTs that only many devices hold, pipelines beside all else.

    python benchmarks/pipeline_plans.py            # both; a minute or two
    python benchmarks/pipeline_plans.py gpt_39b    # one; the result of the other is kept

Nothing is compiled. Seconds of the clock count what else the machine does, so its load is kept
beside them; seconds of CPU are those of all threads.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

from plan_models import gpt, ids
from quiet import Quiet
from report import RESULTS, machine, names_on_command_line, save

import meshwright as mw

NAME = "pipeline_plans"
LENGTH, ROWS = 2048, 1024
LIMIT_S = 10.0  # of the search, as by default


@dataclass(frozen=True)
class Pair:
    """A GPT of ``depth`` blocks, and the target that it is planned for."""

    depth: int
    width: int
    heads: int
    target: str


PAIRS = {
    "gpt_39b": Pair(48, 8192, 64, "h100:8x8"),
    "gpt_175b": Pair(96, 12288, 96, "v5p:8x8x8"),
}


def measure(name: str) -> dict[str, Any]:
    pair = PAIRS[name]
    program = gpt(pair.depth, pair.width, pair.heads, LENGTH)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    plan = mw.plan(program, ids(ROWS, LENGTH), target=pair.target, limit_s=LIMIT_S)
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    piped = plan.named.get("pipeline")
    return {
        "pair": name,
        "target": pair.target,
        "parameters": sum(math.prod(info.dims) for info in program.params),
        "rows": ROWS,
        "length": LENGTH,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "chosen": str(plan.chosen.layouts),
        "chosen_is_pipeline": plan.chosen.pipeline is not None,
        "chosen_s": plan.chosen.time_s,
        "chosen_peak_bytes": plan.chosen.peak_bytes,
        "best_pipeline": None if piped is None else str(piped.layouts),
        "best_pipeline_s": None if piped is None else piped.time_s,
        "notes": [note for note in plan.notes if "pipeline" in note],
        "machine": machine(),
    }


def main(names: Iterable[str]) -> None:
    path = RESULTS / f"{NAME}.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    quiet = Quiet.wait()
    for name in names:
        row = measure(name) | {"quiet": quiet.record()}
        print(json.dumps(row, indent=2), flush=True)
        rows = [*(other for other in rows if other["pair"] != name), row]
        save(NAME, rows)


if __name__ == "__main__":
    main(names_on_command_line(__doc__, PAIRS))
