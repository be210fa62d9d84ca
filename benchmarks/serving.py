"""How a server keeps up: batch-1 beside dynamic batching, and latency under open-loop arrivals.

``python benchmarks/serving.py`` writes ``results/serving.json``, and ``serving.py serving_h200``
on another machine ``results/serving_h200.json``; ``--in-flight`` compares ``in_flight=2`` on an
accelerator in ``results/serving_in_flight.json``. Requests of one row arrive by a Poisson process,
whether or not earlier ones were answered, so that waiting is not left out (coordinated omission).
The engine is measured by itself, without HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import plan_models
from keras import layers
from queueing import least_ms
from quiet import Quiet, Sides
from report import machine, save

import meshwright as mw

SECONDS = 4.0  # of one load
ROUNDS, ROUND_S = 6, 1.5  # the two servers in turn, so that what else runs here meets both
CLIENTS = 64
MAX_ROWS = 32
LOADS = (0.25, 0.5, 0.75)


def convolutional() -> keras.Model:
    """The convolutional net of the MNIST examples."""
    x = keras.Input([28, 28, 1], name="image")
    h: Any = x
    for filters in (32, 64):
        h = layers.MaxPooling2D()(layers.Conv2D(filters, 3, activation="relu")(h))
    h = layers.Dense(128, "relu")(layers.Flatten()(h))
    return keras.Model(x, layers.Dense(10, "softmax", name="digit")(h), name="mnist")


def bert() -> keras.Model:
    """Four blocks of 128 features and 4 heads over 64 tokens, and a class."""
    return plan_models.bert(64, 8192, 128, blocks=4, heads=4, name="bert")


def bert_base() -> keras.Model:
    """BERT-base over 256 tokens: batches that keep an accelerator busy."""
    return plan_models.bert(256, 8192, 768, blocks=12, heads=12, name="base")


def one_row(model: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    (spec,) = model.inputs
    dims = (1, *spec.shape[1:])
    is_whole = "int" in spec.dtype
    value = rng.integers(0, 8192, dims) if is_whole else rng.random(dims)
    return {spec.name: value.astype(spec.dtype)}


def in_turn(*functions: Callable[[], Any], seconds: float = 4.0) -> list[float]:
    """The median seconds of each function, called one after the other."""
    times, end_s = [list[float]() for _ in functions], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for function, taken in zip(functions, times, strict=True):
            begin_s = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begin_s)
    return [float(np.median(taken)) for taken in times]


async def closed_loop(model: Any, row: Any) -> tuple[float, float]:
    """Rows per second, and per second of CPU, with clients that wait for their answers."""
    begin_s, cpu_s, answered = time.perf_counter(), time.process_time(), 0

    async def client() -> None:
        nonlocal answered
        while time.perf_counter() - begin_s < ROUND_S:
            await model.predict(row)
            answered += 1

    await asyncio.gather(*[client() for _ in range(CLIENTS)])
    wall_s = time.perf_counter() - begin_s
    return answered / wall_s, answered / (time.process_time() - cpu_s)


def median(rounds: list[tuple[float, float]], column: int) -> float:
    return float(np.median([figures[column] for figures in rounds]))


async def open_loop(model: Any, row: Any, rows_per_s: float) -> dict[str, float]:
    """Latencies of requests that arrive by themselves, from when they were due.

    A thread wakes the loop for those that are due, as sockets would: the loop's own timers are a
    millisecond late, which is longer than an answer takes.
    """
    rng = np.random.default_rng(1)
    latencies, refused, under_way = list[float](), 0, set[Any]()
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    async def one(due_s: float) -> None:
        nonlocal refused
        try:
            await model.predict(row)
        except mw.OverloadedError:
            refused += 1
            return
        latencies.append(time.perf_counter() - due_s)

    def begin(dues_s: list[float]) -> None:
        for due_s in dues_s:
            task = asyncio.ensure_future(one(due_s))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    def arrive() -> None:
        count = int(rows_per_s * SECONDS)
        dues_s = time.perf_counter() + np.cumsum(rng.exponential(1 / rows_per_s, count))
        first = 0
        while first < count:
            time.sleep(max(dues_s[first] - time.perf_counter(), 0))
            end = max(int(np.searchsorted(dues_s, time.perf_counter())), first + 1)
            loop.call_soon_threadsafe(begin, dues_s[first:end].tolist())
            first = end
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=arrive).start()
    await over.wait()
    await asyncio.gather(*under_way)
    p50, p99 = np.percentile(latencies, [50, 99])
    return {
        "offered_rows_per_s": rows_per_s,
        "answered_rows_per_s": len(latencies) / SECONDS,
        "refused": refused,
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
    }


def measure(build: Callable[[], keras.Model]) -> dict[str, Any]:
    model = build()
    begin_s = time.perf_counter()
    with mw.Server(model, buckets=[1]) as single, mw.Server(model, max_rows=MAX_ROWS) as batching:
        load_s = time.perf_counter() - begin_s
        gc.collect()
        gc.freeze()  # as `meshwright serve` does once it is ready
        sys.setswitchinterval(0.0005)  # the same
        one, many = single.model(model.name), batching.model(model.name)
        row = one_row(one)
        bare = bare_calls(many, row)
        bare_s = dict(zip(bare, in_turn(*bare.values()), strict=True))
        rates = {size: size / seconds for size, seconds in bare_s.items()}
        direct, through = in_turn(bare[1], lambda: one.answer(row))
        full = {name: np.repeat(values, MAX_ROWS, axis=0) for name, values in row.items()}
        one_s, full_s = in_turn(lambda: many.answer(row), lambda: many.answer(full))
        alone, many_rounds = list[tuple[float, float]](), list[tuple[float, float]]()
        sides = Sides()
        for _ in range(ROUNDS):
            with sides.runs("one by one"):
                alone.append(asyncio.run(closed_loop(one, row)))
            with sides.runs("batching"):
                many_rounds.append(asyncio.run(closed_loop(many, row)))
        together = median(many_rounds, 0)
        loads = [asyncio.run(open_loop(many, row, share * together)) for share in LOADS]
        by_size = {str(size): rate for size, rate in rates.items()}
        least = [least_ms(by_size, load["offered_rows_per_s"]) for load in loads]
        batches = many.status().bucket_batches
    return {
        "model": model.name,
        "load_s": load_s,
        "function_p50_ms": 1e3 * direct,
        "answer_p50_ms": 1e3 * through,
        "overhead_p50_ms": 1e3 * (through - direct),
        "full_batch_ratio": MAX_ROWS * one_s / full_s,  # of the computation alone: the most to have
        "function_rows_per_s": by_size,
        "function_ratio": max(rates.values()) / rates[1],  # without a server: no batcher has more
        "batch_1_rows_per_s": median(alone, 0),
        "batching_rows_per_s": together,
        "ratio": together / median(alone, 0),
        "ratio_per_cpu_s": median(many_rounds, 1) / median(alone, 1),
        "loads": loads,
        "cpu_s_of_sides": sides.cpu_s,
        "least": least,  # of the same loads, if a server took no time
        "batches": {str(size): count for size, count in batches.items()},
    }


def beside_one_in_flight(build: Callable[[], keras.Model], share: float = 0.4) -> dict[str, Any]:
    """What ``in_flight=2`` brings: an accelerator gets its next batch while it computes one."""
    model = build()
    with (
        mw.Server(model, buckets=[MAX_ROWS], in_flight=2) as two,
        mw.Server(model, buckets=[MAX_ROWS]) as one,
    ):
        models: dict[str, Any] = {"two": two.model(model.name), "one": one.model(model.name)}
        row = one_row(models["one"])
        (alone_s,) = in_turn(lambda: models["one"].answer(row), seconds=1.0)
        sides, rounds = Sides(), [dict[str, float]() for _ in range(ROUNDS)]
        for found in rounds:
            for name, served in models.items():
                with sides.runs(name):
                    found[name] = asyncio.run(closed_loop(served, row))[0]
        rows_per_s = float(np.median([figures["one"] for figures in rounds]))
        loads = {
            name: asyncio.run(open_loop(m, row, share * rows_per_s)) for name, m in models.items()
        }
    return {
        "model": model.name,
        "alone_ms": 1e3 * alone_s,
        "rows_per_s": rounds,
        "ratio": float(np.median([figures["two"] / figures["one"] for figures in rounds])),
        "loads": loads,
        "cpu_s_of_sides": sides.cpu_s,
    }


def bare_calls(model: Any, row: dict[str, np.ndarray]) -> dict[int, Callable[[], Any]]:
    """The compiled function alone, by the rows of a batch; each waits for its outputs."""
    import jax

    weights = model._keeper.weights.state

    def call(compiled: Any, batch: Any) -> Any:
        outputs = compiled(weights.params, weights.state, batch)
        return [np.asarray(output) for output in jax.tree.leaves(outputs)]

    calls: dict[int, Callable[[], Any]] = {}
    for shape, compiled in model.forward._compiled.items():
        arrays = [np.repeat(values, shape.rows, axis=0) for values in row.values()]
        calls[shape.rows] = functools.partial(call, compiled.call, model.source.batch(arrays))
    return calls


def kept(found: dict[str, Any], quiet: Quiet) -> dict[str, Any]:
    """What was measured, with what else the machine did."""
    return {**found, "quiet": quiet.record(found.pop("cpu_s_of_sides"))}


def main() -> None:
    quiet = Quiet.wait(dry="--dry" in sys.argv)
    if "--in-flight" in sys.argv:
        record = {"rows": [kept(beside_one_in_flight(bert_base), quiet)], "machine": machine()}
        save("serving_in_flight", record)
        print(json.dumps(record, indent=2))
        return
    rows = [kept(measure(build), quiet) for build in (convolutional, bert)]
    record = {"rows": rows, "machine": machine()}
    if "--dry" not in sys.argv:
        save(sys.argv[1] if sys.argv[1:] else "serving", record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
