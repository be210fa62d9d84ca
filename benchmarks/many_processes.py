"""Synchronous training in two processes of one core each: ours, other sums, and PyTorch's DDP.

    python benchmarks/many_processes.py                      # about 10 minutes
    python benchmarks/many_processes.py --rounds 1 --dry --jobs mlp

Both programs train the same models on rows of random numbers, with SGD and momentum; each process
has 64 rows of a step, and of the MLP 512 as well. "ours" sums gradients in memory that both
processes map, "loopback" as one vector through gloo, which uses TCP, "apart" as XLA does; DDP sums
through gloo. A round runs every side once, each in fresh processes; ratios are taken within a
round, of the fastest epochs. Ratios of the CPU time of rank 0 say more on a busy machine. Weak
scaling is CPU seconds per row in one process over those in two; two that train "side by side", each
a model of its own, sum nothing and show what the machine leaves of it.
Writes ``benchmarks/results/many_processes.json``, but not with ``--dry``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import report
from environments import TORCH
from many_processes_jobs import JOBS
from processes import SideFailed, cpu_s_of_sides, ranks_together
from quiet import Quiet

HERE = Path(__file__).parent
BESIDE = "ours side by side"
SIDES = {"ours": 2, "loopback": 2, "apart": 2, "torch": 2, "ours alone": 1, "torch alone": 1}
SIDES[BESIDE] = 2
PAIRS = (
    ("ours", "loopback"),
    ("ours", "apart"),
    ("ours", "torch"),
    ("ours alone", "torch alone"),
)
DENSE = {"ours ÷ apart": 1.5, "ours ÷ torch": 1.0}
SCALING = {"ours: CPU per row, alone ÷ in two": 0.9}
WANTED = {"mlp": DENSE | SCALING, "mlp_512": SCALING, "deep": DENSE, "cnn": {}}


def main() -> None:
    """Run the rounds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="write no results")
    TORCH.add_option(parser)
    asked = parser.parse_args()
    pythons: dict[str, Path | str | None] = {"ours": sys.executable}
    pythons["torch"] = TORCH.python(asked.peer_python)
    kept = {each["job"]: each for each in report.saved("many_processes")}
    quiet = Quiet.wait(dry=asked.dry)
    for name in asked.jobs:
        rounds = []
        for number in range(asked.rounds):
            sides = list(SIDES) if number % 2 == 0 else list(SIDES)[::-1]
            rounds.append({side: measured(side, name, asked.epochs, pythons) for side in sides})
        load = quiet.record(cpu_s_of_sides(rounds))
        kept[name] = {"job": name, **summary(name, rounds), "quiet": load}
        kept[name]["machine"] = report.machine()
        print(json.dumps(kept[name]["median"], ensure_ascii=False), flush=True)
        if not asked.dry:
            report.save("many_processes", [kept[each] for each in JOBS if each in kept])
    print(report.processes_table([kept[name] for name in asked.jobs]))


def measured(
    side: str, job: str, epochs: int, pythons: dict[str, Path | str | None]
) -> dict[str, Any]:
    """The fastest epoch of rank 0 in steps per second, and its CPU time per step."""
    processes, whose = SIDES[side], "torch" if side.startswith("torch") else "ours"
    script, python = HERE / f"many_processes_{whose}.py", pythons[whose]
    if python is None:
        return {}
    try:
        command = [str(python), str(script), job, side, str(epochs)]
        found = ranks_together(command, processes, independent=side == BESIDE)
    except SideFailed as failed:
        sys.exit(f"{side} of {job} failed:\n{failed}")
    steps = JOBS[job].steps
    return {
        "steps_per_s": steps / min(found["wall_s"][1:]),
        "cpu_s_per_step": min(found["cpu_s"][1:]) / steps,
        "loss": found["loss"],
        "load": found["load"],
    }


def summary(name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of speeds and of the ratios within each."""
    sides = [side for side in SIDES if rounds[0][side]]
    ratios: dict[str, list[float]] = {}
    for above, below in PAIRS:
        if below in sides:
            pairs = [(each[above], each[below]) for each in rounds]
            ratios[f"{above} ÷ {below}"] = [a["steps_per_s"] / b["steps_per_s"] for a, b in pairs]
            ratios[f"the same by CPU time, {above} ÷ {below}"] = [
                b["cpu_s_per_step"] / a["cpu_s_per_step"] for a, b in pairs
            ]
    for side in sides:
        if f"{side} alone" in sides:
            used = [
                (each[f"{side} alone"]["cpu_s_per_step"], each[side]["cpu_s_per_step"])
                for each in rounds
            ]
            ratios[f"{side}: CPU per row, alone ÷ in two"] = [one / two for one, two in used]
    ratios["ours: CPU per row, alone ÷ side by side"] = [
        each["ours alone"]["cpu_s_per_step"] / each[BESIDE]["cpu_s_per_step"] for each in rounds
    ]
    others = [each[side]["load"]["other_busy_cores"] for each in rounds for side in sides]
    return {
        "says": f"{JOBS[name].what}, SGD, {JOBS[name].rows_per_process} rows per process",
        "rounds": rounds,
        "steps_per_s": {
            side: statistics.median(each[side]["steps_per_s"] for each in rounds) for side in sides
        },
        "median": {what: statistics.median(values) for what, values in ratios.items()},
        "ratios": ratios,
        "wanted": WANTED[name],
        "other_busy_cores": None if None in others else max(others),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
