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

import doc_tables
from plan_models import gpt, ids
from report import RESULTS, machine, names_on_command_line, save

import meshwright as mw
from meshwright.planning.search.plan import Option
from meshwright.targets.hardware import hardware_of
from meshwright.units import bytes_text, seconds_text


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


def recorded() -> dict[str, dict[str, Any]]:
    """The rows of the record by pair, in the order of ``PAIRS``."""
    path = RESULTS / "pipeline_wins.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    by_pair = {row["pair"]: row for row in rows}
    return {name: by_pair[name] for name in PAIRS if name in by_pair}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Compiled steps of each pair, as Markdown."""
    heads = ("model, rows", "target", "best pipeline", "best without", "÷ pipeline", "chosen")
    lines = [heads, ("---",) * len(heads), *(_cells(row) for row in rows.values())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    limit = hardware_of(row["target"]).memory_bytes or 0
    piped = _best([o for o in row["options"] if o["pipeline"]], limit)
    plain = _best([o for o in row["options"] if not o["pipeline"]], limit)
    ratio = row["without_over_pipeline"]
    return (
        f"width {row['width']:,}, {row['rows']} rows",
        f"`{row['target']}`",
        piped or "not compiled",
        plain or "not compiled",
        f"**{ratio:.2f}**" if ratio else "",
        "pipeline" if row["chosen_is_pipeline"] else "none",
    )


def _best(options: list[dict[str, Any]], limit_bytes: int) -> str:
    """The fastest that fits; where none does, the fastest, which says so."""
    fits = [option for option in options if option["compiled_peak_bytes"] <= limit_bytes]
    if not options:
        return ""
    best = min(fits or options, key=lambda option: option["compiled_s"])
    text = f"{seconds_text(best['compiled_s'])}, {bytes_text(best['compiled_peak_bytes'])}"
    return text if fits else f"{text}: does not fit"


def main(names: Iterable[str]) -> None:
    for name in names:
        row = measure(name)
        print(json.dumps(row, indent=1), flush=True)
        rows = list((recorded() | {name: row}).values())
        save("pipeline_wins", {"rows": rows, "machine": machine()})
    doc_tables.show("pipeline_wins.py", table(recorded()))


if __name__ == "__main__":
    main(names_on_command_line(__doc__, PAIRS))
