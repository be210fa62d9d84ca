"""Whether a step fits: as its compiler says, or within the error of an estimate.

An estimate that is near the limit says "may not fit", for a compiler may write more than the
planner's model counts. How near depends on the kind of device: for GPUs the model knows little.
"""

from __future__ import annotations

from typing import Literal

from ..targets.target import Target

Verdict = Literal["fits", "may not fit", "does not fit"]

# Peaks of compiled steps over their estimates, by kind of device: the most in nine of ten layouts,
# and in any; benchmarks/results/planned_peaks.json and plans.json.
AT_MOST = {"cpu": 1.05, "tpu": 1.42, "cuda": 1.53}
WORST = {"cpu": 1.05, "tpu": 1.6, "cuda": 2.7}


def verdict_of(
    peak_bytes: int | None, limit_bytes: int | None, target: Target, is_estimate: bool
) -> Verdict | None:
    """Whether a device has the memory; ``None`` where the peak or the limit is not known.

    >>> tpu = Target.of("v5e:2x4")
    >>> [verdict_of(peak, 16, tpu, is_estimate=True) for peak in (10, 15, 17)]
    ['fits', 'may not fit', 'does not fit']
    >>> verdict_of(15, 16, tpu, is_estimate=False)
    'fits'
    """
    if peak_bytes is None or limit_bytes is None:
        return None
    if peak_bytes > limit_bytes:
        return "does not fit"
    most = AT_MOST[target.platform] if is_estimate else 1.0
    return "fits" if most * peak_bytes <= limit_bytes else "may not fit"


def error_text(target: Target) -> str:
    """What is known of the error of estimated peaks, as the reason of "may not fit".

    >>> error_text(Target.of("cpu:8"))
    'compiled peaks of the benchmarks on CPUs are up to 1.05 times the estimates'
    """
    kind = {"cpu": "CPUs", "tpu": "TPUs", "cuda": "GPUs"}[target.platform]
    most, worst = AT_MOST[target.platform], WORST[target.platform]
    text = f"compiled peaks of the benchmarks on {kind} are up to {most:g} times the estimates"
    return text if worst == most else f"{text}, one in ten up to {worst:g}"
