"""Scheduled steps per second beside TensorFlow's ParameterServerStrategy, in turn.

    python benchmarks/parameter_server.py                  # all three, about 8 minutes
    python benchmarks/parameter_server.py --jobs counter
    python benchmarks/parameter_server.py --rounds 1 --dry

Two workers, two servers and a coordinator, five processes on each side. Prints ratios and writes
``benchmarks/results/parameter_server.json``.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import report
from environments import TENSORFLOW
from processes import cpu_s_of_sides, in_turn
from ps_protocol import JOBS, PsJob

HERE = Path(__file__).parent
ROUNDS = 5
OURS, PEER = "ours", "tensorflow"


def main() -> int:
    parser = report.parser(__doc__, ROUNDS, jobs=JOBS)
    TENSORFLOW.add_option(parser)
    asked = parser.parse_args()
    peer = TENSORFLOW.python(asked.peer_python)
    if peer is None:
        return 1

    def measure(name: str) -> dict[str, Any]:
        return job_result(JOBS[name], [one_round(name, peer, n) for n in range(asked.rounds)])

    table = report.servers_table
    report.measure_each("parameter_server", "job", asked.jobs, JOBS, measure, table, dry=asked.dry)
    return 0


def one_round(job: str, peer: Path, number: int) -> dict[str, dict[str, Any]]:
    """Both sides once."""
    commands = {
        OURS: [sys.executable, str(HERE / "ps_ours.py"), job],
        PEER: [str(peer), str(HERE / "ps_tensorflow_side.py"), job],
    }
    return in_turn(commands, number)


def job_result(job: PsJob, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What is kept of one job."""

    def of(side: str, what: str) -> list[float]:
        return [each[side][what] for each in rounds]

    ratios = [
        ours / peer
        for ours, peer in zip(of(OURS, "steps_per_s"), of(PEER, "steps_per_s"), strict=True)
    ]
    return {
        "job": job.name,
        "says": job.says,
        "steps_per_s": {side: statistics.median(of(side, "steps_per_s")) for side in (OURS, PEER)},
        "cpu_ms_per_step": {
            side: statistics.median(of(side, "cpu_ms_per_step")) for side in (OURS, PEER)
        },
        "check": {side: rounds[0][side]["check"] for side in (OURS, PEER)},
        "ratio": statistics.median(ratios),
        "ratio_by_round": ratios,
        "at_least": job.at_least,
        "cpu_s_by_round": {
            side: [each[side]["load"]["cpu_s"] for each in rounds] for side in rounds[0]
        },
        "cpu_s_of_sides": cpu_s_of_sides(rounds),
        "other_busy_cores": report.other_busy_cores(rounds),
        "machine": report.machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
