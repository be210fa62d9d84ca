"""Throughput of each size of batch, as planned after ``mw.calibrate`` and as a server measures it.

``python benchmarks/serving_predicted.py`` writes ``results/serving_predicted.json``, and on a GPU
``serving_predicted.py h200:1`` writes ``results/serving_predicted_h200.json``. The machine is
calibrated right before each model is planned and run, since what else runs counts in both. Batches
are full, one after the other, on one device: many of a size before the next one, for a row that
follows 32 rows finds their arrays in the caches. Predictions are those of the compiled dry run and
of the planner's model, which is all that there is without a compiler.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import serving
from quiet import Quiet
from report import machine, save

import meshwright as mw

ROWS = (1, 8, 32)
STRETCH_S, STRETCHES = 0.25, 6  # of batches of one size, and how often each size has its turn
ASKED = 0.25  # of the measured throughput, that the prediction may be off


def predicted(
    build: Callable[[], keras.Model], target: str, compile: bool
) -> dict[int, float | None]:
    """Rows per second by size of batch."""
    with mw.abstract():
        model = build()
    (tensor,) = model.inputs
    row = jax.ShapeDtypeStruct((1, *tensor.shape[1:]), tensor.dtype)
    report = mw.dry_serve(
        model,
        row,
        strategy=mw.Placement.of(mw.Mesh({"batch": 1}), batch="batch", unmatched="replicate"),
        target=target,
        rows=ROWS,
        hardware=mw.calibrate(target),
        compile=compile,
    )
    return {batch.rows: batch.rows_per_s for batch in report.batches}


def measured(build: Callable[[], keras.Model]) -> dict[int, float]:
    """The same of a server that answers full batches."""
    model = build()
    with mw.Server(model, buckets=ROWS) as server:
        served: Any = server.model(model.name)
        row = serving.one_row(served)
        full = [{name: np.repeat(x, n, axis=0) for name, x in row.items()} for n in ROWS]
        calls = [lambda rows=rows: served.answer(rows) for rows in full]
        times = [list[float]() for _ in calls]
        for _ in range(STRETCHES):
            for call, taken in zip(calls, times, strict=True):
                taken += stretch(call)
    return {n: n / float(np.median(taken)) for n, taken in zip(ROWS, times, strict=True)}


def stretch(call: Callable[[], Any]) -> list[float]:
    """The seconds of calls one after the other, each after one of the same."""
    call()
    end_s, times = time.perf_counter() + STRETCH_S, list[float]()
    while not times or time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return times


def mobile_net() -> keras.Model:
    """Keras' MobileNet at its smallest."""
    build: Any = keras.applications.MobileNet
    return build((64, 64, 3), 0.25, weights=None, classes=10, name="mobile")


def perceptron() -> keras.Model:
    """Three dense layers of 512."""
    x: Any = keras.Input([256], name="x")
    h = x
    for _ in range(3):
        h = keras.layers.Dense(512, "relu")(h)
    return keras.Model(x, keras.layers.Dense(10)(h), name="perceptron")


MODELS = (serving.convolutional, serving.bert, mobile_net, perceptron)


def compared(build: Callable[[], keras.Model], target: str) -> list[dict[str, Any]]:
    compiled, found = predicted(build, target, compile=True), measured(build)
    modelled = predicted(build, target, compile=False)
    name = build().name
    return [
        {
            "model": name,
            "rows": n,
            "measured_rows_per_s": found[n],
            "compiled_rows_per_s": compiled[n],
            "modelled_rows_per_s": modelled[n],
            "compiled_over_measured": (compiled[n] or 0.0) / found[n],
            "modelled_over_measured": (modelled[n] or 0.0) / found[n],
        }
        for n in ROWS
    ]


def main() -> None:
    target = next((text for text in sys.argv[1:] if ":" in text), "cpu:1")
    quiet = Quiet.wait(dry="--dry" in sys.argv)
    rows = [row for build in MODELS for row in compared(build, target)]
    off = [abs(row["compiled_over_measured"] - 1) for row in rows]
    record = {"asked": ASKED, "largest_error": max(off), "rows": rows}
    record |= {"quiet": quiet.record(), "machine": machine()}
    if "--dry" not in sys.argv:
        chip = target.partition(":")[0]
        save("serving_predicted" if chip == "cpu" else f"serving_predicted_{chip}", record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
