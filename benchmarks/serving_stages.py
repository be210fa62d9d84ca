"""A model served by two stages: batches that follow each other beside one batch at a time.

``python benchmarks/serving_stages.py`` writes ``results/serving_stages.json``: stages in two
processes, each with a core of its own, as machines have, and in one process, whose virtual devices
share all cores, so that one stage alone keeps them busy. Both servers have the same weights on the
same devices; they are loaded in turn. Beside them is what a dry run of the two stages says, by the
rates that ``mw.calibrate`` measured just before with a core for each of two devices.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np
from quiet import Quiet, Sides
from report import machine, save

BLOCKS, WIDTH, TOKENS, HEADS = 8, 256, 64, 4
ROWS, CLIENTS, ROUNDS, ROUND_S = 8, 8, 5, 2.0
WAYS = {"following": None, "one at a time": 1}  # batches in flight


def build() -> Any:
    """Blocks of attention and two dense layers, and a class."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    x = keras.Input([TOKENS, WIDTH], name="x")
    h: Any = x
    for _ in range(BLOCKS):
        y = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h)
        h = layers.LayerNormalization()(h + y)
        y = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(h))
        h = layers.LayerNormalization()(h + y)
    return keras.Model(x, layers.Dense(2, name="class")(h[:, 0]), name="blocks")


async def closed_loop(model: Any, batch: Any) -> float:
    """Rows per second of clients that wait for their answers."""
    begin_s, answered = time.perf_counter(), 0

    async def client() -> None:
        nonlocal answered
        while time.perf_counter() - begin_s < ROUND_S:
            await model.predict(batch)
            answered += ROWS

    await asyncio.gather(*[client() for _ in range(CLIENTS)])
    return answered / (time.perf_counter() - begin_s)


def measured(path: Path) -> None:
    """What rank 0, or the only process, finds; the others compute with it."""
    import jax

    import meshwright as mw

    model = build()
    mesh = mw.create_mesh({"stage": 2}, devices=jax.devices()[:2])
    strategy = mw.Sharded(mesh, batch=None, pipeline=mw.Pipeline("stage", micro_batches=2))
    server = mw.Server()
    for name, in_flight in WAYS.items():
        server.add(model, strategy, name=name, buckets=[ROWS], in_flight=in_flight)
    server.load()
    if jax.process_index():
        server.work()
        return
    batch = {"x": np.random.default_rng(0).random([ROWS, TOKENS, WIDTH]).astype("float32")}
    difference = max(
        float(np.abs(server.answer(batch, name=name).outputs["class"] - model(batch["x"])).max())
        for name in WAYS
    )
    rows_per_s: dict[str, list[float]] = {name: [] for name in WAYS}
    sides = Sides()
    for _ in range(ROUNDS):
        for name, found in rows_per_s.items():
            with sides.runs(name):
                found.append(asyncio.run(closed_loop(server.model(name), batch)))
    server.close()
    fast, slow = rows_per_s.values()
    path.write_text(
        json.dumps(
            {
                "rows_per_s": {name: float(np.median(of)) for name, of in rows_per_s.items()},
                "ratio": float(np.median(np.array(fast) / slow)),
                "ratios": list(np.array(fast) / slow),
                "largest_difference_from_one_device": difference,
                "cpu_s_of_sides": sides.cpu_s,
            }
        )
    )


def predicted() -> dict[str, float | None]:
    """What the dry run says of the two stages, each on a core of its own."""
    import jax

    import meshwright as mw

    strategy = mw.Sharded(
        mw.Mesh({"stage": 2}), batch=None, pipeline=mw.Pipeline("stage", micro_batches=2)
    )
    like = jax.ShapeDtypeStruct((1, TOKENS, WIDTH), "float32")
    hardware = mw.calibrate("cpu:2")
    report = mw.dry_serve(
        build(), like, strategy=strategy, target="cpu:2", rows=[ROWS], hardware=hardware
    )
    (batch,) = report.batches
    latency_s = batch.latency_s
    return {
        "following": batch.rows_per_s,
        "one at a time": ROWS / latency_s if latency_s else None,
    }


def main() -> None:
    words = {
        "one process": [sys.executable],
        "two processes": [sys.executable, "-m", "meshwright", "launch", "--processes", "2"],
    }
    record: dict[str, Any] = {}
    quiet = Quiet.wait(dry="--dry" in sys.argv)
    expected = predicted()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        for name, start in words.items():
            subprocess.run([*start, __file__, str(path)], check=True)
            record[name] = json.loads(path.read_text())
            record[name]["predicted_rows_per_s"] = expected
            record[name]["quiet"] = quiet.record(record[name].pop("cpu_s_of_sides"))
    record["machine"] = machine()
    if "--dry" not in sys.argv:
        save("serving_stages", record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].startswith("--"):
        if (rank := os.environ.get("MESHWRIGHT_RANK")) is not None:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[int(rank)]})  # before any thread of JAX begins
        else:
            import meshwright

            meshwright.virtual_devices(2)
        measured(Path(sys.argv[1]))
    else:
        main()
