"""How far times were off where they were checked: the ranges of the recorded benchmarks."""

from __future__ import annotations

from ..units import seconds_text

# Times of dry runs over those of the planner's model: all layouts in results/plans.json.
OF_THE_MODEL = (0.34, 0.91)
# Times that were measured over those of dry runs, on calibrated CPUs: results/ranking.json.
OF_DRY_RUNS = (0.74, 1.45)


def range_of(time_s: float, is_dry_run: bool) -> str:
    """Where a step's time may lie, by how far such times were off in the benchmarks.

    >>> range_of(0.1, is_dry_run=False)
    'dry runs in the benchmarks: 34 ms to 91 ms'
    """
    low, high = OF_DRY_RUNS if is_dry_run else OF_THE_MODEL
    who = "measured" if is_dry_run else "dry runs"
    return f"{who} in the benchmarks: {seconds_text(low * time_s)} to {seconds_text(high * time_s)}"
