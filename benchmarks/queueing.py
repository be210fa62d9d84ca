"""The least latency of requests: what the computation alone takes, if the server cost no time.

A request that arrives during a batch waits until that batch ends, and then joins the next one. No
server can avoid that. The time of a batch of each size is that of the compiled function.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.serving.options import at_once, worthwhile

ARRIVALS = 40_000


def least_ms(
    function_rows_per_s: Mapping[str, float], rows_per_s: float, row_s: float = 0.0
) -> dict[str, float]:
    """p50 and p99 at a rate of single rows that arrive by a Poisson process.

    A batch takes ``row_s`` more for each of its rows.

    >>> {name: round(ms, 1) for name, ms in least_ms({"1": 1000.0}, 1.0).items()}
    {'p50_ms': 1.0, 'p99_ms': 1.0}
    """
    timed = {int(size): int(size) / rate for size, rate in function_rows_per_s.items()}
    seconds = {size: timed[size] for size in worthwhile(timed)}
    taken, most = at_once(seconds), max(seconds)
    rng = np.random.default_rng(1)
    arrivals_s = np.cumsum(rng.exponential(1 / rows_per_s, ARRIVALS))
    latencies, free_s, first = list[float](), 0.0, 0
    while first < ARRIVALS:
        begin_s = max(free_s, arrivals_s[first])
        waiting = int(np.searchsorted(arrivals_s, begin_s, side="right")) - first
        end = first + taken[min(waiting, most)]
        size = min(size for size in seconds if size >= end - first)
        free_s = begin_s + seconds[size] + row_s * (end - first)
        latencies += (free_s - arrivals_s[first:end]).tolist()
        first = end
    p50, p99 = np.percentile(latencies, [50, 99])
    return {"p50_ms": 1e3 * float(p50), "p99_ms": 1e3 * float(p99)}
