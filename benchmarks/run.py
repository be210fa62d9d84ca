"""Compares Meshwright with its peers: every side in turn, in fresh processes, several rounds.

    python benchmarks/run.py                                   # everything, about 12 minutes
    python benchmarks/run.py --jobs mlp_8 --peers hand_written
    python benchmarks/run.py --jobs none                       # only the start-up times
    python benchmarks/run.py --rounds 1 --epochs 2 --dry       # does it work at all?

Prints medians and ratios, and writes ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import digits
import report
import start_up
from environments import TENSORFLOW as TENSORFLOW_ENVIRONMENT
from processes import SideFailed, cpu_s_of_sides, run_process
from quiet import Quiet
from settings import JOBS, OURS, PAIRS, ROUNDS, TENSORFLOW, TENSORFLOW_RIGHT, Job

HERE = Path(__file__).parent
PEERS = tuple(dict.fromkeys(pair.peer for pair in PAIRS))


def main() -> int:
    arguments = parse_arguments()
    digits.prepare(arguments.data)
    peers, pythons = set(arguments.peers), dict[str, Path | None]()
    if peers & {TENSORFLOW, TENSORFLOW_RIGHT} and arguments.jobs:
        found = TENSORFLOW_ENVIRONMENT.python(arguments.peer_python)
        pythons |= {TENSORFLOW: found, TENSORFLOW_RIGHT: found}
    missing = {side for side in peers if side in pythons and pythons[side] is None}
    quiet = Quiet.wait(dry=arguments.dry)
    results, failures = [], [f"{side}: no environment" for side in sorted(missing)]
    for job in arguments.jobs:
        asked = [p.peer for p in PAIRS if p.job == job.name and p.peer in peers - missing]
        rounds, failed = run_job(job, [OURS, *asked], pythons, arguments)
        failures += failed
        if rounds and len(rounds[0]) > 1:
            load = quiet.record(cpu_s_of_sides(rounds))
            results.append(report.job_result(job, rounds) | {"quiet": load})
    rows = start_up.measure() if arguments.start_up else []
    start = {"rows": rows, "machine": report.machine(), "quiet": quiet.record()}
    print("", report.pairs_table(results), report.sides_table(results), sep="\n\n")
    print("", report.start_up_table(rows), sep="\n")
    if not arguments.dry:
        keep(results, start)
    for failure in failures:
        print(f"LEFT OUT: {failure}")
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--jobs", nargs="+", default=list(JOBS), choices=[*JOBS, "none"])
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    add("--rounds", type=int, default=ROUNDS)
    add("--epochs", type=int, help="shorten the jobs, for a trial")
    add("--dry", action="store_true", help="write no results")
    add("--no-start-up", dest="start_up", action="store_false")
    add("--data", help="an mnist.npz; otherwise the digits shipped with Meshwright")
    TENSORFLOW_ENVIRONMENT.add_option(parser)
    arguments = parser.parse_args()
    arguments.jobs = [JOBS[name] for name in arguments.jobs if name != "none"]
    arguments.dry = arguments.dry or arguments.epochs is not None
    return arguments


def run_job(
    job: Job, sides: list[str], pythons: dict[str, Any], arguments: argparse.Namespace
) -> tuple[report.Rounds, list[str]]:
    """All rounds of a job; a side that fails is dropped from it, and named."""
    rounds: report.Rounds = []
    failures: dict[str, str] = {}
    for number in range(arguments.rounds):
        # Every other round runs backwards, so that a drift of the machine favours no side.
        in_order = sides if number % 2 == 0 else sides[::-1]
        results = {}
        for side in in_order:
            if side in failures:
                continue
            try:
                results[side] = run_side(job, side, pythons.get(side), arguments.epochs)
            except SideFailed as error:
                failures[side] = f"{job.name}, {side}: {error}"
                print(failures[side], flush=True)
        rounds.append(results)
        say_round(job, number, arguments.rounds, results)
        if OURS in failures:
            return [], list(failures.values())
    kept = [side for side in sides if side not in failures]
    return [{side: each[side] for side in kept} for each in rounds], list(failures.values())


def run_side(job: Job, side: str, python: Path | None, epochs: int | None) -> dict[str, Any]:
    """One fresh process; what it printed on its last line."""
    script = TENSORFLOW if side == TENSORFLOW_RIGHT else side
    command = [str(python or sys.executable), str(HERE / f"{script}.py"), job.name]
    command += ["--right"] if side == TENSORFLOW_RIGHT else []
    command += ["--epochs", str(epochs)] if epochs else []
    return run_process(command)


def keep(results: list[dict[str, Any]], start: dict[str, Any]) -> None:
    for result in results:
        report.save(result["job"], result)
    if start["rows"]:
        report.save("start_up", start)
    print(f"\nwritten: {report.write_page().parent.relative_to(HERE.parent)}")


def say_round(job: Job, number: int, rounds: int, results: dict[str, dict[str, Any]]) -> None:
    times = "  ".join(f"{side} {results[side]['ms_per_step']:.2f}" for side in sorted(results))
    print(
        f"{time.strftime('%H:%M:%S')} {job.name} {number + 1}/{rounds}: {times} ms/step", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
