"""What Meshwright's own features cost or hide: with and without, in turn, in one process each.

    python benchmarks/features.py                       # all of them, about 12 minutes
    python benchmarks/features.py --only accumulate_mlp
    python benchmarks/features.py --rounds 1 --dry

Prints ratios and writes ``benchmarks/results/features.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import digits
import report
from environments import clean_environment
from keras_models import build_model, start_alike
from quiet import Sides
from settings import DEVICES, JOBS, Job

import meshwright as mw

ROUNDS = 5
WAYS = ("with", "without")
Run = Callable[[], tuple[float, int]]  # trains, and gives (seconds, rows trained on)


@dataclass(frozen=True)
class Feature:
    """Two ways to train the same network; the ratio is of time per row, ``with`` over ``without``.

    ``limit`` is the largest ratio that is wanted.
    """

    name: str
    says: str
    limit: float
    make: Callable[[], tuple[Run, Run]]


def timed(fit: Callable[[], Any], rows: int) -> tuple[float, int]:
    began_s = time.perf_counter()
    fit()
    return time.perf_counter() - began_s, rows


def trained(job: Job, batch_size: int | None = None, **how: Any) -> tuple[Any, Any]:
    """A strategy and a model that has taken its first steps."""
    strategy = mw.DataParallel(mw.create_mesh(list(job.mesh)), **how)
    with strategy.scope():
        model = build_model(job)
    start_alike(model, job)
    x, y = digits.load(job)
    batch_size = batch_size or job.batch_size
    rows = 8 * how.get("accumulate", 1) * batch_size
    for _ in range(2):
        strategy.fit(model, x[:rows], y[:rows], batch_size=batch_size, verbose=0)
    return strategy, model


# Checkpoints


def checkpoints(name: str, epochs: int) -> Callable[[], tuple[Run, Run]]:
    """``epochs`` of 100 steps, each followed by a save that is written while training goes on."""

    def make() -> tuple[Run, Run]:
        job = replace(JOBS[name], steps_per_epoch=100)
        strategy, model = trained(job)
        x, y = digits.load(job)

        def run(**options: Any) -> tuple[float, int]:
            def fit() -> None:
                strategy.fit(
                    model,
                    x,
                    y,
                    batch_size=job.batch_size,
                    epochs=epochs,
                    verbose=0,
                    **options,
                )

            return timed(fit, epochs * job.examples)

        def saving() -> tuple[float, int]:
            with tempfile.TemporaryDirectory() as directory:
                return run(checkpoint=directory, save_every=100)

        return saving, run

    return make


# Input


def slow_source(name: str, steps: int, batch_size: int) -> Callable[[], tuple[Run, Run]]:
    """A source that waits for half a step before each batch, beside one that does not wait."""

    def make() -> tuple[Run, Run]:
        job = replace(JOBS[name], batch_size=batch_size)
        strategy, model = trained(job)
        x, y = digits.load(job)

        def batches(wait_s: float) -> Iterator[Any]:
            for number in range(steps):
                if wait_s:
                    time.sleep(wait_s)
                first = number * batch_size % (len(x) - batch_size + 1)
                rows = slice(first, first + batch_size)
                yield x[rows], y[rows]

        def run(wait_s: float = 0.0) -> tuple[float, int]:
            def fit() -> None:
                source = batches(wait_s)
                strategy.fit(model, source, steps_per_epoch=steps, shuffle=False, verbose=0)

            return timed(fit, steps * batch_size)

        run()
        step_s = statistics.median(run()[0] for _ in range(3)) / steps
        return lambda: run(step_s / 2), run

    return make


# Accumulation


def accumulation(name: str, steps: int) -> Callable[[], tuple[Run, Run]]:
    """Four micro-batches of 32 for one step, beside batches of 128."""

    def make() -> tuple[Run, Run]:
        job = replace(JOBS[name], steps_per_epoch=steps)

        def side(batch_size: int, **how: Any) -> Run:
            strategy, model = trained(job, batch_size, **how)
            x, y = digits.load(job)
            return lambda: timed(
                lambda: strategy.fit(model, x, y, batch_size=batch_size, verbose=0), job.examples
            )

        return side(32, accumulate=4), side(128)

    return make


FEATURES = {
    feature.name: feature
    for feature in (
        Feature(
            "checkpoint_mlp",
            "MLP: a checkpoint every 100 steps ÷ none, time",
            1.05,
            checkpoints("mlp_8", 10),
        ),
        Feature(
            "checkpoint_convolutional",
            "convolutional net: a checkpoint every 100 steps ÷ none, time",
            1.05,
            checkpoints("convolutional_8", 1),
        ),
        Feature(
            "prefetch_mlp",
            "MLP, batch of 2048: a source that takes half a step ÷ one that takes none, time",
            1.05,
            slow_source("mlp_8", 100, 2048),
        ),
        Feature(
            "prefetch_convolutional",
            "convolutional net: a source that takes half a step ÷ one that takes none, time",
            1.05,
            slow_source("convolutional_8", 60, 128),
        ),
        Feature(
            "accumulate_mlp",
            "MLP: accumulate=4 of 32 rows ÷ batches of 128, time per row",
            1 / 0.9,
            accumulation("mlp_8", 200),
        ),
        Feature(
            "accumulate_convolutional",
            "convolutional net: accumulate=4 of 32 rows ÷ batches of 128, time per row",
            1 / 0.9,
            accumulation("convolutional_8", 20),
        ),
    )
}


def measure(feature: Feature, rounds: int) -> dict[str, Any]:
    """Both ways in turn, every other round the other way round."""
    mw.virtual_devices(DEVICES)
    ways = feature.make()
    times: list[dict[int, float]] = []
    sides = Sides()
    for number in range(rounds):
        found = {}
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            with sides.runs(WAYS[which]):
                seconds, rows = ways[which]()
            found[which] = 1e6 * seconds / rows
        times.append(found)
    ratios = [found[0] / found[1] for found in times]
    return {
        "name": feature.name,
        "says": feature.says,
        "limit": feature.limit,
        "ratio": statistics.median(ratios),
        "ratio_by_round": ratios,
        "us_per_row_with": [found[0] for found in times],
        "us_per_row_without": [found[1] for found in times],
        "cpu_s_of_sides": sides.cpu_s,
        "machine": report.machine(),
    }


def main() -> int:
    parser = report.parser(__doc__, ROUNDS, only=FEATURES)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_this_process:
        (name,) = asked.only
        print(json.dumps(measure(FEATURES[name], asked.rounds)))
        return 0
    digits.prepare(None)

    def run(name: str) -> dict[str, Any]:
        return in_fresh_process(name, asked.rounds)

    report.measure_each(
        "features", "name", asked.only, FEATURES, run, report.features_table, dry=asked.dry
    )
    return 0


def in_fresh_process(name: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--in-this-process"]
    command += ["--only", name, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
