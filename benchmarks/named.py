"""The named language beside Mesh-TensorFlow and beside JAX by hand: the same steps, in turn.

    python benchmarks/named.py                       # all six, about 15 minutes
    python benchmarks/named.py --jobs mlp_data
    python benchmarks/named.py --rounds 1 --dry      # does it work at all?

Prints ratios and writes ``benchmarks/results/named.json``.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import report
from environments import MESH_TENSORFLOW
from named_jobs import JOBS, SAME_LOSS, NamedJob
from processes import cpu_s_of_sides, in_turn

HERE = Path(__file__).parent
ROUNDS = 5
OURS, OURS_SCATTERED, OURS_IN_ROWS = "ours", "ours_zero_1", "ours_in_rows"
PLAIN, SCATTERED, IN_ROWS = (
    "hand_written_plain",
    "hand_written_scattered",
    "hand_written_in_rows",
)
PEER = "mesh_tensorflow"
LIMIT = 1.05  # of ours over the best step by hand; of that over Mesh-TensorFlow: 1


def main() -> int:
    parser = report.parser(__doc__, ROUNDS, jobs=JOBS)
    MESH_TENSORFLOW.add_option(parser)
    asked = parser.parse_args()
    peer = MESH_TENSORFLOW.python(asked.peer_python)

    def measure(name: str) -> dict[str, Any]:
        job = JOBS[name]
        return job_result(job, [one_round(job, peer, n) for n in range(asked.rounds)])

    report.measure_each(
        "named", "job", asked.jobs, JOBS, measure, report.named_table, dry=asked.dry
    )
    return 0 if peer else 1


def one_round(job: NamedJob, peer: Path | None, number: int) -> dict[str, dict[str, Any]]:
    """Every side once."""
    commands = {
        OURS: [sys.executable, str(HERE / "named_ours.py"), job.name],
        PLAIN: [sys.executable, str(HERE / "named_hand_written.py"), job.name],
    }
    if job.layout == "batch:all":
        commands[OURS_SCATTERED] = [*commands[OURS], "--zero", "1"]
        commands[SCATTERED] = [*commands[PLAIN], "--way", "scattered"]
    if job.layout == "d_ff:all;heads:all":
        commands[OURS_IN_ROWS] = [*commands[OURS], "--in-rows"]
        commands[IN_ROWS] = [*commands[PLAIN], "--way", "in_rows"]
    if peer is not None:
        commands[PEER] = [str(peer), str(HERE / "mesh_tensorflow_side.py"), job.name]
    return in_turn(commands, number)


def job_result(job: NamedJob, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What is kept of one job. Raises :class:`SystemExit` if the sides' losses differ."""
    sides = list(rounds[0])
    times = {side: [each[side]["ms_per_step"] for each in rounds] for side in sides}
    for when in ("first_loss", "last_loss"):
        losses = {side: rounds[0][side][when] for side in sides}
        if max(losses.values()) > (1 + SAME_LOSS) * min(losses.values()):
            sys.exit(f"{job.name}: the sides do not do the same work: {when} is {losses}")

    def fastest(*some: str) -> str:
        return min(
            (each for each in some if each in sides), key=lambda it: statistics.median(times[it])
        )

    ours = fastest(OURS, OURS_SCATTERED, OURS_IN_ROWS)
    best = fastest(PLAIN, SCATTERED, IN_ROWS)
    return {
        "job": job.name,
        "says": job.says,
        "layout": job.layout,
        "ms_per_step_by_round": times,
        "best_of_ours": ours,
        "best_by_hand": best,
        "ours_over_best": _ratios(times[ours], times[best]),
        "ours_over_peer": _ratios(times[ours], times[PEER]) if PEER in sides else [],
        "best_over_peer": _ratios(times[best], times[PEER]) if PEER in sides else [],
        "limit": LIMIT,
        "cpu_s_by_round": {
            side: [each[side]["load"]["cpu_s"] for each in rounds] for side in rounds[0]
        },
        "cpu_s_of_sides": cpu_s_of_sides(rounds),
        "other_busy_cores": report.other_busy_cores(rounds),
        "machine": report.machine(),
    }


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
