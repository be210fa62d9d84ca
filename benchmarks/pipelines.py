"""A small GPT in two stages of one core each: ours, unpipelined, and torch.distributed.pipelining.

    python benchmarks/pipelines.py                           # about 10 minutes
    python benchmarks/pipelines.py --rounds 1 --steps 5 --dry

Every side trains the same model on the same batch, cut into the same micro-batches. A round runs
every side once, each in fresh processes; ratios are taken within a round, of the median step after
the first two. ``one device`` takes one micro-batch after the other in one process; the ideal of a
schedule is its time, shared out over the stages, and the idle share of its tick table on top.
Writes ``benchmarks/results/pipelines.json``, but not with ``--dry``.
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
from pipelines_jobs import MICRO_BATCHES, STAGES, WHAT
from processes import SideFailed, cpu_s_of_sides, ranks_together
from quiet import Quiet

import meshwright as mw

HERE = Path(__file__).parent
OURS = {"one device": 1, "data": 2, "gpipe": 2, "1f1b": 2, "1f1b, recomputed": 2, "zero_bubble": 2}
PEERS = {"torch one device": 1, "torch gpipe": 2, "torch 1f1b": 2}  # -> processes
PAIRS = {  # speed of one over that of another, and what is wanted
    ("gpipe", "one device"): None,
    ("1f1b", "one device"): None,
    ("zero_bubble", "one device"): None,
    ("1f1b", "data"): None,
    ("1f1b", "1f1b, recomputed"): None,
    ("zero_bubble", "1f1b"): 1.0,
    ("gpipe", "torch gpipe"): 1.0,
    ("1f1b", "torch 1f1b"): 1.0,
    ("one device", "torch one device"): None,
}
MOST_OVER_IDEAL = 1.15


def main() -> None:
    """Run the rounds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--sides", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--dry", action="store_true", help="write no results")
    TORCH.add_option(parser)
    asked = parser.parse_args()
    peer = TORCH.python(asked.peer_python) if set(asked.sides) & set(PEERS) else None
    sides = [side for side in asked.sides if side in OURS or peer is not None]
    rounds, quiet = [], Quiet.wait(dry=asked.dry)
    for number in range(asked.rounds):
        order = sides if number % 2 == 0 else sides[::-1]
        rounds.append({side: measured(side, asked.steps, peer) for side in order})
        print(json.dumps({side: found["ms"] for side, found in rounds[-1].items()}), flush=True)
    load = {"quiet": quiet.record(cpu_s_of_sides(rounds)), "machine": report.machine()}
    found = {"what": WHAT, **summary(rounds), "rounds": rounds, **load}
    if not asked.dry:
        report.save("pipelines", [found])
        report.write_page()
    print(report.pipelines_table(found))


def measured(side: str, steps: int, peer: Path | None) -> dict[str, Any]:
    """The fastest step of rank 0 in milliseconds, and its least CPU time."""
    python, whose = (sys.executable, "ours") if side in OURS else (peer, "torch")
    command = [str(python), str(HERE / f"pipelines_{whose}.py"), side, str(steps)]
    try:
        found = ranks_together(command, (OURS | PEERS)[side])
    except SideFailed as failed:
        sys.exit(f"{side} failed:\n{failed}")
    wall_s, cpu_s = found["wall_s"][2:], found["cpu_s"][2:]
    return {"ms": 1000 * min(wall_s), "cpu_ms": 1000 * min(cpu_s), "load": found["load"]}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios within each round: of speeds, and of a step to the ideal of its table."""
    ratios = {
        f"{one} ÷ {other}": [each[other]["ms"] / each[one]["ms"] for each in rounds]
        for one, other in PAIRS
        if {one, other} <= set(rounds[0])
    }
    ratios_of_cpu = {
        f"{one} ÷ {other}": [each[other]["cpu_ms"] / each[one]["cpu_ms"] for each in rounds]
        for one, other in PAIRS
        if {one, other} <= set(rounds[0])
    }
    wanted = {f"{one} ÷ {other}": at_least for (one, other), at_least in PAIRS.items()}
    over_ideal, over_ms_per_tick = dict[str, list[float]](), dict[str, float]()
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        if not {schedule, "one device"} <= set(rounds[0]):
            continue
        table = mw.Pipeline("stage", MICRO_BATCHES, schedule).table(STAGES)
        steps = [each[schedule]["ms"] for each in rounds]
        ideals = [each["one device"]["ms"] / STAGES / (1 - table.idle_share()) for each in rounds]
        pairs = list(zip(steps, ideals, strict=True))
        over_ideal[schedule] = [step / ideal for step, ideal in pairs]
        over = [(step - ideal) / len(table.ticks) for step, ideal in pairs]
        over_ms_per_tick[schedule] = statistics.median(over)
    others = [found["load"]["other_busy_cores"] for each in rounds for found in each.values()]
    return {
        "ms_per_step": {
            side: statistics.median(each[side]["ms"] for each in rounds) for side in rounds[0]
        },
        "ratios": ratios,
        "ratios_of_cpu_time_of_rank_0": ratios_of_cpu,
        "wanted": {name: wanted[name] for name in ratios},
        "over_ideal": over_ideal,
        "most_over_ideal": MOST_OVER_IDEAL,
        "over_ms_per_tick": over_ms_per_tick,
        "other_busy_cores": None if None in others else max(others),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
