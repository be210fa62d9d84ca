"""Where a pipeline wins and where it does not: plans whose best options are compiled.

``python benchmarks/pipeline_wins.py [NAME ...]`` adds to ``results/pipeline_wins.json``. Each pair
of a GPT and a target is planned with ``verify=1``: the best plan by the model, the same with less
ZeRO, data parallel, FSDP and the best pipeline are compiled for the target and ranked by their dry
runs. Small batches of large layers on slices of few chips are where gathers of weights between
slices take longer than a pipeline is idle; large batches, and one slice, are where they do not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

from plan_models import gpt, ids
from report import RESULTS, machine, names_on_command_line, save

import meshwright as mw
from meshwright.planning.search.plan import Option


@dataclass(frozen=True)
class Pair:
    """A GPT with a batch of ``rows`` texts of 1,024 tokens, and a target."""

    blocks: int
    width: int
    rows: int
    target: str

    def plan(self) -> mw.Plan:
        program = gpt(self.blocks, self.width, self.width // 128, 1024)
        batch = ids(self.rows, 1024)
        return mw.plan(program, batch, target=self.target, limit_s=4.0, verify=1, timeout_s=900.0)


PAIRS = {
    "4b_v5e_8_slices": Pair(16, 4096, 16, "v5e:8x(2x2)"),
    "4b_v5p_4_slices": Pair(16, 4096, 16, "v5p:4x(2x2x1)"),
    "1b_v5e_4_slices": Pair(16, 2048, 16, "v5e:4x(2x2)"),
    "1b_v5e_2_slices": Pair(16, 2048, 8, "v5e:2x(2x2)"),
    "1b_v5e_one_slice": Pair(16, 2048, 64, "v5e:4x4"),
    "4b_v5p_large_batch": Pair(16, 4096, 256, "v5p:4x(2x2x1)"),
}


def shown(option: Option) -> dict[str, Any]:
    return {
        "layouts": str(option.layouts),
        "pipeline": option.pipeline is not None,
        "modelled_s": option.time_s,
        "compiled_s": option.dry_run_time_s,
        "compiled_peak_bytes": option.dry_run_peak_bytes,
    }


def measure(name: str) -> dict[str, Any]:
    pair, begin_s, cpu_s = PAIRS[name], time.perf_counter(), time.process_time()
    plan = pair.plan()
    compiled = [o for o in (plan.chosen, *plan.runners_up) if o.dry_run_time_s is not None]
    limit = plan.limit_bytes or float("inf")
    fits = [option for option in compiled if option.held_bytes <= limit]

    def least(is_pipeline: bool) -> float | None:
        times = [o.dry_run_time_s for o in fits if (o.pipeline is not None) == is_pipeline]
        return min((t for t in times if t is not None), default=None)

    piped, plain = least(True), least(False)
    return {
        "pair": name,
        "target": pair.target,
        "blocks": pair.blocks,
        "width": pair.width,
        "rows": pair.rows,
        "chosen_is_pipeline": plan.chosen.pipeline is not None,
        "best_pipeline_s": piped,
        "best_without_s": plain,
        "without_over_pipeline": plain / piped if piped and plain else None,
        "notes": [note for note in plan.notes if "pipeline" in note],
        "options": [shown(option) for option in compiled],
        "seconds": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - cpu_s,
    }


def main(names: Iterable[str]) -> None:
    path = RESULTS / "pipeline_wins.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in names:
        row = measure(name)
        print(json.dumps(row, indent=1), flush=True)
        rows = [*(other for other in rows if other["pair"] != name), row]
        save("pipeline_wins", {"rows": rows, "machine": machine()})


if __name__ == "__main__":
    main(names_on_command_line(__doc__, PAIRS))
